"""Mismatch metrics and completion lengths against plain float64 oracles."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_exp.algo.mismatch import mismatch_metrics
from grpo_exp.algo.stats import completion_stats

KEYS = ["mean", "sd", "abs_mean", "abs_p95", "abs_max", "k1", "k3", "ess", "outside"]


Token = tuple[float, float, int]  # mu, old, index of the sequence


def oracle(tokens: list[Token]) -> dict[str, float]:
    d = [old - mu for mu, old, _ in tokens]
    size = sorted(abs(x) for x in d)
    position = 0.95 * (len(size) - 1)
    low, high = size[math.floor(position)], size[math.ceil(position)]
    sums: dict[int, float] = {}
    for mu, old, index in tokens:
        sums[index] = sums.get(index, 0.0) + old - mu
    weights = [math.exp(total) for total in sums.values()]
    return {
        "mean": statistics.fmean(d),
        "sd": statistics.pstdev(d),
        "abs_mean": statistics.fmean(size),
        "abs_p95": low + (position - math.floor(position)) * (high - low),
        "abs_max": size[-1],
        "k1": statistics.fmean(mu - old for mu, old, _ in tokens),
        "k3": statistics.fmean(math.exp(x) - 1 - x for x in d),
        "ess": sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)),
        "outside": statistics.fmean(not 0.9 <= math.exp(x) <= 1.1 for x in d),
    }


def metrics(tokens: list[Token]) -> dict[str, float]:
    mu, old = (torch.tensor([token[i] for token in tokens], dtype=torch.float32) for i in (0, 1))
    return mismatch_metrics(mu, old, torch.tensor([token[2] for token in tokens], dtype=torch.int64))


LOGPROBS = st.floats(-8, 0, width=32)
TOKENS = st.lists(st.tuples(LOGPROBS, LOGPROBS, st.integers(0, 5)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=80)
@given(tokens=TOKENS)
def test_metrics_equal_the_written_out_formulas(tokens: list[Token]) -> None:
    got = metrics(tokens)
    assert list(got) == KEYS
    assert got == pytest.approx(oracle(tokens), rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(tokens=TOKENS, data=st.data())
def test_metrics_do_not_depend_on_order_or_on_the_names_of_sequences(tokens: list[Token], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(tokens))))
    names = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=6, max_size=6, unique=True))
    plain = metrics(tokens)
    renamed = metrics([(mu, old, names[index]) for mu, old, index in (tokens[i] for i in order)])
    assert renamed == pytest.approx(plain, rel=1e-9, abs=1e-12)
    assert plain["k3"] >= 0
    assert 0 < plain["ess"] <= 1 + 1e-9


def test_a_gap_that_averages_to_zero_is_seen() -> None:
    """B14: differences of +0.5 and -0.5 nats."""
    got = metrics([(-1.0, -0.5, 0), (-1.0, -1.5, 1)])
    assert got["mean"] == 0.0
    assert got["k1"] == 0.0
    assert got["sd"] == 0.5
    assert got["abs_mean"] == 0.5
    assert got["abs_p95"] == 0.5
    assert got["abs_max"] == 0.5
    assert got["outside"] == 1.0
    assert got["k3"] == pytest.approx(math.cosh(0.5) - 1)
    assert got["ess"] == pytest.approx(math.cosh(0.5) ** 2 / math.cosh(1.0))


def test_equal_logprobs_have_no_mismatch() -> None:
    got = metrics([(-1.0, -1.0, 0), (-2.0, -2.0, 0), (-3.0, -3.0, 1)])
    assert got == {**dict.fromkeys(KEYS, 0.0), "ess": 1.0}


def test_nothing_is_clamped_before_it_is_measured() -> None:
    got = metrics([(-30.0, 0.0, 0), (-1.0, -1.0, 1)])
    assert got["abs_max"] == 30.0
    assert got["k3"] == pytest.approx((math.exp(30) - 31) / 2)


def test_small_differences_are_not_lost_in_the_exponential() -> None:
    d = 2.0**-30  # exp(d) - 1 - d is 0 in float64
    assert metrics([(-(2.0**-9), d - 2.0**-9, 0)])["k3"] == pytest.approx(d * d / 2, rel=1e-4, abs=0)


def test_sequence_weights_that_overflow_still_give_an_effective_size() -> None:
    assert metrics([(-5.0, 0.0, 0), (-5.0, 0.0, 1)] * 200)["ess"] == pytest.approx(1.0)
    assert metrics([(-5.0, 0.0, 0), (-5.0, -10.0, 1)] * 200)["ess"] == pytest.approx(0.5)


def test_sums_over_many_tokens_keep_their_digits() -> None:
    n = 1_000_000
    old = torch.full((n,), -0.1)
    got = mismatch_metrics(torch.full((n,), -0.1000001), old, torch.zeros(n, dtype=torch.int64))
    assert got["mean"] == pytest.approx(old[0].item() - torch.tensor(-0.1000001).item(), rel=1e-9)
    assert got["sd"] == pytest.approx(0.0, abs=1e-15)


def test_a_step_without_tokens_gives_nan() -> None:
    got = metrics([])
    assert list(got) == KEYS
    assert all(math.isnan(value) for value in got.values())


def test_a_nan_is_never_left_out_of_a_metric() -> None:
    got = metrics([(math.nan, -1.0, 0), *[(-1.0, -1.0, 1)] * 40])
    assert all(math.isnan(value) for value in got.values())


LENGTHS = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=20)


@settings(deadline=None, max_examples=40)
@given(rows=LENGTHS)
def test_completion_stats_equal_the_written_out_formulas(rows: list[tuple[int, bool]]) -> None:
    lengths, truncated = [row[0] for row in rows], [row[1] for row in rows]
    terminated = [length for length, cut in rows if not cut]
    expected = {
        "length_mean": statistics.fmean(lengths),
        "length_min": min(lengths),
        "length_max": max(lengths),
        "terminated_length_mean": statistics.fmean(terminated) if terminated else math.nan,
        "truncated_frac": sum(truncated) / len(truncated),
    }
    got = completion_stats(torch.tensor(lengths), torch.tensor(truncated))
    assert list(got) == list(expected)
    assert got == pytest.approx(expected, nan_ok=True)


def test_lengths_are_those_of_all_completions_and_of_the_terminated_ones() -> None:
    """C8: one truncated completion of 4 tokens and one finished of 2."""
    assert completion_stats(torch.tensor([4, 2]), torch.tensor([True, False])) == {
        "length_mean": 3.0,
        "length_min": 2.0,
        "length_max": 4.0,
        "terminated_length_mean": 2.0,
        "truncated_frac": 0.5,
    }


def test_lengths_of_no_completions_are_nan() -> None:
    got = completion_stats(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool))
    assert all(math.isnan(value) for value in got.values())
