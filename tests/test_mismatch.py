"""Mismatch metrics and completion lengths against plain float64 oracles."""

import math
import statistics
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_exp.algo.mismatch import mismatch_metrics
from grpo_exp.algo.stats import completion_stats

BANDS = {
    "prob_0_1": (0.0, 0.01),
    "prob_1_10": (0.01, 0.1),
    "prob_10_50": (0.1, 0.5),
    "prob_50_90": (0.5, 0.9),
    "prob_90_100": (0.9, math.inf),
}
LAGS = {"lag_0": [0], "lag_1": [1], "lag_2": [2], "lag_3up": range(3, 99)}
BY_CLASS = (*BANDS, *LAGS)
KEYS = [
    *("mean", "sd", "abs_mean", "abs_p95", "abs_max", "outside", "outside_clip", "k1", "k3"),
    *("seq_mean", "seq_sd", "seq_abs_max", "ess", "ppl_trainer", "ppl_generator", "prob_pearson", "drift_slope"),
    *BY_CLASS,
]
CLIP = (0.2, 0.28)


@dataclass(frozen=True)
class Token:
    mu: float
    old: float
    sequence: int
    position: int = 0
    staleness: int = 0


def mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def slope_oracle(tokens: list[Token]) -> float:
    """With exact fractions, and the running sum added up anew for every token."""
    exact = [(t.sequence, t.position, Fraction(t.old) - Fraction(t.mu)) for t in tokens]
    points = [
        (Fraction(position), sum((d for s, at, d in exact if s == sequence and at <= position), Fraction(0)))
        for sequence, position, _ in exact
    ]
    n, x, y = len(points), sum(p[0] for p in points), sum(p[1] for p in points)
    xx, xy = sum(p[0] ** 2 for p in points), sum(p[0] * p[1] for p in points)
    spread = n * xx - x * x
    return float(1000 * (n * xy - x * y) / spread) if spread else math.nan


def pearson_oracle(a: list[float], b: list[float]) -> float:
    return statistics.correlation(a, b) if len(set(a)) > 1 and len(set(b)) > 1 else math.nan


def oracle(tokens: list[Token]) -> dict[str, float]:
    d = [token.old - token.mu for token in tokens]
    size = sorted(abs(x) for x in d)
    position = 0.95 * (len(size) - 1)
    low, high = size[math.floor(position)], size[math.ceil(position)]
    sums: dict[int, float] = {}
    for token, x in zip(tokens, d, strict=True):
        sums[token.sequence] = sums.get(token.sequence, 0.0) + x
    weights = [math.exp(total) for total in sums.values()]
    return {
        "mean": statistics.fmean(d),
        "sd": statistics.pstdev(d),
        "abs_mean": statistics.fmean(size),
        "abs_p95": low + (position - math.floor(position)) * (high - low),
        "abs_max": size[-1],
        "outside": statistics.fmean(not 0.9 <= math.exp(x) <= 1.1 for x in d),
        "outside_clip": statistics.fmean(not 1 - CLIP[0] <= math.exp(x) <= 1 + CLIP[1] for x in d),
        "k1": statistics.fmean(token.mu - token.old for token in tokens),
        "k3": statistics.fmean(math.exp(x) - 1 - x for x in d),
        "seq_mean": statistics.fmean(sums.values()),
        "seq_sd": statistics.pstdev(sums.values()),
        "seq_abs_max": max(abs(total) for total in sums.values()),
        "ess": sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)),
        "ppl_trainer": math.exp(-statistics.fmean(token.old for token in tokens)),
        "ppl_generator": math.exp(-statistics.fmean(token.mu for token in tokens)),
        "prob_pearson": pearson_oracle([math.exp(t.mu) for t in tokens], [math.exp(t.old) for t in tokens]),
        "drift_slope": slope_oracle(tokens),
        **{
            name: mean([abs(t.old - t.mu) for t in tokens if low <= math.exp(t.mu) < high])
            for name, (low, high) in BANDS.items()
        },
        **{name: mean([abs(t.old - t.mu) for t in tokens if t.staleness in lags]) for name, lags in LAGS.items()},
    }


def metrics(tokens: list[Token]) -> dict[str, float]:
    mu, old = (torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float32) for name in ("mu", "old"))
    sequence, position, staleness = (
        torch.tensor([getattr(t, name) for t in tokens], dtype=torch.int64)
        for name in ("sequence", "position", "staleness")
    )
    return mismatch_metrics(mu, old, sequence, position, staleness, CLIP)


LOGPROBS = st.floats(-8, 0, width=32)
SEQUENCE = st.lists(st.tuples(LOGPROBS, LOGPROBS, st.integers(0, 5)), min_size=1, max_size=12)


@st.composite
def ragged(draw: st.DrawFn) -> list[Token]:
    """The tokens of some sequences of different lengths."""
    return [
        Token(mu, old, index, position, lag)
        for index, tokens in enumerate(draw(st.lists(SEQUENCE, min_size=1, max_size=6)))
        for position, (mu, old, lag) in enumerate(tokens)
    ]


@settings(deadline=None, max_examples=80)
@given(tokens=ragged())
def test_metrics_equal_the_written_out_formulas(tokens: list[Token]) -> None:
    got = metrics(tokens)
    assert list(got) == KEYS
    expected = oracle(tokens)
    for key in KEYS:
        tolerance = 1e-4 if key == "prob_pearson" else 1e-6  # of values that may be all but constant
        assert got[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance, nan_ok=True), key


@settings(deadline=None, max_examples=60)
@given(tokens=ragged(), data=st.data())
def test_metrics_do_not_depend_on_order_or_on_the_names_of_sequences(tokens: list[Token], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(tokens))))
    names = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=6, max_size=6, unique=True))
    plain = metrics(tokens)
    renamed = metrics([replace(tokens[i], sequence=names[tokens[i].sequence]) for i in order])
    correlations = [found.pop("prob_pearson") for found in (plain, renamed)]
    assert correlations[0] == pytest.approx(correlations[1], abs=1e-4, nan_ok=True)
    assert renamed == pytest.approx(plain, rel=1e-8, abs=1e-9, nan_ok=True)
    assert plain["k3"] >= 0
    assert 0 < plain["ess"] <= 1 + 1e-9


def test_a_gap_that_averages_to_zero_is_seen() -> None:
    """B14: differences of +0.5 and -0.5 nats."""
    got = metrics([Token(-1.0, -0.5, 0), Token(-1.0, -1.5, 1)])
    assert got["mean"] == 0.0
    assert got["k1"] == 0.0
    assert got["seq_mean"] == 0.0
    assert got["sd"] == 0.5
    assert got["abs_mean"] == 0.5
    assert got["abs_p95"] == 0.5
    assert got["abs_max"] == 0.5
    assert got["seq_abs_max"] == 0.5
    assert got["outside"] == 1.0
    assert got["outside_clip"] == 1.0
    assert got["k3"] == pytest.approx(math.cosh(0.5) - 1)
    assert got["ess"] == pytest.approx(math.cosh(0.5) ** 2 / math.cosh(1.0))


def test_equal_logprobs_have_no_mismatch() -> None:
    got = metrics([Token(-1.0, -1.0, 0), Token(-2.0, -2.0, 0, 1), Token(-3.0, -3.0, 1)])
    ones = {
        "ess": 1.0,
        "prob_pearson": pytest.approx(1.0),
        **dict.fromkeys(("ppl_trainer", "ppl_generator"), math.e**2),
    }
    empty = dict.fromkeys(("prob_0_1", "prob_50_90", "prob_90_100", "lag_1", "lag_2", "lag_3up"), math.nan)
    assert got == pytest.approx({**dict.fromkeys(KEYS, 0.0), **ones, **empty}, nan_ok=True)


def test_a_gap_that_grows_steadily_is_its_drift_slope() -> None:
    """-0.001 nats a token are -1 nat per 1000, however long the sequences are."""
    tokens = [Token(-1.0, -1.0 - 2.0**-10, s, t) for s, length in enumerate((3, 40, 7)) for t in range(length)]
    assert metrics(tokens)["drift_slope"] == pytest.approx(-1000 * 2.0**-10, rel=1e-9)


def test_a_gap_that_goes_back_and_forth_does_not_drift() -> None:
    tokens = [Token(-1.0, -1.0 + (-1) ** t * 0.25, 0, t) for t in range(400)]
    assert abs(metrics(tokens)["drift_slope"]) < 0.01 * 1000 * 0.25


def test_nothing_is_clamped_before_it_is_measured() -> None:
    got = metrics([Token(-30.0, 0.0, 0), Token(-1.0, -1.0, 1)])
    assert got["abs_max"] == 30.0
    assert got["k3"] == pytest.approx((math.exp(30) - 31) / 2)


def test_small_differences_are_not_lost_in_the_exponential() -> None:
    d = 2.0**-30  # exp(d) - 1 - d is 0 in float64
    assert metrics([Token(-(2.0**-9), d - 2.0**-9, 0)])["k3"] == pytest.approx(d * d / 2, rel=1e-4, abs=0)


def test_sequence_weights_that_overflow_still_give_an_effective_size() -> None:
    same, apart = (
        [Token(-5.0, 0.0 if s == 0 or both else -10.0, s, t) for t in range(200) for s in (0, 1)] for both in (1, 0)
    )
    assert metrics(same)["ess"] == pytest.approx(1.0)
    assert metrics(apart)["ess"] == pytest.approx(0.5)


def test_sums_over_many_tokens_keep_their_digits() -> None:
    n = 1_000_000
    old, mu = torch.full((n,), -0.1), torch.full((n,), -0.1000001)
    zeros = torch.zeros(n, dtype=torch.int64)
    got = mismatch_metrics(mu, old, zeros, torch.arange(n), zeros, CLIP)
    gap = old[0].item() - mu[0].item()
    assert got["mean"] == pytest.approx(gap, rel=1e-9)
    assert got["sd"] == pytest.approx(0.0, abs=1e-15)
    assert got["seq_mean"] == pytest.approx(n * gap, rel=1e-9)
    assert got["drift_slope"] == pytest.approx(1000 * gap, rel=1e-9)


def test_a_step_without_tokens_gives_nan() -> None:
    got = metrics([])
    assert list(got) == KEYS
    assert all(math.isnan(value) for value in got.values())


@pytest.mark.parametrize("broken", ["mu", "old"])
def test_a_nan_is_never_left_out_of_a_metric(broken: str) -> None:
    """It can only be kept apart from the perplexity of the other side, and from classes it is not in."""
    good = [Token(-1.0, -1.0, 1, t, 1) for t in range(40)]
    got = metrics([replace(Token(-1.0, -1.0, 0), **{broken: math.nan}), *good])
    apart = {"ppl_trainer" if broken == "mu" else "ppl_generator", "lag_1", *(BANDS if broken == "mu" else ())}
    finite = {key for key, value in got.items() if not math.isnan(value)}
    assert finite <= apart
    assert math.isnan(got["lag_0"])


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
