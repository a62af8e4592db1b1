"""KL from the base checkpoint, entropy bonus, several updates a step: formulas, gradients, and the reference over a resume."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import LOCKSTEP, metrics, repeatable, small_config, small_trainer, status
from steps import groups, policy, step_batch
from test_resume import SAVE_ALL, At, Crash, crash, newest, same_bits
from torch import Tensor

from grpo_exp import jsonl
from grpo_exp.algo.penalty import reference_kl
from grpo_exp.batch import build_batch
from grpo_exp.checks import find_problems
from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.schema import AlgoConfig, CorrectionConfig, KlEstimator, Proximal, Weight
from grpo_exp.errors import RunFailed
from grpo_exp.passes import PassRunner
from grpo_exp.sync.shm import checksum
from grpo_exp.weights import Reference

TINY = Path(__file__).resolve().parents[1] / "grpo_exp" / "assets" / "tiny"
NEGATIVE = st.floats(-8.0, -0.125, width=32)


def oracle(new: float, reference: float, kind: KlEstimator) -> tuple[float, float]:
    """The estimate and its derivative by ``new``."""
    d = new - reference
    match kind:
        case KlEstimator.k1:
            return d, 1.0
        case KlEstimator.k2:
            return d * d / 2, d
        case KlEstimator.k3:
            return math.exp(-d) - 1 + d, 1 - math.exp(-d)


@pytest.mark.parametrize("kind", KlEstimator)
@given(values=st.lists(st.tuples(NEGATIVE, NEGATIVE), min_size=1, max_size=20))
def test_an_estimate_equals_the_written_out_formula(kind: KlEstimator, values: list[tuple[float, float]]) -> None:
    new = torch.tensor([pair[0] for pair in values], requires_grad=True)
    found = reference_kl(new, torch.tensor([pair[1] for pair in values]), kind)
    (gradient,) = torch.autograd.grad(found.sum(), new)
    expected = [oracle(*pair, kind) for pair in values]
    assert found.tolist() == pytest.approx([pair[0] for pair in expected], rel=1e-6, abs=1e-6)
    assert gradient.tolist() == pytest.approx([pair[1] for pair in expected], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", KlEstimator)
def test_a_reference_that_is_the_policy_gives_exactly_nothing_and_a_nan_stays_one(kind: KlEstimator) -> None:
    same = torch.tensor([-1.0, math.nan, -1e4])
    assert reference_kl(same, same, kind)[[0, 2]].tolist() == [0.0, 0.0]
    assert reference_kl(same, same, kind)[1].isnan()


# -- the gradient of a step


def gradient(algo: AlgoConfig, tokens: int = 4096, correction: CorrectionConfig | None = None) -> Tensor:
    """Of a step of the tiny model whose reference is a somewhat other one."""
    scorer = policy(TINY, chunk=16)
    reference = None
    if algo.kl_coef:
        reference = Reference(scorer, 1.0)
        reference.weights = [weight * 1.05 for weight in reference.weights]
    some = groups()
    some[0].rewards = [1.0] * 4  # no advantage, and in the loss all the same
    runner = PassRunner(scorer, algo, correction or CorrectionConfig(), 1.0, reference)
    batch = runner.prepare(build_batch(some, algo, 10, tokens, scorer.device))
    runner.run(batch, 1.0)
    return torch.cat([p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None])


PLAIN = AlgoConfig(group_size=4)
PENALTIES = {"kl": replace(PLAIN, kl_coef=0.5), "entropy": replace(PLAIN, entropy_coef=0.5)}
BATCH_NORM = CorrectionConfig(proximal=Proximal.recompute, weight=Weight.token_tis, weight_high=2.0, batch_norm=True)


@pytest.mark.parametrize("name", PENALTIES)
def test_the_gradient_with_a_penalty_does_not_depend_on_the_cut(name: str) -> None:
    whole = gradient(PENALTIES[name])
    assert (whole - gradient(PLAIN)).norm() > 1e-3
    for tokens in (1, 60):
        assert (gradient(PENALTIES[name], tokens) - whole).abs().max() <= 1e-6 * whole.norm()


@pytest.mark.parametrize("name", PENALTIES)
def test_the_mean_weight_of_a_step_does_not_divide_what_has_no_weight(name: str) -> None:
    algo = PENALTIES[name]
    of_penalty = gradient(algo) - gradient(PLAIN)
    together = gradient(algo, correction=BATCH_NORM)
    apart = gradient(PLAIN, correction=BATCH_NORM) + of_penalty
    assert (together - apart).abs().max() <= 2e-6 * together.norm()


def test_the_entropy_bonus_raises_the_entropy_and_the_kl_draws_back_to_the_reference() -> None:
    scorer = policy(TINY)
    tokens = step_batch().micro_batches[0].tokens
    reference = Reference(scorer, 1.0)

    def entropy_and_kl() -> tuple[float, float]:
        with torch.no_grad():
            new, entropy = scorer.logprobs(tokens, 1.0)
            return entropy.mean().item(), reference_kl(new, reference.logprobs(tokens), KlEstimator.k3).mean().item()

    at_first = entropy_and_kl()
    for algo in (replace(PLAIN, entropy_coef=1.0), replace(PLAIN, kl_coef=1.0)):
        some = groups()
        for group in some:
            group.rewards = [0.0] * 4  # nothing but the penalty
        runner = PassRunner(scorer, algo, CorrectionConfig(), 1.0, reference if algo.kl_coef else None)
        before = entropy_and_kl()
        for _ in range(5):
            runner.run(runner.prepare(build_batch(some, algo, 10, 4096, scorer.device)), 1.0)
            torch.nn.utils.clip_grad_norm_(scorer.model.parameters(), 0.1)
            for parameter in scorer.model.parameters():
                assert parameter.grad is not None
                parameter.data -= parameter.grad
                parameter.grad = None
        if algo.entropy_coef:
            assert entropy_and_kl()[0] > at_first[0] + 1e-3
        else:
            assert entropy_and_kl()[1] < before[1]


# -- runs

KL = ("algo.kl_coef=0.1", "trainer.max_steps=4")


def test_c12_the_reference_is_the_base_checkpoint_also_after_a_resume(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    overrides = (LOCKSTEP, *KL, *SAVE_ALL)
    base = small_trainer(whole, *overrides)
    expected = checksum(p.detach() for p in base.model.parameters())
    base.train()
    with pytest.raises(Crash):
        small_trainer(broken, *overrides, callbacks=[At(3, crash)]).train()
    small_trainer(broken, *overrides).train(resume_from_checkpoint=True)
    assert jsonl.read_json(newest(broken) / "trainer.json")["reference"] == expected
    same_bits(newest(whole), newest(broken))
    assert repeatable(metrics(whole)) == repeatable(metrics(broken))
    kl = [row["reference/kl"] for row in metrics(broken) if row["step"]]
    assert kl[0] == 0.0, "the policy is the reference before its first update"
    assert all(value > 0 for value in kl[1:]), "or a reference taken from the resumed weights would pass"


def test_a_base_checkpoint_that_was_changed_is_not_taken_for_the_reference(tmp_path: Path) -> None:
    base = tmp_path / "base"
    policy(TINY).model.save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((TINY / name).read_bytes())
    overrides = (LOCKSTEP, *KL, *SAVE_ALL, f"model.name_or_path={base}")
    with pytest.raises(Crash):
        small_trainer(tmp_path / "run", *overrides, callbacks=[At(2, crash)]).train()
    other = policy(TINY).model
    for parameter in other.parameters():
        parameter.data *= 1.01
    other.save_pretrained(base)
    with pytest.raises(RunFailed, match="is not the checkpoint that the run began with"):
        small_trainer(tmp_path / "run", *overrides).train(resume_from_checkpoint=True)


def test_the_reference_has_a_dtype_that_is_declared_and_read_back(tmp_path: Path) -> None:
    overrides = (
        LOCKSTEP,
        "precision=bf16",
        "precision.reference=bf16",
        *KL,
        "trainer.max_steps=2",
        "trainer.eval_every=0",
    )
    small_trainer(tmp_path, *overrides).train()
    found = jsonl.read_json(tmp_path / "manifest.json")["precision"]
    assert found["declared"]["reference"] == "bf16"
    assert found["declared"]["params"] == "fp32"
    assert {phase["reference"] for phase in found["observed"].values()} == {"bf16"}


def test_without_a_coefficient_no_reference_is_held_and_none_can_be_asked_for(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, LOCKSTEP)
    assert trainer.passes.reference is None
    assert "reference" not in trainer.read_back.audit.declared
    [problem] = find_problems(small_config(LOCKSTEP, "precision.reference=fp32"))
    assert (problem.key, problem.allowed) == ("precision.reference", "null")


def test_several_updates_compare_with_the_weights_at_the_start_of_the_step(tmp_path: Path) -> None:
    overrides = (
        LOCKSTEP, "correction=token_tis", "algo.epochs=2", "algo.mini_batches=2", "algo.kl_coef=0.01", *SAVE_ALL,
        "optim.lr=0.01",
    )  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    small_trainer(whole, *overrides).train()
    rows = [row for row in metrics(whole) if row["step"]]
    assert status(whole)["updates"] == len(rows) == 4, "versions count steps"
    assert all(abs(row["ratio/mean"] - 1) > 1e-4 for row in rows), "three of four updates are off old"
    assert all(row["staleness/max"] == 0 for row in rows)
    assert all(row["mismatch/abs_max"] < 1e-4 for row in rows), (
        "old is of the weights that sampled, not of the last update"
    )
    with pytest.raises(Crash):
        small_trainer(broken, *overrides, callbacks=[At(3, crash)]).train()
    small_trainer(broken, *overrides).train(resume_from_checkpoint=True)
    same_bits(newest(whole), newest(broken))


def test_one_update_a_step_has_a_ratio_of_exactly_one_where_old_is_compared_with(tmp_path: Path) -> None:
    small_trainer(tmp_path, LOCKSTEP, "correction=decoupled", "trainer.eval_every=0").train()
    rows = [row for row in metrics(tmp_path) if row["step"]]
    assert [(row["ratio/mean"], row["ratio/clip_frac"]) for row in rows] == [(1.0, 0.0)] * 4


@pytest.mark.parametrize("algo", ["grpo", "gspo", "cispo", "dppo_tv"])
def test_where_mu_is_old_the_ratio_is_exactly_one_and_nothing_is_clipped(algo: str) -> None:
    """Staleness 0, one epoch, fp32, and a generator that computes what the trainer does."""
    config = to_typed(compose([f"algo={algo}", "algo.group_size=4"]).config)
    scorer = policy(TINY)
    batch = step_batch(algo=config.algo)
    with torch.no_grad():
        parts = [replace(mb, mu=scorer.logprobs(mb.tokens, 1.0)[0]) for mb in batch.micro_batches]
    passes = PassRunner(scorer, config.algo, config.correction, 1.0).run(replace(batch, micro_batches=parts), 1.0)
    assert passes.ratio.eq(1.0).all()
    assert not passes.clipped.any()


BAD: list[tuple[str, Any]] = [
    ("algo.kl_coef", -0.1), ("algo.entropy_coef", math.nan), ("algo.epochs", 0), ("algo.mini_batches", 3),
    ("algo.kl_estimator", "k1"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD)
def test_a_setting_that_cannot_be_used_is_refused(key: str, value: Any) -> None:
    assert [problem.key for problem in find_problems(small_config(f"{key}={value}"))] == [key]
