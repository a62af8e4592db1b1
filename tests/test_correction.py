"""Corrections against a plain float64 oracle, their statistics, and what they may not depend on."""

import math
import statistics
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import small_config
from steps import CPU, groups, policy, runner
from torch import Tensor

from grpo_exp.algo.correction import Correction, correct, correction_metrics
from grpo_exp.assets import locate
from grpo_exp.batch import StepBatch, build_batch
from grpo_exp.checks import find_problems
from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.schema import AlgoConfig, CorrectionConfig, Normalization, Proximal, Weight
from grpo_exp.policy import Policy
from grpo_exp.weights import OlderWeights

TINY = locate("asset:tiny")
ALGO = AlgoConfig(group_size=4, normalization=Normalization.token_mean)
PRESETS = {
    name: to_typed(compose([f"correction={name}"]).config).correction
    for name in (
        *("none", "token_tis", "token_icepop", "seq_tis", "seq_mis", "geo_mask", "veto", "batch_norm", "decoupled"),
        "beta_removal",
    )
}
COMPOSED = {
    **PRESETS,
    "interpolated": replace(PRESETS["decoupled"], proximal=Proximal.interpolate),
    "interpolated seq_tis": replace(PRESETS["seq_tis"], proximal=Proximal.interpolate),
    "beta removed, icepop": replace(PRESETS["token_icepop"], proximal=Proximal.beta_removal),
    "seq_mis with a lower bound, geo, veto": replace(
        PRESETS["seq_mis"], weight_low=0.5, geo_low=0.9, geo_high=1.1, veto=0.05
    ),
    "masks alone": CorrectionConfig(geo_low=0.8, geo_high=1.2, veto=0.1),
    "seq_tis, batch norm, veto": replace(PRESETS["seq_tis"], batch_norm=True, veto=0.5),
}


@dataclass(frozen=True)
class Token:
    mu: float
    old: float
    same_weights: float = 0.0
    staleness: int = 0


Sequences = list[list[Token]]


def proximal_oracle(token: Token, kind: Proximal) -> float:
    match kind:
        case Proximal.rollout:
            return token.mu
        case Proximal.recompute:
            return token.old
        case Proximal.interpolate:
            share = (token.staleness - 1) / token.staleness if token.staleness > 0 else 0.0
            return token.mu + share * (token.old - token.mu)
        case Proximal.beta_removal:
            return token.same_weights if token.staleness else token.old


def weight_oracle(raw: float, config: CorrectionConfig) -> float:
    low, high = config.weight_low or 0.0, config.weight_high or math.inf
    match config.weight:
        case Weight.none:
            return 1.0
        case Weight.token:
            return raw
        case Weight.token_tis | Weight.seq_tis:
            return min(raw, high)
        case Weight.token_icepop | Weight.seq_mis:
            return raw if low <= raw <= high else 0.0


def oracle(sequences: Sequences, config: CorrectionConfig) -> list[tuple[float, float, float]]:
    """(proximal, raw weight, weight) of every token."""
    found = []
    for tokens in sequences:
        d_roll = [token.old - token.mu for token in tokens]
        proximal = [proximal_oracle(token, config.proximal) for token in tokens]
        log_raw = [
            d if config.proximal is Proximal.rollout else p - token.mu
            for token, p, d in zip(tokens, proximal, d_roll, strict=True)
        ]
        if config.weight in (Weight.seq_tis, Weight.seq_mis):
            log_raw = [sum(log_raw)] * len(tokens)
        keep = config.veto is None or all(math.exp(d) >= config.veto for d in d_roll)
        if config.geo_low is not None and config.geo_high is not None:
            keep = keep and config.geo_low <= math.exp(statistics.fmean(d_roll)) <= config.geo_high
        for p, raw in zip(proximal, log_raw, strict=True):
            clamped = math.exp(max(-20.0, min(20.0, raw)))
            found.append((p, math.exp(raw), keep * weight_oracle(clamped, config)))
    return found


def flat(sequences: Sequences, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([getattr(token, name) for tokens in sequences for token in tokens], dtype=dtype)


def indices(sequences: Sequences) -> Tensor:
    return torch.tensor([index for index, tokens in enumerate(sequences) for _ in tokens], dtype=torch.int64)


def corrected(sequences: Sequences, config: CorrectionConfig) -> Correction:
    mu, old, same_weights = (flat(sequences, name) for name in ("mu", "old", "same_weights"))
    return correct(mu, old, same_weights, flat(sequences, "staleness", torch.int64), indices(sequences), config)


MU = st.floats(-6, -0.125, width=32)
GAP = st.floats(-1.5, 1.5, width=32)
TOKEN = st.builds(lambda mu, gap, beta, lag: Token(mu, mu + gap, mu + beta, lag), MU, GAP, GAP, st.integers(0, 4))
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=8), min_size=1, max_size=6)
CONFIGS = st.sampled_from(list(COMPOSED))


def near_a_bound(sequences: Sequences, config: CorrectionConfig) -> bool:
    """Whether rounding decides if something is kept."""
    bounds = [b for b in (config.weight_low, config.weight_high, config.geo_low, config.geo_high, config.veto) if b]
    ratios = [raw for _, raw, _ in oracle(sequences, config)]
    for tokens in sequences:
        gaps = [token.old - token.mu for token in tokens]
        ratios += [math.exp(statistics.fmean(gaps)), *map(math.exp, gaps)]
    return any(math.isclose(ratio, bound, rel_tol=1e-4) for ratio in ratios for bound in bounds)


@settings(deadline=None, max_examples=150)
@given(sequences=SEQUENCES, name=CONFIGS)
def test_a_correction_equals_the_written_out_formulas(sequences: Sequences, name: str) -> None:
    config = COMPOSED[name]
    if near_a_bound(sequences, config):
        return
    got, expected = corrected(sequences, config), oracle(sequences, config)
    assert got.proximal.tolist() == pytest.approx([p for p, _, _ in expected], abs=1e-5)
    assert got.log_raw.double().exp().tolist() == pytest.approx([raw for _, raw, _ in expected], rel=1e-4)
    assert got.weight.tolist() == pytest.approx([w for _, _, w in expected], rel=1e-4, abs=1e-6)
    assert got.weight.dtype == torch.float32
    assert got.kept.tolist() == [w > 0 for _, _, w in expected]


@settings(deadline=None, max_examples=80)
@given(sequences=SEQUENCES, name=CONFIGS)
def test_statistics_equal_the_written_out_formulas(sequences: Sequences, name: str) -> None:
    config = COMPOSED[name]
    if near_a_bound(sequences, config):
        return
    got = correction_metrics(corrected(sequences, config), indices(sequences))
    expected = oracle(sequences, config)
    raw, weights = [r for _, r, _ in expected], [w for _, _, w in expected]
    kept = {int(s) for s, w in zip(indices(sequences), weights, strict=True) if w > 0}
    squares = sum(w * w for w in weights)
    assert got == pytest.approx(
        {
            "raw_mean": statistics.fmean(raw),
            "raw_sd": statistics.pstdev(raw),
            "raw_min": min(raw),
            "raw_max": max(raw),
            "weight_mean": statistics.fmean(weights),
            "weight_sd": statistics.pstdev(weights),
            "weight_max": max(weights),
            "ess": sum(weights) ** 2 / (len(weights) * squares) if squares else math.nan,
            "kept": statistics.fmean(w > 0 for w in weights),
            "kept_sequences": len(kept) / len(sequences),
            "nonfinite": 0,
        },
        rel=1e-3,
        abs=1e-5,
        nan_ok=True,
    )


@settings(deadline=None, max_examples=60)
@given(sequences=SEQUENCES, name=CONFIGS, data=st.data())
def test_weights_do_not_depend_on_the_cut_into_micro_batches(
    sequences: Sequences, name: str, data: st.DataObject
) -> None:
    config = COMPOSED[name]
    whole = corrected(sequences, config)
    cut = data.draw(st.integers(0, len(sequences)))
    parts = [corrected(part, config) for part in (sequences[:cut], sequences[cut:]) if part]
    for field in ("proximal", "weight", "log_raw", "kept"):
        assert torch.equal(torch.cat([getattr(part, field) for part in parts]), getattr(whole, field))


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("broken", ["mu", "old"])
def test_a_nan_stays_in_the_weight_and_is_counted(name: str, broken: str) -> None:
    """Also in a sequence that is rejected for something else: what is not a number is not left out."""
    config = COMPOSED[name]
    good = [Token(-1.0, -1.0, -1.0, 1)] * 3
    bad = replace(Token(-1.0, -9.0, math.nan, 3), **{broken: math.nan})
    got = corrected([[*good, bad], good], config)
    product = got.weight * (got.proximal - got.proximal.new_tensor([t.old for t in [*good, bad, *good]]))
    assert bool(product[3].isnan())
    assert bool(got.weight[4:].isfinite().all())
    assert correction_metrics(got, torch.tensor([0] * 4 + [1] * 3))["nonfinite"] >= 1


def test_a_weight_beyond_fp32_is_counted_and_clamped() -> None:
    got = corrected([[Token(-100.0, -1.0)] * 2, [Token(-1.0, -1.0)]], PRESETS["seq_tis"])
    assert got.weight.tolist() == [2.0, 2.0, 1.0]
    found = correction_metrics(got, torch.tensor([0, 0, 1]))
    assert found["nonfinite"] == 2
    assert found["raw_max"] == pytest.approx(math.exp(198), rel=1e-3)


def test_sequence_weights_are_summed_in_log_space() -> None:
    tokens = [Token(-50.0, -1.0), Token(-1.0, -50.0)]
    assert corrected([tokens], PRESETS["seq_tis"]).weight.tolist() == pytest.approx([1.0, 1.0])


# -- in a step


def scored(scorer: Policy) -> StepBatch:
    """A step whose mu are near what the trainer computes, so that corrections keep some tokens and reject others."""
    made = groups(seed=3)
    exact = runner(scorer).run(build_batch(made, ALGO, 10, 4096, CPU), 1.0)
    scorer.model.zero_grad()
    rng = np.random.default_rng(0)
    for row, rollout in enumerate(rollout for group in made for rollout in group.rollouts):
        noise = rng.normal(0.0, 0.02 if row % 3 else 0.5, len(rollout.mu))
        rollout.mu[:] = exact.old[exact.sequence == row].numpy() + noise
    return build_batch(made, ALGO, 10, 4096, CPU)


def step_gradient(config: CorrectionConfig, budget: int) -> tuple[float, Tensor, Tensor]:
    """Loss, gradient and weights, these in the order of sequences, of a step cut by a budget of tokens."""
    scorer = policy(TINY)
    made = scored(scorer).groups
    batch = build_batch(made, ALGO, 10, budget, CPU)
    if config.proximal is Proximal.beta_removal:
        batch = OlderWeights(scorer, 1.0, 0).score(batch, 0)
    passes = runner(scorer, ALGO, config).run(batch, 1.0)
    gradient = torch.cat([p.grad.flatten() for p in scorer.model.parameters() if p.grad is not None])
    order = torch.argsort(passes.sequence, stable=True)
    return passes.loss, gradient, passes.correction.weight[order]


@pytest.mark.parametrize(
    "name", ["none", "token_tis", "seq_mis", "geo_mask", "batch_norm", "seq_tis, batch norm, veto"]
)
def test_the_gradient_of_a_corrected_step_does_not_depend_on_the_cut(name: str) -> None:
    """C6: one micro-batch, some, and one for each completion. A sequence weight has the rounding of all its tokens."""
    whole_loss, whole, whole_weights = step_gradient(COMPOSED[name], 4096)
    assert float(whole.norm()) > 1e-3
    for budget in (60, 1):
        loss, cut, weights = step_gradient(COMPOSED[name], budget)
        assert loss == pytest.approx(whole_loss, abs=1e-6)
        assert float((cut - whole).norm() / whole.norm()) < 5e-6
        torch.testing.assert_close(weights, whole_weights, rtol=2e-5, atol=1e-6)


def test_a_rejected_sequence_stays_in_the_denominator() -> None:
    """With the same weights as without a mask, those that are kept give the same as before: nothing is scaled up."""
    plain, masked = (
        replace(PRESETS["decoupled"], geo_low=low, geo_high=high) for low, high in ((None, None), (0.95, 1.05))
    )
    assert plain.geo_low is None
    scorer = policy(TINY)
    batch = scored(scorer)
    seen = [runner(scorer, ALGO, config).run(batch, 1.0).correction.weight for config in (plain, masked)]
    kept = seen[1] > 0
    assert 0 < int(kept.sum()) < len(kept)
    assert torch.equal(seen[0][kept], seen[1][kept])
    micro_batch = batch.micro_batches[0]
    assert float(micro_batch.weights[0]) == pytest.approx(1 / batch.num_tokens)


def test_batch_norm_makes_the_mean_weight_1() -> None:
    """Over tokens, or over sequences where these have the weights."""
    for name in ("batch_norm", "seq_tis, batch norm, veto"):
        config = replace(COMPOSED[name], veto=None)
        scorer = policy(TINY)
        batch = scored(scorer)
        passes = runner(scorer, ALGO, config).run(batch, 1.0)
        weight = passes.correction.weight
        if config.weight is Weight.seq_tis:
            weight = torch.stack([weight[passes.sequence == s][0] for s in torch.unique(passes.sequence)])
        assert float(weight.mean()) == pytest.approx(1.0, abs=1e-6)
        gradient, loss = [p.grad.clone() for p in scorer.model.parameters() if p.grad is not None], passes.loss
        scorer.model.zero_grad()
        plain = runner(scorer, ALGO, replace(config, batch_norm=False)).run(batch, 1.0)
        mean = float(plain.correction.weight[0] / passes.correction.weight[0])
        assert loss == pytest.approx(plain.loss / mean, rel=1e-5)
        for normed, p in zip(gradient, scorer.model.parameters(), strict=True):
            assert p.grad is not None
            torch.testing.assert_close(normed, p.grad / mean, rtol=1e-5, atol=1e-8)


def test_beta_removal_scores_stale_tokens_under_the_weights_that_sampled_them() -> None:
    """Then nothing is left of a mu that another engine was off with, and the ratio is what the policy moved by."""
    scorer = policy(TINY)
    older = OlderWeights(scorer, 1.0, max_staleness=2)
    made = groups(seed=5)
    truth: list[Tensor] = []
    for version in range(3):  # 0 and 1 are to be remembered, 2 is trained
        batch = build_batch(made, ALGO, 10, 60, CPU, version=version)
        with torch.no_grad():
            truth.append(torch.cat([scorer.logprobs(mb.tokens, 1.0)[0] for mb in batch.micro_batches]))
            if version < 2:
                older.score(replace(batch, micro_batches=[fresh(mb) for mb in batch.micro_batches]), version)
                for parameter in scorer.model.parameters():
                    parameter.add_(
                        0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
                    )
    for index, rollout in enumerate(rollout for group in made for rollout in group.rollouts):
        rollout.versions[:] = index % 3
    before = [p.detach().clone() for p in scorer.model.parameters()]
    batch = older.score(build_batch(made, ALGO, 10, 60, CPU, version=2), 2)
    assert all(torch.equal(p, old) for p, old in zip(scorer.model.parameters(), before, strict=True))
    passes = runner(scorer, ALGO, PRESETS["beta_removal"]).run(batch, 1.0)
    expected = torch.stack(truth)[2 - passes.staleness, torch.arange(len(passes.old))]
    assert {0, 1, 2} == set(passes.staleness.tolist())
    torch.testing.assert_close(passes.correction.proximal, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(passes.ratio, (passes.new - expected).exp(), rtol=1e-5, atol=1e-6)
    assert bool((passes.ratio[passes.staleness == 0] == 1.0).all())


def fresh(micro_batch: "object") -> "object":
    return replace(micro_batch, staleness=torch.zeros_like(micro_batch.staleness))  # type: ignore[attr-defined, type-var]


# -- what goes together


def problems(**values: object) -> list[str]:
    config = small_config("rollout=hf")
    staleness = values.pop("max_staleness", 1)
    config.rollout.max_staleness = staleness  # type: ignore[assignment]
    config.correction = CorrectionConfig(**values)  # type: ignore[arg-type]
    return [problem.key for problem in find_problems(config)]


@pytest.mark.parametrize("name", COMPOSED)
def test_what_goes_together_is_accepted(name: str) -> None:
    assert problems(**vars(COMPOSED[name]), max_staleness=2) == []


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"weight": Weight.token}, ["proximal"]),
        ({"weight": Weight.token_tis, "weight_high": 2.0}, ["proximal"]),
        ({"proximal": Proximal.recompute, "weight": Weight.token_tis}, ["weight_high"]),
        ({"proximal": Proximal.recompute, "weight": Weight.token_icepop}, ["weight_high", "weight_low"]),
        ({"proximal": Proximal.recompute, "weight": Weight.seq_mis}, ["weight_high"]),
        ({"proximal": Proximal.recompute, "weight": Weight.token, "weight_high": 2.0}, ["weight_high"]),
        (
            {"proximal": Proximal.recompute, "weight": Weight.seq_tis, "weight_high": 2.0, "weight_low": 0.5},
            ["weight_low"],
        ),
        ({"proximal": Proximal.recompute, "weight": Weight.seq_tis, "weight_high": -1.0}, ["weight_high"]),
        ({"proximal": Proximal.recompute, "weight": Weight.seq_tis, "weight_high": math.inf}, ["weight_high"]),
        (
            {"proximal": Proximal.recompute, "weight": Weight.token_icepop, "weight_high": 0.5, "weight_low": 5.0},
            ["weight_low"],
        ),
        ({"weight_high": 2.0}, ["weight_high"]),
        ({"batch_norm": True}, ["batch_norm"]),
        (
            {"proximal": Proximal.recompute, "weight": Weight.seq_mis, "weight_high": 2.0, "batch_norm": True},
            ["batch_norm"],
        ),
        ({"geo_low": 0.99}, ["geo_high"]),
        ({"geo_high": 1.01}, ["geo_low"]),
        ({"geo_low": 1.01, "geo_high": 1.02}, ["geo_low"]),
        ({"geo_low": 0.9, "geo_high": 0.95}, ["geo_high"]),
        ({"veto": 1.0}, ["veto"]),
        ({"veto": math.nan}, ["veto"]),
        ({"proximal": Proximal.interpolate, "weight": Weight.token}, ["proximal"]),
    ],
)
def test_what_would_do_nothing_or_contradicts_itself_is_refused(values: dict[str, object], keys: list[str]) -> None:
    assert problems(**values) == [f"correction.{key}" for key in keys]
