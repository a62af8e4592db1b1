"""The same arm twice (A/A): what two runs that differ in nothing but their label are apart.

Asynchronous runs do not repeat bit for bit, so a difference between arms has to be seen beside this one. An arm that was
run again is compared with itself only, and is in none of the tests of the other arms.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .arms import REPEAT, Arm, natural
from .stats import Difference, difference

Values = Mapping[str, float]  # seed → value


@dataclass(frozen=True)
class Repeat:
    """``arm`` minus ``of``, its first time. ``largest`` is that of a seed, in size; None where no seed has both."""

    arm: str
    of: str
    difference: Difference
    num_shared: int
    largest: float | None

    def in_words(self, metric: str, level: float) -> str:
        start = f"{self.of}: the same arm twice differs in {metric} by "
        if self.largest is None or self.difference.mean is None:
            return start + "– (no seed has both runs done yet)"
        seeds = f"{self.num_shared} shared seed" + ("s" if self.num_shared > 1 else "")
        if self.largest == 0:
            return f"{start}0 at {seeds}"
        text = f"{start}{self.difference.mean:+.3g}"
        if (interval := self.difference.interval) is not None:
            text += f", {level:.0%} interval {interval.low:+.3g} to {interval.high:+.3g}"
        return f"{text}, {seeds}; at most {self.largest:.3g} at one seed"


def find_repeats(arms: Iterable[Arm]) -> dict[str, Arm]:
    """Name of an arm that was run again → the arm whose levels are the same and whose ``repeat`` is the lowest."""
    alike: dict[tuple[tuple[str, str], ...], list[Arm]] = {}
    for arm in arms:
        alike.setdefault(tuple(item for item in arm.levels.items() if item[0] != REPEAT), []).append(arm)
    found: dict[str, Arm] = {}
    for group in alike.values():
        first, *others = sorted(group, key=lambda arm: natural(arm.levels.get(REPEAT, "0")))
        found |= {other.name: first for other in others}
    return found


def repeats(pairs: Mapping[str, Arm], by_seed: Mapping[str, Values], level: float) -> tuple[Repeat, ...]:
    """The differences of the arms that :func:`find_repeats` found."""
    results = []
    for name, first in pairs.items():
        a, b = by_seed[name], by_seed[first.name]
        apart = [abs(a[seed] - b[seed]) for seed in a if seed in b]
        largest = max(apart, default=None)
        results.append(Repeat(name, first.name, difference(a, b, level), len(apart), largest))
    return tuple(results)
