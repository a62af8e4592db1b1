"""The policy loss and its normalisation against a plain float64 oracle, values and gradients."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_exp.algo.loss import completion_mask, ppo_clip, sequence_weights
from grpo_exp.config.schema import Normalization

NORMALIZATIONS = list(Normalization)
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MAX_TOKENS = 12


@dataclass(frozen=True)
class Batch:
    """A ragged batch, padded with NaN: ``new`` and ``old`` [N, T], the rest [N]."""

    new: Tensor
    old: Tensor
    advantages: Tensor
    lengths: Tensor
    included: Tensor


def ragged_batch(lengths: list[int], seed: int, included: list[bool] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
    old = -5 * torch.rand(shape, generator=generator)
    log_ratio = 0.5 * torch.randn(shape, generator=generator)
    for edge in (1 - CLIP_LOW, 1 + CLIP_HIGH, 3.0):  # the gradient jumps there, so rounding would decide
        close = (log_ratio - math.log(edge)).abs() < 1e-4
        log_ratio = log_ratio + 1e-3 * close
    return Batch(
        new=(old + log_ratio).where(mask, math.nan),
        old=old.where(mask, math.nan),
        advantages=torch.randn(len(lengths), generator=generator),
        lengths=torch.tensor(lengths),
        included=torch.tensor(included if included is not None else [True] * len(lengths)),
    )


def token_oracle(new: float, old: float, advantage: float, dual_clip: float | None) -> tuple[float, float, bool]:
    """Loss, its derivative by ``new`` and whether the ratio was clipped, for one token."""
    ratio = math.exp(max(-20.0, min(20.0, new - old)))
    clipped_ratio = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
    plain, bounded = -ratio * advantage, -clipped_ratio * advantage
    loss, slope = (plain, plain) if plain >= bounded else (bounded, 0.0)
    if dual_clip is not None and advantage < 0 and loss > -dual_clip * advantage:
        loss, slope = -dual_clip * advantage, 0.0
    beyond = ratio > 1 + CLIP_HIGH if advantage > 0 else advantage < 0 and ratio < 1 - CLIP_LOW
    return loss, slope, beyond


def weight_oracle(lengths: list[int], included: list[bool], normalization: Normalization) -> list[float]:
    kept = [length for length, keep in zip(lengths, included, strict=True) if keep]
    result = []
    for length, keep in zip(lengths, included, strict=True):
        if not keep:
            result.append(0.0)
            continue
        match normalization:
            case Normalization.sequence_mean:
                result.append(1 / len(kept) / length)
            case Normalization.token_mean:
                result.append(1 / sum(kept))
            case Normalization.constant:
                result.append(1 / len(kept) / MAX_TOKENS)
    return result


def step_loss(batch: Batch, normalization: Normalization) -> Tensor:
    weights = sequence_weights(batch.lengths, batch.included, normalization, MAX_TOKENS)
    mask = completion_mask(batch.lengths, batch.new.shape[1])
    loss = ppo_clip(batch.new, batch.old, batch.advantages, mask, CLIP_LOW, CLIP_HIGH, None)
    return (weights.unsqueeze(1) * loss.per_token).sum()


LENGTHS = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**31 - 1)


@settings(deadline=None, max_examples=50)
@given(lengths=LENGTHS, seed=SEEDS, dual_clip=st.sampled_from([None, 3.0]))
def test_ppo_clip_equals_the_written_out_formula(lengths: list[int], seed: int, dual_clip: float | None) -> None:
    batch = ragged_batch(lengths, seed)
    new = batch.new.clone().requires_grad_()
    mask = completion_mask(batch.lengths, new.shape[1])
    result = ppo_clip(new, batch.old, batch.advantages, mask, CLIP_LOW, CLIP_HIGH, dual_clip)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), new)
    for i, length in enumerate(lengths):
        for t in range(new.shape[1]):
            got = (result.per_token[i, t].item(), gradient[i, t].item(), bool(result.clipped[i, t]))
            if t >= length:
                assert got == (0.0, 0.0, False)
                assert result.ratio[i, t].item() == 0.0
                continue
            inputs = (batch.new[i, t].item(), batch.old[i, t].item())
            loss, slope, clipped = token_oracle(*inputs, batch.advantages[i].item(), dual_clip)
            assert got[:2] == pytest.approx((loss, slope), rel=1e-6, abs=1e-6)
            assert got[2] is clipped
            assert result.ratio[i, t].item() == pytest.approx(math.exp(inputs[0] - inputs[1]), rel=1e-6, abs=1e-6)


RAGGED = st.lists(st.tuples(st.integers(1, MAX_TOKENS), st.booleans()), min_size=1, max_size=8)


@settings(deadline=None, max_examples=50)
@given(rows=RAGGED, seed=SEEDS, normalization=st.sampled_from(NORMALIZATIONS))
def test_the_loss_of_a_step_equals_the_written_out_formula(
    rows: list[tuple[int, bool]], seed: int, normalization: Normalization
) -> None:
    lengths, included = [row[0] for row in rows], [row[1] for row in rows]
    batch = ragged_batch(lengths, seed, included)
    new = batch.new.clone().requires_grad_()
    loss = step_loss(Batch(new, batch.old, batch.advantages, batch.lengths, batch.included), normalization)
    (gradient,) = torch.autograd.grad(loss, new)

    weights = weight_oracle(lengths, included, normalization)
    expected, expected_gradient = 0.0, torch.zeros_like(new)
    for i, length in enumerate(lengths):
        for t in range(length):
            value, slope, _ = token_oracle(
                batch.new[i, t].item(), batch.old[i, t].item(), batch.advantages[i].item(), None
            )
            expected += weights[i] * value
            expected_gradient[i, t] = weights[i] * slope
    assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(rows=RAGGED, normalization=st.sampled_from(NORMALIZATIONS))
def test_weights_equal_the_written_out_formula(rows: list[tuple[int, bool]], normalization: Normalization) -> None:
    lengths, included = [row[0] for row in rows], [row[1] for row in rows]
    weights = sequence_weights(torch.tensor(lengths), torch.tensor(included), normalization, MAX_TOKENS)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(weight_oracle(lengths, included, normalization), rel=1e-6)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_step_without_included_sequences_has_loss_and_gradient_zero(normalization: Normalization) -> None:
    batch = ragged_batch([3, 1], seed=0, included=[False, False])
    new = batch.new.clone().requires_grad_()
    loss = step_loss(Batch(new, batch.old, batch.advantages, batch.lengths, batch.included), normalization)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    assert new.grad is not None
    assert new.grad.abs().max().item() == 0.0


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_an_empty_completion_does_not_divide_by_zero(normalization: Normalization) -> None:
    weights = sequence_weights(torch.tensor([0, 4]), torch.tensor([True, True]), normalization, 4)
    assert weights.isfinite().all()
    assert sequence_weights(torch.tensor([0]), torch.tensor([True]), normalization, 4).isfinite().all()


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_an_excluded_sequence_leaves_numerator_and_denominator(normalization: Normalization) -> None:
    lengths = torch.tensor([2, 5, 3])
    with_it = sequence_weights(lengths, torch.tensor([True, False, True]), normalization, MAX_TOKENS)
    without = sequence_weights(lengths[[0, 2]], torch.tensor([True, True]), normalization, MAX_TOKENS)
    assert with_it.tolist() == [without[0].item(), 0.0, without[1].item()]


def test_token_counts_beyond_the_integers_of_float32_are_exact() -> None:
    lengths = torch.tensor([2**24, 1, 1, 1])
    weights = sequence_weights(lengths, torch.ones(4, dtype=torch.bool), Normalization.token_mean, 2**24)
    assert weights[0].item() == torch.tensor(1 / (2**24 + 3)).item()


# A policy with shared parameters, so that the gradient of a step is a sum over micro-batches.
VOCABULARY = 7


@dataclass(frozen=True)
class Policy:
    features: Tensor  # [N, T, 5]
    tokens: Tensor  # [N, T]
    parameters: Tensor  # [5, VOCABULARY]

    def logprobs(self, rows: list[int], width: int) -> Tensor:
        """Log-probabilities [len(rows), width], NaN beyond the width that the policy was built with."""
        logits = self.features[rows] @ self.parameters
        chosen = logits.log_softmax(-1).gather(-1, self.tokens[rows].unsqueeze(-1)).squeeze(-1)[:, :width]
        return torch.nn.functional.pad(chosen, (0, width - chosen.shape[1]), value=math.nan)


def policy_of(batch: Batch, seed: int) -> Policy:
    generator = torch.Generator().manual_seed(seed)
    shape = batch.new.shape
    return Policy(
        features=torch.randn(*shape, 5, generator=generator),
        tokens=torch.randint(VOCABULARY, shape, generator=generator),
        parameters=(0.3 * torch.randn(5, VOCABULARY, generator=generator)).requires_grad_(),
    )


def step_gradient(
    policy: Policy, batch: Batch, normalization: Normalization, micro_batches: list[list[int]], extra_width: int = 0
) -> Tensor:
    """Gradient of one optimizer step cut into ``micro_batches`` of rows, each padded by ``extra_width`` more."""
    weights = sequence_weights(batch.lengths, batch.included, normalization, MAX_TOKENS)
    total = torch.zeros_like(policy.parameters)
    for rows in micro_batches:
        width = int(batch.lengths[rows].max()) + extra_width
        new = policy.logprobs(rows, width)
        old = (new + 0.4 * torch.sin(37 * new)).detach()
        mask = completion_mask(batch.lengths[rows], width)
        loss = ppo_clip(new, old, batch.advantages[rows], mask, CLIP_LOW, CLIP_HIGH, None)
        total += torch.autograd.grad((weights[rows].unsqueeze(1) * loss.per_token).sum(), policy.parameters)[0]
    return total


CUTS = [[list(range(8))], [[0, 1], [2, 3], [4, 5], [6, 7]], [[i] for i in range(8)]]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_gradient_of_eight_samples_does_not_depend_on_the_cut(normalization: Normalization) -> None:
    """C6: 1x8, 4x2 and 8x1 micro-batches, and two ranks that hold half of the samples each, agree to 1e-6."""
    batch = ragged_batch([1, 12, 3, 7, 2, 9, 5, 4], seed=3)
    policy = policy_of(batch, seed=4)
    whole, *cuts = [step_gradient(policy, batch, normalization, cut) for cut in CUTS]
    ranks = [[[6, 0], [3, 5]], [[1], [2, 7, 4]]]
    cuts.append(sum((step_gradient(policy, batch, normalization, rank) for rank in ranks), torch.zeros(())))
    assert whole.abs().max().item() > 1e-3
    for gradient in cuts:
        torch.testing.assert_close(gradient, whole, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    rows=RAGGED,
    seed=SEEDS,
    normalization=st.sampled_from(NORMALIZATIONS),
    extra_width=st.integers(0, 3),
    data=st.data(),
)
def test_the_gradient_does_not_depend_on_cut_order_or_padding(
    rows: list[tuple[int, bool]], seed: int, normalization: Normalization, extra_width: int, data: st.DataObject
) -> None:
    batch = ragged_batch([row[0] for row in rows], seed, [row[1] for row in rows])
    policy = policy_of(batch, seed)
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)))) | {0, len(rows)})
    pieces = [order[start:end] for start, end in itertools.pairwise(cuts)]
    whole = step_gradient(policy, batch, normalization, [list(range(len(rows)))])
    cut = step_gradient(policy, batch, normalization, pieces, extra_width)
    torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)


def test_the_token_mean_is_global_and_not_a_mean_of_means() -> None:
    """C6: token losses of -1 (one token) and +3 (three tokens) average to 0.5, not to 0."""
    lengths = torch.tensor([1, 3])
    weights = sequence_weights(lengths, torch.tensor([True, True]), Normalization.token_mean, 4)
    token_loss = torch.tensor([[-1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert (weights.unsqueeze(1) * token_loss).sum().item() == 0.5


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [(Normalization.sequence_mean, 0.0), (Normalization.token_mean, 0.5), (Normalization.constant, 0.25)],
)
def test_each_normalization_gives_its_own_number(normalization: Normalization, expected: float) -> None:
    """C9: ratio 1, advantages +1 (length 1) and -1 (length 3), at most 4 tokens."""
    logprobs = torch.full((2, 3), -1.0)
    batch = Batch(logprobs, logprobs, torch.tensor([1.0, -1.0]), torch.tensor([1, 3]), torch.tensor([True, True]))
    weights = sequence_weights(batch.lengths, batch.included, normalization, 4)
    mask = completion_mask(batch.lengths, 3)
    loss = ppo_clip(batch.new, batch.old, batch.advantages, mask, CLIP_LOW, CLIP_HIGH, None)
    assert (weights.unsqueeze(1) * loss.per_token).sum().item() == pytest.approx(expected, abs=1e-7)


def test_the_mask_comes_from_lengths_and_not_from_token_values() -> None:
    """B11: pad id = eos id = 0; rows [5 6 0 0 0], [5 6 7 8 9], [0 0 0 0 0], and one cut to 2 tokens without eos."""
    mask = completion_mask(torch.tensor([3, 5, 1, 2]), 5)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]


def test_a_length_beyond_the_width_is_refused_rather_than_cut() -> None:
    with pytest.raises(ValueError, match="6 tokens does not fit in a width of 5"):
        completion_mask(torch.tensor([2, 6]), 5)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient(garbage: float, dual_clip: float | None) -> None:
    new = torch.tensor([[-1.0, garbage], [garbage, garbage]], requires_grad=True)
    old = torch.tensor([[-1.0, garbage], [garbage, -1.0]])
    mask = completion_mask(torch.tensor([1, 0]), 2)
    result = ppo_clip(new, old, torch.tensor([2.0, garbage]), mask, CLIP_LOW, CLIP_HIGH, dual_clip)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), new)
    assert result.per_token.tolist() == [[-2.0, 0.0], [0.0, 0.0]]
    assert result.ratio.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert gradient.tolist() == [[-2.0, 0.0], [0.0, 0.0]]
    assert not result.clipped.any()


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("broken", ["new", "old"])
def test_a_nan_inside_the_mask_reaches_loss_and_gradient(
    advantage: float, dual_clip: float | None, broken: str
) -> None:
    inputs = {"new": torch.tensor([[-1.0, -2.0]]), "old": torch.tensor([[-1.0, -2.0]])}
    inputs[broken][0, 0] = math.nan
    new = inputs["new"].requires_grad_()
    mask = completion_mask(torch.tensor([2]), 2)
    result = ppo_clip(new, inputs["old"], torch.tensor([advantage]), mask, CLIP_LOW, CLIP_HIGH, dual_clip)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), new)
    assert result.per_token.isnan().tolist() == [[True, False]]
    assert result.ratio.isnan().tolist() == [[True, False]]
    assert gradient.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("log_ratio", [100.0, -100.0, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_an_extreme_ratio_stays_finite(log_ratio: float, advantage: float) -> None:
    new = torch.tensor([[log_ratio]], requires_grad=True)
    mask = torch.tensor([[True]])
    result = ppo_clip(new, torch.zeros(1, 1), torch.tensor([advantage]), mask, CLIP_LOW, CLIP_HIGH, None)
    (gradient,) = torch.autograd.grad(result.per_token.sum(), new)
    assert result.ratio.item() == pytest.approx(math.exp(math.copysign(20, log_ratio)))
    assert result.per_token.isfinite().item()
    assert gradient.isfinite().item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.5, 1.0, True),
        (1.5, -1.0, False),
        (0.5, 1.0, False),
        (0.5, -1.0, True),
        (1.1, 1.0, False),
        (0.9, -1.0, False),
        (1.5, 0.0, False),
        (0.5, 0.0, False),
        (50.0, -1.0, False),
    ],
)
def test_only_the_side_that_is_active_for_the_advantage_counts_as_clipped(
    ratio: float, advantage: float, clipped: bool
) -> None:
    new = torch.tensor([[math.log(ratio)]])
    mask = torch.tensor([[True]])
    result = ppo_clip(new, torch.zeros(1, 1), torch.tensor([advantage]), mask, CLIP_LOW, CLIP_HIGH, 3.0)
    assert result.clipped.item() is clipped


def test_no_gradient_reaches_the_old_logprobs() -> None:
    new, old = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    result = ppo_clip(new, old, torch.ones(1), torch.tensor([[True]]), CLIP_LOW, CLIP_HIGH, None)
    result.per_token.sum().backward()  # type: ignore[no-untyped-call]
    assert old.grad is None
    assert not result.ratio.requires_grad
