"""How far two lots of log-probabilities of the same tokens are apart, each number with an interval over sequences.

Tokens of one sequence are not independent, so a sequence is what is drawn: the 95 % intervals are Student's t on the
linearised statistic (the delta method, one influence value per sequence), not a bootstrap. All in float64.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..report.stats import t_quantile

RATIO_BAND = (0.9, 1.1)
LEVEL = 0.95
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Statistic:
    """A value and half the width of its interval; None where there is none."""

    value: float
    half_width: float | None


def statistics(mu: Array, old: Array, reference: Array | None, lengths: NDArray[np.int64]) -> dict[str, Statistic]:
    """The row of a cell, with ``d = old - mu``.

    Args:
        mu, old: log-probabilities by the generator and the trainer, [n], sequence after sequence.
        reference: the same tokens by the trainer in fp32; None where it could not be had.
        lengths: tokens of each sequence, [N], none of them 0.

    Returns:
        Per token: ``mean``, ``sd``, ``abs_mean``, ``abs_p95``, ``abs_max`` of d; ``outside``, the share of ratios outside
        [0.9, 1.1]; ``k1 = mean(-d)``; ``k3 = mean(exp(d) - 1 - d)``. Per sequence: ``sequence_kl``, the mean of minus its sum
        of d, and ``sequence_abs``, the mean size of that sum. ``drift_slope``: least-squares slope of the running sum of d against
        the position, in nats per 1000 tokens. ``relative_trainer`` and ``relative_rollout``: root mean square of old, or mu,
        minus the reference over the root mean square of the reference.
    """
    d = old - mu
    groups = _Groups(lengths)
    inside = (d >= math.log(RATIO_BAND[0])) & (d <= math.log(RATIO_BAND[1]))
    sums = groups.sums(d)
    ones = np.ones_like(sums)
    found = {
        "mean": groups.mean(d),
        "sd": groups.sd(d),
        "abs_mean": groups.mean(np.abs(d)),
        "abs_p95": groups.quantile(np.abs(d), 0.95),
        "abs_max": Statistic(float(np.abs(d).max()), None),
        "outside": groups.mean((~inside).astype(np.float64)),
        "k1": groups.mean(-d),
        "k3": groups.mean(np.expm1(d) - d),
        "sequence_kl": groups.ratio(-sums, ones),
        "sequence_abs": groups.ratio(np.abs(sums), ones),
        "drift_slope": groups.drift(d),
    }
    if reference is not None:
        found["relative_trainer"] = groups.relative(old - reference, reference)
        found["relative_rollout"] = groups.relative(mu - reference, reference)
    return found


def batch_floor(one: Array, other: Array, lengths: NDArray[np.int64]) -> dict[str, Statistic]:
    """The same trainer with two micro-batch sizes: what only the company of a sequence changes."""
    d, groups = other - one, _Groups(lengths)
    return {
        "sd": groups.sd(d),
        "abs_mean": groups.mean(np.abs(d)),
        "abs_max": Statistic(float(np.abs(d).max()), None),
    }


def as_json(found: Mapping[str, Statistic]) -> dict[str, dict[str, float | None]]:
    return {name: {"value": one.value, "half_width": one.half_width} for name, one in found.items()}


class _Groups:
    """Values per token, [n], that belong to sequences."""

    def __init__(self, lengths: NDArray[np.int64]) -> None:
        self.lengths = lengths
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self.count = len(lengths)

    def sums(self, values: Array) -> Array:
        return np.add.reduceat(values, self.starts)

    def mean(self, values: Array) -> Statistic:
        return self.ratio(self.sums(values), self.lengths.astype(np.float64))

    def ratio(self, above: Array, below: Array) -> Statistic:
        """A quotient of two sums over sequences, such as a mean over tokens."""
        value = above.sum() / below.sum()
        return self._with_interval(value, (above - value * below) / below.mean())

    def sd(self, values: Array) -> Statistic:
        """Of the population."""
        n = self.lengths.astype(np.float64)
        centre = self.sums(values).sum() / n.sum()
        squares = self.sums((values - centre) ** 2)
        variance = squares.sum() / n.sum()
        if variance == 0:
            return Statistic(0.0, self._half_width(np.zeros(self.count)))
        return self._with_interval(math.sqrt(variance), (squares - variance * n) / n.mean() / (2 * math.sqrt(variance)))

    def quantile(self, values: Array, share: float) -> Statistic:
        """The interval is that of the share below the quantile, read off the values (Woodruff 1952); its wider side counts."""
        value = float(np.quantile(values, share))
        half = self.mean((values <= value).astype(np.float64)).half_width
        if half is None:
            return Statistic(value, None)
        low, high = np.quantile(values, [max(0.0, share - half), min(1.0, share + half)])
        return Statistic(value, float(max(value - low, high - value)))

    def drift(self, values: Array) -> Statistic:
        position = np.arange(len(values)) - np.repeat(self.starts, self.lengths) + 1.0
        before = np.cumsum(values) - values
        running = np.cumsum(values) - np.repeat(before[self.starts], self.lengths)
        x = position - position.mean()
        spread = float((x * x).sum())
        if spread == 0:
            return Statistic(0.0, None)
        slope = float((x * running).sum()) / spread
        residual = running - running.mean() - slope * x
        return self._with_interval(1000 * slope, 1000 * self.count * self.sums(x * residual) / spread)

    def relative(self, error: Array, reference: Array) -> Statistic:
        if not reference.any():
            return Statistic(0.0, None)
        squared = self.ratio(self.sums(error**2), self.sums(reference**2))
        value = math.sqrt(squared.value)
        half = squared.half_width
        return Statistic(value, None if half is None else half / (2 * value) if value else 0.0)

    def _with_interval(self, value: float, influence: Array) -> Statistic:
        return Statistic(float(value), self._half_width(influence))

    def _half_width(self, influence: Array) -> float | None:
        """The influence values of a statistic have mean 0; it varies as their mean does."""
        if self.count < 2:
            return None
        error = math.sqrt(float((influence**2).sum()) / (self.count * (self.count - 1)))
        return t_quantile((1 + LEVEL) / 2, self.count - 1) * error
