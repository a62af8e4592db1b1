"""Advantages against a plain float64 oracle, and the groups that have no baseline."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_exp.algo.advantage import Advantages, group_advantages
from grpo_exp.config.schema import Advantage

NAN, INF = math.nan, math.inf
EPS = 1e-4
KINDS = list(Advantage)


def advantages(rewards: list[list[float]], kind: Advantage) -> Advantages:
    return group_advantages(torch.tensor(rewards), kind, EPS)


def oracle(rewards: list[float], kind: Advantage) -> list[float]:
    """Advantages of one group, written out; missing rewards get 0."""
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if len(finite) < 2 or max(finite) == min(finite):
        return [0.0] * len(rewards)
    result = []
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            result.append(0.0)
            continue
        match kind:
            case Advantage.grpo:
                result.append((reward - statistics.fmean(finite)) / (statistics.pstdev(finite) + EPS))
            case Advantage.dr_grpo:
                result.append(reward - statistics.fmean(finite))
            case Advantage.rloo:
                others = [r for i, r in enumerate(rewards) if i != index and math.isfinite(r)]
                result.append(reward - statistics.fmean(others))
    return result


# Multiples of 1/8 are exact in float32, so rewards are either equal or clearly apart.
REWARDS = st.one_of(st.integers(-40, 40).map(lambda n: n / 8), st.sampled_from([NAN, INF, -INF]))
BATCHES = st.integers(1, 8).flatmap(
    lambda size: st.lists(st.lists(REWARDS, min_size=size, max_size=size), min_size=1, max_size=3)
)


@settings(deadline=None, max_examples=60)
@given(rewards=BATCHES, kind=st.sampled_from(KINDS))
def test_advantages_equal_the_written_out_formula(rewards: list[list[float]], kind: Advantage) -> None:
    result = advantages(rewards, kind)
    expected = torch.tensor([oracle(group, kind) for group in rewards])
    torch.testing.assert_close(result.values, expected, rtol=1e-6, atol=1e-6)
    for index, group in enumerate(rewards):
        finite = [math.isfinite(reward) for reward in group]
        dropped = sum(finite) < 2
        equal = len({reward for reward in group if math.isfinite(reward)}) == 1
        assert result.dropped[index].item() is dropped
        assert result.zero_std[index].item() is (equal and not dropped)
        assert result.valid[index].tolist() == [ok and not dropped for ok in finite]


@settings(deadline=None, max_examples=60)
@given(rewards=BATCHES, kind=st.sampled_from(KINDS))
def test_advantages_of_a_group_sum_to_zero_and_are_never_nan(rewards: list[list[float]], kind: Advantage) -> None:
    values = advantages(rewards, kind).values
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    assert values.sum(dim=1).abs().max().item() < 1e-4


@settings(deadline=None, max_examples=40)
@given(rewards=BATCHES, kind=st.sampled_from(KINDS), seed=st.integers(0, 2**16))
def test_a_group_does_not_depend_on_order_or_on_other_groups(
    rewards: list[list[float]], kind: Advantage, seed: int
) -> None:
    together = advantages(rewards, kind).values
    order = torch.randperm(len(rewards[0]), generator=torch.Generator().manual_seed(seed))
    for index, group in enumerate(rewards):
        alone = advantages([[group[i] for i in order.tolist()]], kind).values[0]
        torch.testing.assert_close(alone, together[index][order], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_dropped_with_advantage_zero(kind: Advantage) -> None:
    """C1: the unbiased std of one value is NaN; the advantage must not be."""
    result = advantages([[3.0], [NAN]], kind)
    assert result.values.tolist() == [[0.0], [0.0]]
    assert result.dropped.tolist() == [True, True]
    assert result.valid.tolist() == [[False], [False]]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Advantage.grpo, 0.5 / (0.5 + EPS)), (Advantage.dr_grpo, 0.5), (Advantage.rloo, 1.0)],
)
@pytest.mark.parametrize("missing", [NAN, INF, -INF])
def test_missing_rewards_leave_the_baseline(kind: Advantage, expected: float, missing: float) -> None:
    """C3: rewards [1, None, 0, None] are judged against [1, 0] only."""
    result = advantages([[1.0, missing, 0.0, missing]], kind)
    assert result.values[0].tolist() == pytest.approx([expected, 0.0, -expected, 0.0])
    assert result.valid.tolist() == [[True, False, True, False]]
    assert not result.dropped.item()
    assert not result.zero_std.item()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_without_two_rewards_is_dropped_and_leaves_the_others_alone(kind: Advantage) -> None:
    """C3: a group that is missing as a whole, or but for one reward, is dropped and counted."""
    result = advantages([[NAN, NAN, INF], [NAN, 5.0, NAN], [0.0, 1.0, 2.0]], kind)
    assert result.dropped.tolist() == [True, True, False]
    assert result.values[:2].tolist() == [[0.0] * 3] * 2
    assert not result.valid[:2].any()
    assert result.values[2].tolist() == pytest.approx(oracle([0.0, 1.0, 2.0], kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rewards",
    [
        [0.3] * 8,  # the float32 std of these is 3e-8
        [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2],
        [0.1 + 0.2 - 0.3, 0.0, 0.0, 0.0],
        [1e30] * 4,
        [1e30, 1.0000001e30, 1e30, 1e30],
        [-7.1, -7.1 * (1 + 1e-7), -7.1, -7.1],
        [0.0] * 4,
        [0.7, NAN, 0.7, INF],
    ],
)
def test_a_group_of_equal_rewards_gets_exactly_zero(kind: Advantage, rewards: list[float]) -> None:
    result = advantages([rewards], kind)
    assert result.values.tolist() == [[0.0] * len(rewards)]
    assert result.zero_std.item() is True
    assert result.valid[0].tolist() == [math.isfinite(reward) for reward in rewards]


@pytest.mark.parametrize("rewards", [[1e-6, 2e-6], [1e6, 1e6 + 2], [1e-10, 0.0], [0.5, 0.5001]])
def test_rewards_that_differ_by_more_than_rounding_are_told_apart(rewards: list[float]) -> None:
    result = advantages([rewards], Advantage.dr_grpo)
    assert not result.zero_std.item()
    difference = rewards[0] - rewards[1]
    assert result.values[0].tolist() == pytest.approx([difference / 2, -difference / 2], rel=1e-2)


def test_large_rewards_do_not_overflow_in_the_variance() -> None:
    values = advantages([[1e30, -1e30]], Advantage.grpo).values
    assert values[0].tolist() == pytest.approx([1.0, -1.0])


def test_rewards_that_are_not_in_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[num_groups, G\], not \(4,\)"):
        group_advantages(torch.zeros(4), Advantage.grpo, EPS)
