"""The decomposition of the mismatch: that it adds up, that each part is what it is called, and what it does in a run."""

import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import linregress
from small_runs import LOCKSTEP, events, metrics, repeatable, small_config, small_trainer, status
from steps import CPU, groups, policy

from grpo_exp.algo.decomposition import Scores, alpha_of_stale, decompose, decomposition_metrics, phantom_clips
from grpo_exp.assets import locate
from grpo_exp.batch import StepBatch, build_batch
from grpo_exp.checkpoint import Progress
from grpo_exp.config.schema import PrecisionConfig
from grpo_exp.decompose import Decomposer, Fresh
from grpo_exp.errors import Interrupted
from grpo_exp.policy import Policy

TINY = locate("asset:tiny")
PARTS = ("total", "alpha", "beta", "beta_dtype", "beta_batch", "beta_engine")
CLIP = (0.2, 0.28)
SPLIT = PrecisionConfig(params="fp32", rollout="bf16")


# -- the mathematics


@dataclass(frozen=True)
class Token:
    mu: float
    own: float
    lowered: float
    alone: float
    later: float
    advantage: float


LOGPROB = st.floats(-8, 0, width=32)
TOKEN = st.builds(Token, *[LOGPROB] * 5, st.floats(-2, 2, width=32))
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=1, max_size=5)


def tensors(sequences: list[list[Token]]) -> tuple[Scores, dict[str, torch.Tensor]]:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for tokens in sequences for token in tokens], dtype=torch.float32)

    lengths = [len(tokens) for tokens in sequences]
    where = {
        "mu": column("mu"),
        "advantages": column("advantage"),
        "sequence": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        "position": torch.cat([torch.arange(length) for length in lengths]),
    }
    return Scores(*(column(name) for name in ("mu", "own", "lowered", "alone", "later"))), where


@settings(deadline=None, max_examples=100)
@given(sequences=SEQUENCES)
def test_the_parts_of_every_token_add_up(sequences: list[list[Token]]) -> None:
    parts = decompose(tensors(sequences)[0])
    assert (parts.alpha + parts.beta - parts.total).abs().max() < 1e-12
    assert (parts.beta_dtype + parts.beta_batch + parts.beta_engine - parts.beta).abs().max() < 1e-12


@settings(deadline=None, max_examples=100)
@given(sequences=SEQUENCES)
def test_the_statistics_equal_the_written_out_formulas(sequences: list[list[Token]]) -> None:
    scores, where = tensors(sequences)
    got = decomposition_metrics(decompose(scores), **where, clip=CLIP)
    tokens = [token for sequence in sequences for token in sequence]
    parts = {
        "total": [t.later - t.mu for t in tokens],
        "alpha": [t.later - t.own for t in tokens],
        "beta": [t.own - t.mu for t in tokens],
        "beta_dtype": [t.own - t.lowered for t in tokens],
        "beta_batch": [t.lowered - t.alone for t in tokens],
        "beta_engine": [t.alone - t.mu for t in tokens],
    }
    for name, values in parts.items():
        assert got.pop(f"{name}_mean") == pytest.approx(statistics.fmean(values), abs=1e-9)
        assert got.pop(f"{name}_sd") == pytest.approx(statistics.pstdev(values), abs=1e-9)
        assert got.pop(f"{name}_abs_mean") == pytest.approx(statistics.fmean(map(abs, values)), abs=1e-9)
    beyond = [
        math.exp(b) > 1 + CLIP[1] if t.advantage > 0 else t.advantage < 0 and math.exp(b) < 1 - CLIP[0]
        for t, b in zip(tokens, parts["beta"], strict=True)
    ]
    assert got.pop("phantom_clip") == pytest.approx(statistics.fmean(beyond))
    advantages = [t.advantage for t in tokens]
    varies = len(set(advantages)) > 1 and len(set(parts["beta"])) > 1
    corr = statistics.correlation(parts["beta"], advantages) if varies else math.nan
    assert got.pop("advantage_corr") == pytest.approx(corr, abs=1e-4, nan_ok=True)
    points = [(t, sum(b.own - b.mu for b in seq[: t + 1])) for seq in sequences for t in range(len(seq))]
    slope = math.nan
    if len({t for t, _ in points}) > 1:
        slope = 1000 * statistics.linear_regression([t for t, _ in points], [s for _, s in points]).slope
    assert got.pop("drift_slope") == pytest.approx(slope, rel=1e-6, abs=1e-6, nan_ok=True)
    edges = {"prob_0_1": 0, "prob_1_10": 0.01, "prob_10_50": 0.1, "prob_50_90": 0.5, "prob_90_100": 0.9, "": math.inf}
    for name, low, high in zip(edges, edges.values(), [*edges.values()][1:], strict=False):
        inside = [abs(t.own - t.mu) for t in tokens if low <= math.exp(t.mu) < high]
        assert got.pop(name) == pytest.approx(statistics.fmean(inside) if inside else math.nan, abs=1e-9, nan_ok=True)
    assert got == {}


@pytest.mark.parametrize(
    ("beta", "advantage", "is_phantom"),
    [(0.3, 1.0, True), (0.2, 1.0, False), (0.3, -1.0, False), (-0.3, -1.0, True), (-0.2, -1.0, False), (-0.3, 1.0, False),
     (0.3, 0.0, False), (-0.3, 0.0, False)],
)  # fmt: skip
def test_a_phantom_clip_is_on_the_side_that_is_active_for_the_advantage(
    beta: float, advantage: float, is_phantom: bool
) -> None:
    assert phantom_clips(torch.tensor([beta]), torch.tensor([advantage]), CLIP).tolist() == [is_phantom]


def test_alpha_of_stale_tokens_is_estimated_from_these_alone() -> None:
    d_roll, staleness = torch.tensor([0.5, -1.0, 0.25]), torch.tensor([1, 0, 3])
    assert alpha_of_stale(d_roll, staleness, -0.125) == 0.5
    assert math.isnan(alpha_of_stale(d_roll, torch.zeros(3, dtype=torch.int64), 0.0))


# -- one part at a time, with a real model


def decomposer(scorer: Policy, wall_s: float = 1.0, **probe: Any) -> Decomposer:
    config = small_config(LOCKSTEP)
    config.probe = replace(config.probe, **probe)
    return Decomposer(config, scorer, lambda: wall_s, lambda name, body: None)


def batch_of(made: list[Any], one_by_one: bool) -> StepBatch:
    algo = small_config(LOCKSTEP).algo
    return build_batch(made, algo, 10, 1 if one_by_one else 4096, CPU)


def measured(scorer: Policy, one_by_one: bool, mu: str, off: float = 0.0, move: float = 0.0) -> dict[str, float]:
    """The decomposition where ``mu`` is one of the trainer's own scores, ``off`` by so much, before a ``move``."""
    made, probe = groups(), decomposer(scorer)
    first = probe.score(batch_of(made, one_by_one), 0)
    for row, rollout in enumerate(rollout for group in made for rollout in group.rollouts):
        sequence = torch.cat([mb.sequence for mb in first.batch.micro_batches])
        rollout.mu[:] = getattr(first, mu)[sequence == row].numpy() + np.float32(off)
    fresh: Fresh = replace(first, batch=batch_of(made, one_by_one))
    with torch.no_grad():
        for parameter in scorer.model.parameters():
            parameter.add_(move * parameter.sign())
    return probe.metrics(fresh)


def sizes(found: dict[str, float]) -> dict[str, float]:
    return {part: found[f"{part}_abs_mean"] for part in PARTS[1:] if part != "beta"}


@pytest.mark.parametrize(
    ("part", "scorer", "arguments"),
    [
        ("alpha", "fp32", {"one_by_one": True, "mu": "own", "move": 1e-3}),
        ("beta_dtype", SPLIT, {"one_by_one": True, "mu": "alone"}),
        ("beta_batch", "fp32", {"one_by_one": False, "mu": "alone"}),
        ("beta_engine", "fp32", {"one_by_one": True, "mu": "own", "off": -0.01}),
    ],
)
def test_each_part_alone_is_what_it_is_called(part: str, scorer: Any, arguments: dict[str, Any]) -> None:
    found = sizes(measured(policy(TINY, scorer), **arguments))
    assert found.pop(part) > (1e-9 if part == "beta_batch" else 1e-3)
    assert found == dict.fromkeys(found, 0.0)


def test_in_fp32_the_batch_makes_no_difference_that_matters() -> None:
    """B14: one completion in a forward pass, or all."""
    scorer = policy(TINY)
    fresh = decomposer(scorer).score(batch_of(groups(), one_by_one=False), 0)
    assert float((fresh.lowered - fresh.alone).abs().max()) < 1e-5


def test_scoring_in_the_dtypes_of_the_generator_leaves_the_trainer_as_it_was() -> None:
    scorer = policy(TINY, SPLIT)
    before = [(p, p.dtype, p.detach().clone()) for p in scorer.model.parameters()]
    decomposer(scorer).score(batch_of(groups(), one_by_one=False), 0)
    for parameter, (same, dtype, value) in zip(scorer.model.parameters(), before, strict=True):
        assert (parameter is same, parameter.dtype) == (True, dtype)
        assert torch.equal(parameter, value)
    assert scorer.precision.compute == torch.float32


# -- when it is made, and what it costs


@pytest.mark.parametrize(
    ("step", "updates", "spent", "max_share", "is_made"),
    [
        (3, 3, 0.0, 0.05, True),
        (3, 0, 0.0, 0.05, True),
        (2, 2, 0.0, 0.05, False),  # not due
        (3, 3, 6.0, 0.05, False),  # 6 s of 100
        (3, 3, 4.0, 0.05, True),
        (3, 3, 0.0, 0.0, False),
    ],
)
def test_a_probe_is_made_when_it_is_due_and_not_too_dear(
    step: int, updates: int, spent: float, max_share: float, is_made: bool
) -> None:
    class Asked(Exception):
        pass

    class Source:
        def fresh_groups(self, num_groups: int) -> Any:
            assert num_groups == 3
            raise Asked

    probe = decomposer(policy(TINY), wall_s=100.0, every=4, prompts=3, max_share=max_share)
    progress = Progress(step=step, update=updates, probe_s=spent)
    source: Any = Source()
    if not is_made:
        assert probe.sample(source, progress) is None
        return
    with pytest.raises(Asked):
        probe.sample(source, progress)


def test_a_probe_that_costs_too_much_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    state = small_trainer(tmp_path, LOCKSTEP, "probe.every=1", "probe.max_share=0.0", "trainer.eval_every=0").train()
    assert state.name == "done"
    assert [row["step"] for row in metrics(tmp_path) if "probe/share" in row] == []
    assert {event["max_share"] for event in events(tmp_path, "probe_left_out")} == {0.0}


def test_a_stop_during_a_probe_loses_no_group(tmp_path: Path) -> None:
    """And what the probe computes in, right after a resume, is not taken for what the trainer computes in."""
    overrides = LOCKSTEP, "precision=fp32_rollout_bf16", "probe.every=2", "trainer.eval_every=0"

    def stopped(num_groups: int) -> Any:
        raise Interrupted

    class StopsTheProbe:
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.source.fresh_groups = stopped  # type: ignore[method-assign]

    trainer = small_trainer(tmp_path, *overrides, callbacks=[StopsTheProbe()])
    assert trainer.train().name == "preempted"
    assert status(tmp_path)["step"] == 1
    resumed = small_trainer(tmp_path, *overrides)
    assert resumed.train(resume_from_checkpoint=True).name == "done"
    assert [row["step"] for row in metrics(tmp_path) if "probe/share" in row] == [2, 4]


# -- in a run


def probes(path: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(path) if "probe/share" in row]


def check_sums(row: dict[str, Any]) -> None:
    means = {part: row[f"probe/{part}_mean"] for part in PARTS}
    assert means["alpha"] + means["beta"] == pytest.approx(means["total"], abs=1e-9)
    assert means["beta_dtype"] + means["beta_batch"] + means["beta_engine"] == pytest.approx(means["beta"], abs=1e-9)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty steps in which nothing is learnt, by an fp32 trainer from bf16 rollouts."""
    path = tmp_path_factory.mktemp("frozen") / "run"
    overrides = ["optim.lr=0", "probe.every=1", "trainer.max_steps=20", "trainer.eval_every=0", "trainer.save_every=0"]
    small_trainer(path, LOCKSTEP, "precision=fp32_rollout_bf16", *overrides).train()
    return path


def test_without_learning_alpha_is_0_and_beta_stays_what_it_is(frozen: Path) -> None:
    rows = probes(frozen)
    assert [row["step"] for row in rows] == list(range(1, 21))
    for row in rows:
        check_sums(row)
        assert row["probe/lag"] == 1
        assert [row[f"probe/alpha_{of}"] for of in ("mean", "sd", "abs_mean")] == [0.0, 0.0, 0.0]
        assert row["probe/alpha_stale"] is None
    betas = {row["probe/beta_abs_mean"] for row in rows}
    assert len(betas) == 1
    assert 1e-4 < betas.pop() < 0.1


def test_without_learning_the_gap_of_what_is_trained_does_not_grow(frozen: Path) -> None:
    """Other prompts at every step, so that its slope is 0 within an interval only."""
    for key in ("mismatch/mean", "mismatch/abs_mean"):
        points = [(row["step"], row[key]) for row in metrics(frozen) if key in row]
        assert len(points) == 20
        fit = linregress(*zip(*points, strict=True))
        assert abs(fit.slope) < 2.1 * fit.stderr + 1e-12  # the 95 % quantile of t with 18 degrees of freedom


def test_trained_tokens_of_the_current_version_have_nothing_but_beta(frozen: Path) -> None:
    for row in metrics(frozen)[1:]:
        assert row["mismatch/lag_0"] == row["mismatch/abs_mean"]


def test_a_probe_changes_nothing_of_the_training(tmp_path: Path) -> None:
    """Bit for bit, in lockstep."""
    runs = []
    for every in (0, 1):
        small_trainer(tmp_path / str(every), LOCKSTEP, f"probe.every={every}").train()
        rows = repeatable(metrics(tmp_path / str(every)))
        runs.append([{key: value for key, value in row.items() if not key.startswith("probe/")} for row in rows])
    assert runs[0] == runs[1]
    assert len(probes(tmp_path / "1")) == 4


def test_with_workers_a_probe_is_of_the_current_version(tmp_path: Path) -> None:
    """In asynchronous training, where what is trained may be of the version before."""
    small_trainer(tmp_path, "rollout=hf", "precision=bf16", "probe.every=1", "trainer.max_steps=5").train()
    rows = probes(tmp_path)
    assert len(rows) == 5
    for row in rows:
        check_sums(row)
        assert row["probe/alpha_abs_mean"] > 0
        assert row["probe/beta_abs_mean"] < 0.1
        assert 0 < row["probe/share"] < 1
    assert any(row["mismatch/lag_1"] is not None for row in rows)


@pytest.mark.parametrize("correction", ["token_icepop", "batch_norm", "beta_removal", "seq_mis"])
def test_a_run_with_a_correction_trains(tmp_path: Path, correction: str) -> None:
    overrides = [f"correction={correction}", "precision=fp32_rollout_bf16", "rollout=hf", "probe.every=0"]
    assert small_trainer(tmp_path, *overrides, "trainer.eval_every=0").train().name == "done"
    rows = metrics(tmp_path)[1:]
    assert all(row["correction/nonfinite"] == 0 for row in rows)
    assert all(row["params/changed_frac"] > 0.9 for row in rows if row["fp16/skipped_total"] == 0)
    if correction != "beta_removal":
        assert all(row["ratio/mean"] == 1.0 for row in rows)
        assert all(row["correction/weight_max"] != 1.0 for row in rows)
