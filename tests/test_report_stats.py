"""The statistics of a comparison, held against scipy."""

import math

import pytest
import scipy.stats
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_exp.report.stats import (
    DifferenceKind,
    difference,
    estimate,
    mean,
    paired_difference,
    regularized_beta,
    t_interval,
    t_quantile,
    variance,
    welch,
)

VALUES = st.floats(-1e6, 1e6).map(lambda value: round(value, 6))
SAMPLES = st.lists(VALUES, min_size=2, max_size=12)


@given(p=st.floats(1e-6, 1 - 1e-6), df=st.floats(0.5, 1e5))
@settings(max_examples=200, deadline=None)
def test_t_quantiles_equal_those_of_scipy(p: float, df: float) -> None:
    assert t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 9, 29, 99, 1000])
@pytest.mark.parametrize("level", [0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_t_quantiles_of_the_usual_levels_equal_those_of_scipy(df: int, level: float) -> None:
    p = (1 + level) / 2
    assert t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-9)
    assert t_quantile(1 - p, df) == pytest.approx(-t_quantile(p, df), rel=1e-9)


def test_the_t_quantile_of_one_half_is_zero() -> None:
    assert t_quantile(0.5, 3) == 0.0


@pytest.mark.parametrize(("p", "df"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.9, 0), (0.9, -1), (0.9, math.inf)])
def test_a_t_quantile_outside_its_domain_is_refused(p: float, df: float) -> None:
    with pytest.raises(ValueError, match="is not"):
        t_quantile(p, df)


@given(a=st.floats(0.2, 500), b=st.floats(0.2, 500), x=st.floats(0.001, 0.999))
@settings(max_examples=100, deadline=None)
def test_the_incomplete_beta_function_equals_that_of_scipy(a: float, b: float, x: float) -> None:
    expected = scipy.stats.beta.cdf(x, a, b)
    assert regularized_beta(a, b, x, 1 - x) == pytest.approx(expected, rel=1e-8, abs=1e-12)


def test_the_incomplete_beta_function_is_exact_at_its_ends() -> None:
    assert (regularized_beta(2, 3, 0.0, 1.0), regularized_beta(2, 3, 1.0, 0.0)) == (0.0, 1.0)


@given(values=SAMPLES, level=st.sampled_from([0.8, 0.95, 0.99]))
@settings(max_examples=60, deadline=None)
def test_t_intervals_equal_those_of_scipy(values: list[float], level: float) -> None:
    interval = t_interval(values, level)
    assert interval is not None
    error = math.sqrt(variance(values) / len(values))
    assume(error > 0)
    low, high = scipy.stats.t.interval(level, len(values) - 1, loc=mean(values), scale=error)
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-9, abs=1e-9)
    assert interval.half_width == pytest.approx((high - low) / 2, rel=1e-6)


@pytest.mark.parametrize("values", [[], [0.7]])
def test_fewer_than_two_values_have_no_interval(values: list[float]) -> None:
    assert t_interval(values) is None
    assert estimate(values).interval is None
    assert estimate(values).mean == (values[0] if values else None)


def test_equal_values_have_an_interval_of_no_width() -> None:
    interval = t_interval([0.5, 0.5, 0.5])
    assert interval is not None
    assert (interval.low, interval.high) == (0.5, 0.5)


def test_mean_and_variance_of_too_few_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean([])
    with pytest.raises(ValueError, match="fewer than two"):
        variance([1.0])


@given(pairs=st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=12))
@settings(max_examples=60, deadline=None)
def test_paired_differences_equal_those_of_scipy(pairs: list[tuple[float, float]]) -> None:
    a = {str(seed): x for seed, (x, _) in enumerate(pairs)}
    b = {str(seed): y for seed, (_, y) in enumerate(pairs)}
    assume(variance([x - y for x, y in pairs]) > 0)
    found = paired_difference(a, b)
    expected = scipy.stats.ttest_rel(list(a.values()), list(b.values())).confidence_interval(0.95)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((expected.low, expected.high), rel=1e-9, abs=1e-6)


@given(a=SAMPLES, b=SAMPLES)
@settings(max_examples=60, deadline=None)
def test_welch_intervals_equal_those_of_scipy(a: list[float], b: list[float]) -> None:
    assume(min(variance(a), variance(b)) > 1e-6)  # scipy warns of equal values
    found = welch(a, b)
    expected = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((expected.low, expected.high), rel=1e-8, abs=1e-6)


def test_pairs_are_made_by_seed_and_not_by_order() -> None:
    found = paired_difference({"0": 1.0, "1": 5.0, "7": 9.0}, {"1": 4.0, "0": 0.5, "2": 100.0})
    assert (found.n, found.mean) == (2, 0.75)


def test_what_the_seeds_share_cancels_out_of_a_paired_difference() -> None:
    found = difference({"0": 0.5, "1": 0.75, "2": 0.25}, {"0": 0.375, "1": 0.625, "2": 0.125})
    assert found.kind is DifferenceKind.paired
    assert found.interval is not None
    assert (found.mean, found.interval.low, found.interval.high) == (0.125, 0.125, 0.125)


def test_samples_without_common_seeds_are_compared_unpaired() -> None:
    found = difference({"0": 1.0, "1": 2.0}, {"2": 0.0, "3": 1.0, "4": 2.0})
    assert (found.kind, found.n, found.mean) == (DifferenceKind.welch, 2, 0.5)
    assert found.interval is not None


def test_one_common_seed_among_several_is_not_taken_for_a_pairing() -> None:
    assert difference({"0": 1.0, "1": 2.0}, {"1": 0.0, "2": 1.0}).kind is DifferenceKind.welch
    single = difference({"0": 1.0}, {"0": 0.25})
    assert (single.kind, single.n, single.mean, single.interval) == (DifferenceKind.paired, 1, 0.75, None)


def test_nothing_to_compare_gives_no_difference() -> None:
    found = difference({}, {"0": 1.0})
    assert (found.n, found.mean, found.interval) == (0, None, None)


def test_two_constant_samples_differ_by_exactly_their_difference() -> None:
    found = welch([1.0, 1.0], [0.5, 0.5])
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (0.5, 0.5)
