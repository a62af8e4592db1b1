"""Interquartile mean and probability of improvement of each arm over task × seed cells, or why they are not shown.

Where ``task`` is a factor of the sweep, the arms that differ in it alone are one row: an arm of this table is whatever is
left of the levels. ``inference.aggregates`` has the formulas and refuses too few cells.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .arms import Arm
from .inference import Aggregates, Refusal, aggregates
from .layout import Grid, Lines
from .numbers import decimals_for, plain
from .stats import Interval

TASK = "task"


@dataclass(frozen=True)
class Aggregate:
    """Arm against baseline over the tasks both have. ``num_cells`` is that of the smaller side."""

    arm: str
    baseline: str
    num_cells: int
    found: Aggregates | Refusal


Levels = tuple[tuple[str, str], ...]


def aggregate(
    arms: Sequence[Arm], pairs: Mapping[str, Arm | None], by_seed: Mapping[str, Mapping[str, float]], level: float
) -> tuple[Aggregate, ...]:
    """One for every arm that has a baseline.

    Args:
        pairs: arm → its baseline arm; itself or None: not compared.
        by_seed: arm → seed → the metric.
    """
    sides: dict[tuple[Levels, Levels], tuple[dict[str, list[float]], dict[str, list[float]]]] = {}
    for arm in arms:
        other = pairs[arm.name]
        if other is None or other is arm:
            continue
        a, b = sides.setdefault((_without_task(arm), _without_task(other)), ({}, {}))
        a[arm.levels.get(TASK, "")] = list(by_seed[arm.name].values())
        b[other.levels.get(TASK, "")] = list(by_seed[other.name].values())
    names = {_without_task(arm): ",".join(part for part in arm.name.split(",") if not part.startswith(f"{TASK}="))
             for arm in arms}  # fmt: skip
    results = []
    for (mine, theirs), (a, b) in sides.items():
        shared = [task for task in a if a[task] and b.get(task)]
        cells = min(sum(len(side[task]) for task in shared) for side in (a, b))
        results.append(Aggregate(names[mine], names[theirs], cells, aggregates(a, b, level)))
    return tuple(results)


def _without_task(arm: Arm) -> Levels:
    return tuple(item for item in arm.levels.items() if item[0] != TASK)


def aggregate_part(items: Sequence[Aggregate], metric: str, level: float) -> Iterable[Grid | Lines]:
    """The table, or the reason why there is none."""
    title = f"Interquartile mean of {metric} and probability of improvement, over task × seed cells"
    rows = tuple(
        (item.arm, str(item.num_cells), plain(found.iqm), _range(found.iqm_interval), plain(found.improvement),
         _range(found.improvement_interval))
        for item in items
        if isinstance(found := item.found, Aggregates)
    )  # fmt: skip
    if rows:
        yield Grid(title, ("arm", "cells", "IQM", f"{level:.0%} interval", "P(better)", f"{level:.0%} interval"), rows)
    elif items:
        most = max(item.num_cells for item in items)
        yield Lines(title, (f"not shown, {most} here: {Refusal.few_cells.value}",))


def _range(interval: Interval) -> str:
    decimals = decimals_for(abs(interval.low), interval.half_width)
    return f"{plain(interval.low, decimals)} to {plain(interval.high, decimals)}"
