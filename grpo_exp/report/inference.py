"""What may be concluded from a comparison: p-values and Holm, equivalence, power, pairing, counts, question error.

Pure functions on plain floats, as in stats.py; docs/compare.md has the definitions with their sources. What has too few
values is None, never a guess. ``aggregates`` refuses below 20 task × seed cells: with fewer, the interval of an
interquartile mean by bootstrap is too narrow to be shown.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import NormalDist

from .stats import Difference, Interval, mean, t_quantile, t_tail, variance

MIN_CELLS = 20
POWER = 0.8


def wilson(count: int, n: int, level: float = 0.95) -> Interval | None:
    """The score interval of a share ``count / n`` (Wilson 1927); None for n = 0."""
    if not 0 <= count <= n:
        raise ValueError(f"{count} of {n}")
    if n == 0:
        return None
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, weight = count / n, z * z / n
    centre = (share + weight / 2) / (1 + weight)
    half = z * math.sqrt(share * (1 - share) / n + weight / (4 * n)) / (1 + weight)
    return Interval(0.0 if count == 0 else centre - half, 1.0 if count == n else centre + half)


def p_value(found: Difference) -> float | None:
    """Two-sided, of no difference; None where there is no interval. Equal differences over all seeds give 0 or 1."""
    if found.mean is None or found.error is None or found.df is None:
        return None
    if found.error == 0:
        return float(found.mean == 0)
    return 2 * t_tail(abs(found.mean) / found.error, found.df)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values that hold the family-wise error (Holm 1979), in the order given."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def equivalence(found: Difference, margin: float) -> float | None:
    """The p-value of two one-sided tests (Schuirmann 1987): small when the difference lies inside ``± margin``."""
    if margin <= 0:
        raise ValueError(f"margin={margin} is not positive")
    if found.mean is None or found.error is None or found.df is None:
        return None
    room = margin - abs(found.mean)
    if found.error == 0:
        return float(room <= 0)
    tail = t_tail(abs(room) / found.error, found.df)
    return tail if room > 0 else 1 - tail


def minimum_detectable(found: Difference, level: float = 0.95, power: float = POWER) -> float | None:
    """The true difference that a design with this error finds with this power: ``(t(1-α/2) + t(power)) · error``.

    An approximation of the noncentral t (Bloom 1995), below the exact value by 14 % at two pairs, 5 % at three, 2 % at
    four and about 1 % at five.
    """
    if not found.error or found.df is None:
        return None
    return (t_quantile((1 + level) / 2, found.df) + t_quantile(power, found.df)) * found.error


def pairing_correlation(a: Mapping[str, float], b: Mapping[str, float]) -> float | None:
    """Pearson's r over the shared seeds: pairing makes the variance of a difference smaller by about ``1 - r``.

    None below three pairs (two always correlate perfectly), or where one side is constant.
    """
    pairs = [(a[seed], b[seed]) for seed in a if seed in b]
    if len(pairs) < 3:
        return None
    left, right = [x for x, _ in pairs], [y for _, y in pairs]
    scale = math.sqrt(variance(left)) * math.sqrt(variance(right))
    if scale == 0:
        return None
    covariance = math.fsum((x - mean(left)) * (y - mean(right)) for x, y in pairs) / (len(pairs) - 1)
    return max(-1.0, min(1.0, covariance / scale))


def question_error(shares: Sequence[float], num_questions: int) -> float | None:
    """The standard error of an accuracy that comes from the questions alone: ``sqrt(mean(p (1 - p)) / num_questions)``.

    Every run answers the same questions, so more seeds do not make it smaller (Miller 2024). None where a value is no
    share, or without questions.
    """
    if not shares or num_questions < 1 or any(not 0 <= share <= 1 for share in shares):
        return None
    return math.sqrt(mean([share * (1 - share) for share in shares]) / num_questions)


class Refusal(Enum):
    few_cells = f"fewer than {MIN_CELLS} task × seed cells: a bootstrap interval would be too narrow"


@dataclass(frozen=True)
class Aggregates:
    """Over task × seed cells: interquartile mean with its interval, and P(a run of a beats one of b) with its own."""

    iqm: float
    iqm_interval: Interval
    improvement: float
    improvement_interval: Interval


Cells = Mapping[str, Sequence[float]]  # task → the values of its seeds


def aggregates(a: Cells, b: Cells, level: float = 0.95, draws: int = 2000) -> Aggregates | Refusal:
    """The aggregates of Agarwal et al. (2021), by a bootstrap stratified by task. The same input gives the same output."""
    tasks = sorted(task for task in a.keys() & b.keys() if a[task] and b[task])
    if min((sum(len(side[task]) for task in tasks) for side in (a, b)), default=0) < MIN_CELLS:
        return Refusal.few_cells
    chance = random.Random(0)
    means, shares = [], []
    for _ in range(draws):
        drawn_a, drawn_b = ({task: chance.choices(side[task], k=len(side[task])) for task in tasks} for side in (a, b))
        means.append(iqm([value for values in drawn_a.values() for value in values]))
        shares.append(probability_of_improvement(drawn_a, drawn_b))
    whole = iqm([value for task in tasks for value in a[task]])
    share = probability_of_improvement({task: a[task] for task in tasks}, b)
    return Aggregates(whole, _percentiles(means, level), share, _percentiles(shares, level))


def iqm(values: Sequence[float]) -> float:
    """The mean without the lowest and the highest quarter (rounded down), as scipy's ``trim_mean(values, 0.25)``."""
    cut = len(values) // 4
    return mean(sorted(values)[cut : len(values) - cut])


def probability_of_improvement(a: Cells, b: Cells) -> float:
    """The share of pairs within a task in which a beats b, ties half (Mann-Whitney), averaged over the tasks of a."""
    shares = []
    for task in a:
        others = sorted(b[task])
        below = [(bisect_left(others, x) + bisect_right(others, x)) / 2 for x in a[task]]  # of a tie, half
        shares.append(mean(below) / len(others))
    return mean(shares)


def _percentiles(values: list[float], level: float) -> Interval:
    values = sorted(values)
    skip = int((1 - level) / 2 * len(values))
    return Interval(values[skip], values[-1 - skip])
