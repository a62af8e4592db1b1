"""Means with Student-t intervals, paired and unpaired differences: pure functions on plain floats.

Nothing is imported for it, so that a table is printed at once on a machine that has neither numpy nor scipy; the tests
hold every number against scipy. An interval needs two values; where it cannot be had it is None, never a guess.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


@dataclass(frozen=True)
class Interval:
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` values: None without any, no interval below two."""

    n: int
    mean: float | None
    interval: Interval | None
    error: float | None = None  # the standard error of the mean, where there is an interval


class DifferenceKind(Enum):
    paired = "paired by seed"
    welch = "unpaired (Welch)"


@dataclass(frozen=True)
class Difference:
    """``a - b``. ``n`` is the number of pairs, or the smaller of the two samples where nothing could be paired."""

    kind: DifferenceKind
    n: int
    mean: float | None
    interval: Interval | None
    error: float | None = None  # the standard error of the mean, where there is an interval
    df: float | None = None  # its degrees of freedom


def mean(values: Sequence[float]) -> float:
    """Raises ValueError for an empty sequence."""
    if not values:
        raise ValueError("the mean of no values")
    return math.fsum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    """The unbiased sample variance; ValueError below two values."""
    if len(values) < 2:
        raise ValueError("the variance of fewer than two values")
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """``mean ± t(n-1) s / sqrt(n)``; None below two values."""
    n = len(values)
    if n < 2:
        return None
    return _around(mean(values), math.sqrt(variance(values) / n), n - 1, level)


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate:
    error = math.sqrt(variance(values) / len(values)) if len(values) > 1 else None
    return Estimate(len(values), mean(values) if values else None, t_interval(values, level), error)


def paired_difference(a: Mapping[str, float], b: Mapping[str, float], level: float = 0.95) -> Difference:
    """``a - b`` over the seeds that both have: what the seeds share cancels out."""
    differences = [a[seed] - b[seed] for seed in a if seed in b]
    result = estimate(differences, level)
    df = None if result.error is None else result.n - 1
    return Difference(DifferenceKind.paired, result.n, result.mean, result.interval, result.error, df)


def welch(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Difference:
    """``mean(a) - mean(b)`` with the interval of Welch (1947) and the degrees of freedom of Satterthwaite (1946)."""
    n = min(len(a), len(b))
    difference = mean(a) - mean(b) if n else None
    if difference is None or n < 2:
        return Difference(DifferenceKind.welch, n, difference, None)
    part_a, part_b = variance(a) / len(a), variance(b) / len(b)
    total = part_a + part_b
    if total == 0:
        exact = Interval(difference, difference)
        return Difference(DifferenceKind.welch, n, difference, exact, 0.0, len(a) + len(b) - 2)
    share = part_a / total
    df = 1 / (share**2 / (len(a) - 1) + (1 - share) ** 2 / (len(b) - 1))
    error = math.sqrt(total)
    return Difference(DifferenceKind.welch, n, difference, _around(difference, error, df, level), error, df)


def difference(a: Mapping[str, float], b: Mapping[str, float], level: float = 0.95) -> Difference:
    """Paired where two seeds or more are shared; otherwise unpaired, unless a single shared seed is all there is."""
    shared = len(a.keys() & b.keys())
    if shared >= 2 or (shared == 1 and min(len(a), len(b)) < 2):
        return paired_difference(a, b, level)
    return welch(list(a.values()), list(b.values()), level)


def _around(centre: float, error: float, df: float, level: float) -> Interval:
    half = t_quantile((1 + level) / 2, df) * error
    return Interval(centre - half, centre + half)


@lru_cache(maxsize=1024)
def t_quantile(p: float, df: float) -> float:
    """The quantile of Student's t distribution.

    Solves ``P(T > t) = 1 - p`` by Newton steps kept inside a bisection bracket; within 1e-9 (relative) of scipy for
    ``0.5 <= df <= 1e5``.

    Raises:
        ValueError: ``p`` is not inside (0, 1), or ``df`` is not positive and finite.
    """
    if not 0 < p < 1:
        raise ValueError(f"p={p} is not inside (0, 1)")
    if not 0 < df < math.inf:
        raise ValueError(f"df={df} is not positive and finite")
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -_upper_quantile(p, df)
    return _upper_quantile(1 - p, df)


def _upper_quantile(tail: float, df: float) -> float:
    """The t with ``P(T > t) = tail`` for a tail below one half. Works on log t, as t spans many decades at small df."""
    low, high = 0.0, 1.0
    while t_tail(high, df) > tail:
        low, high = high, high * 2
    t = (low + high) / 2
    for _ in range(200):
        excess = t_tail(t, df) - tail
        low, high = (t, high) if excess > 0 else (low, t)
        step = t + excess / _t_density(t, df)
        new = step if low < step < high else (low + high) / 2
        if abs(new - t) <= 1e-15 * t:
            return new
        t = new
    return t


def t_tail(t: float, df: float) -> float:
    """``P(T > t)`` for ``t >= 0``."""
    square = t * t
    return 0.5 * regularized_beta(df / 2, 0.5, df / (df + square), square / (df + square))


def _t_density(t: float, df: float) -> float:
    log_norm = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    return math.exp(log_norm - (df + 1) / 2 * math.log1p(t * t / df))


def regularized_beta(a: float, b: float, x: float, y: float) -> float:
    """``I_x(a, b)`` with ``y = 1 - x`` given apart, so that neither end loses digits (DLMF 8.17.22)."""
    if x <= 0:
        return 0.0
    if y <= 0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    front = math.exp(log_front)
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, y) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function by the modified method of Lentz."""
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 100_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 + numerator * d
            c = 1 + numerator / c
            d = 1 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            change = c * d
            value *= change
        if abs(change - 1) < 1e-16:
            return value
    return value
