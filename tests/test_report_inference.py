"""What is concluded from a comparison, held against scipy, and the coverage of the intervals by simulation."""

import math
import random

import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_exp.report.inference import (
    MIN_CELLS,
    Refusal,
    aggregates,
    equivalence,
    holm,
    iqm,
    minimum_detectable,
    p_value,
    pairing_correlation,
    probability_of_improvement,
    question_error,
    wilson,
)
from grpo_exp.report.stats import estimate, paired_difference, t_quantile, variance, welch

SHARES = st.floats(0, 1).map(lambda value: round(value, 4))


@given(count=st.integers(0, 60), more=st.integers(0, 60), level=st.sampled_from([0.8, 0.95, 0.99]))
@settings(max_examples=60, deadline=None)
def test_wilson_intervals_equal_those_of_scipy(count: int, more: int, level: float) -> None:
    assume(count + more > 0)
    expected = scipy.stats.binomtest(count, count + more).proportion_ci(level, method="wilson")
    found = wilson(count, count + more, level)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_no_run_has_no_share_and_an_impossible_count_is_refused() -> None:
    assert wilson(0, 0) is None
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


@given(pairs=st.lists(st.tuples(SHARES, SHARES), min_size=3, max_size=10))
@settings(max_examples=60, deadline=None)
def test_p_values_and_the_pairing_correlation_equal_those_of_scipy(pairs: list[tuple[float, float]]) -> None:
    a, b = ({str(seed): pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1))
    left, right = list(a.values()), list(b.values())
    assume(min(variance(left), variance(right), variance([x - y for x, y in pairs])) > 1e-6)
    assert p_value(paired_difference(a, b)) == pytest.approx(scipy.stats.ttest_rel(left, right).pvalue, abs=1e-9)
    expected = scipy.stats.ttest_ind(left, right, equal_var=False).pvalue
    assert p_value(welch(left, right)) == pytest.approx(expected, abs=1e-9)
    assert pairing_correlation(a, b) == pytest.approx(scipy.stats.pearsonr(left, right).statistic, abs=1e-9)


def test_too_few_values_give_no_p_value_no_correlation_and_no_detectable_difference() -> None:
    single = paired_difference({"0": 1.0}, {"0": 0.0})
    assert (p_value(single), equivalence(single, 0.1), minimum_detectable(single)) == (None, None, None)
    assert pairing_correlation({"0": 1.0, "1": 2.0}, {"0": 0.0, "1": 3.0}) is None
    assert pairing_correlation(dict.fromkeys("012", 1.0), {"0": 0.0, "1": 3.0, "2": 1.0}) is None


def test_equal_differences_are_certain() -> None:
    a, b = {"0": 0.75, "1": 0.5}, {"0": 0.5, "1": 0.25}
    assert (p_value(paired_difference(a, b)), p_value(paired_difference(a, a))) == (0.0, 1.0)
    assert [equivalence(paired_difference(a, b), margin) for margin in (0.2, 0.3)] == [1.0, 0.0]


def test_holm_multiplies_the_smallest_by_all_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(pairs=st.lists(st.tuples(SHARES, SHARES), min_size=3, max_size=10), margin=st.sampled_from([0.01, 0.1, 0.4]))
@settings(max_examples=60, deadline=None)
def test_equivalence_is_the_larger_of_two_one_sided_tests(pairs: list[tuple[float, float]], margin: float) -> None:
    a, b = ({str(seed): pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1))
    differences = [x - y for x, y in pairs]
    assume(variance(differences) > 1e-6)
    above = scipy.stats.ttest_1samp(differences, -margin, alternative="greater").pvalue
    below = scipy.stats.ttest_1samp(differences, margin, alternative="less").pvalue
    assert equivalence(paired_difference(a, b), margin) == pytest.approx(max(above, below), abs=1e-9)


def test_a_margin_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="not positive"):
        equivalence(paired_difference({}, {}), 0.0)


@pytest.mark.parametrize(("n", "tolerance"), [(2, 0.14), (3, 0.053), (5, 0.013), (10, 0.002)])
def test_the_detectable_difference_is_close_to_that_of_the_noncentral_t(n: int, tolerance: float) -> None:
    a = {str(seed): float(seed % 3) for seed in range(n)}
    found = paired_difference(a, dict.fromkeys(a, 0.0))
    assert found.error is not None
    limit = t_quantile(0.975, n - 1)

    spread = scipy.stats.chi(n - 1, scale=1 / math.sqrt(n - 1))

    def missing_power(shift: float) -> float:
        """Integrated over the estimated spread: scipy's noncentral t is NaN at one degree of freedom."""
        return scipy.integrate.quad(lambda s: scipy.stats.norm.sf(limit * s - shift) * spread.pdf(s), 0, 8)[0] - 0.8

    exact = scipy.optimize.brentq(missing_power, 0.1, 40, xtol=1e-3) * found.error
    assert minimum_detectable(found) == pytest.approx(exact, rel=tolerance)


def test_question_error_is_that_of_a_share_and_does_not_shrink_with_seeds() -> None:
    assert question_error([0.5], 100) == pytest.approx(0.05)
    assert question_error([0.5] * 9, 100) == pytest.approx(0.05)
    assert (question_error([1.5], 100), question_error([0.5], 0), question_error([], 9)) == (None, None, None)


@pytest.mark.parametrize("n", [3, 5, 10])
def test_intervals_cover_the_truth_in_95_of_100_simulated_sweeps(n: int) -> None:
    """95 % ± 1.5, for the mean, the paired difference and Welch's, on normal data."""
    chance, trials = random.Random(n), 2000
    covered = {"mean": 0, "paired": 0, "welch": 0}
    for _ in range(trials):
        shared = [chance.gauss(0, 1) for _ in range(n)]
        a = {str(seed): 0.3 + value + chance.gauss(0, 0.5) for seed, value in enumerate(shared)}
        b = {str(seed): value + chance.gauss(0, 0.5) for seed, value in enumerate(shared)}
        other = [chance.gauss(0, 1) for _ in range(n)]
        found = {
            "mean": (estimate(list(a.values())).interval, 0.3),
            "paired": (paired_difference(a, b).interval, 0.3),
            "welch": (welch(list(a.values()), other).interval, 0.3),
        }
        for name, (interval, truth) in found.items():
            assert interval is not None
            covered[name] += interval.low <= truth <= interval.high
    shares = {name: count / trials for name, count in covered.items()}
    assert all(abs(share - 0.95) <= 0.015 for share in shares.values()), shares


def test_aggregates_are_refused_below_twenty_cells() -> None:
    few = {"a": [0.5] * (MIN_CELLS - 1)}
    assert aggregates(few, {"a": [0.5] * 40}) is Refusal.few_cells
    assert "fewer than 20" in Refusal.few_cells.value


def test_aggregates_hold_their_own_point_and_are_the_same_every_time() -> None:
    chance = random.Random(1)
    a, b = ({task: [chance.gauss(shift, 1) for _ in range(10)] for task in ("x", "y")} for shift in (1.0, 0.0))
    found = aggregates(a, b)
    assert not isinstance(found, Refusal)
    assert found == aggregates(a, b)
    assert found.iqm_interval.low < found.iqm < found.iqm_interval.high
    assert 0.5 < found.improvement_interval.low < found.improvement < found.improvement_interval.high <= 1


@given(st.lists(SHARES, min_size=1, max_size=30), st.lists(SHARES, min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_iqm_and_probability_of_improvement_equal_those_of_scipy(a: list[float], b: list[float]) -> None:
    assert iqm(a) == pytest.approx(scipy.stats.trim_mean(a, 0.25))
    expected = scipy.stats.mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b))
    assert probability_of_improvement({"t": a}, {"t": b}) == pytest.approx(expected)
