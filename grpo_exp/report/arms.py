"""Sorts runs into arms by the factors that the sweep declares; the seed repeats an arm and never makes one.

The declared factors are those of all the manifests together, so that sweeps run at different times can be put side by
side. Where nothing is declared, the Hydra group choices that differ take their place. A run without a level for a
factor gets the level ``–`` rather than being left out.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..errors import ConfigError
from .load import ABSENT, RunRecord, RunState, as_text, flatten, section

REPEAT = "repeat"  # the key that labels the second time of an arm and changes nothing
NO_CHOICES = re.compile(r"hydra/|(tracker|experiment|debug|sweeps)$")  # groups whose name says nothing about an arm


@dataclass(frozen=True, eq=False)
class Arm:
    """The runs that share one level of every factor. The name shows only the factors that vary."""

    name: str
    levels: Mapping[str, str]
    runs: tuple[RunRecord, ...]

    @cached_property
    def done(self) -> tuple[RunRecord, ...]:
        """The runs that count in a mean."""
        return tuple(run for run in self.runs if run.is_done)


@dataclass(frozen=True, eq=False)
class Design:
    """What was varied (``factors``), the arms in order of their levels, and the broken runs that fit in none."""

    factors: tuple[str, ...]
    is_declared: bool
    arms: tuple[Arm, ...]
    broken: tuple[RunRecord, ...]


def design(runs: Iterable[RunRecord]) -> Design:
    """Group runs into arms."""
    broken: list[RunRecord] = []
    readable: list[RunRecord] = []
    for run in runs:
        (broken if run.state is RunState.broken else readable).append(run)
    declared = _declared_factors(readable)
    factors = declared or _differing_choices(readable)
    if REPEAT not in factors and any(run.config.get(REPEAT) for run in readable):
        factors = sorted([*factors, REPEAT])
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in readable:
        groups.setdefault(_levels(run, factors), []).append(run)
    varied = [name for index, name in enumerate(factors) if len({levels[index] for levels in groups}) > 1] or factors
    arms = []
    for levels in sorted(groups, key=lambda levels: [natural(level) for level in levels]):
        named = dict(zip(factors, levels, strict=True))
        shown = [factor for factor in varied if (factor, named[factor]) != (REPEAT, "0")] or varied
        name = ",".join(f"{factor}={named[factor]}" for factor in shown) or "all runs"
        arms.append(Arm(name, named, tuple(sorted(groups[levels], key=lambda run: natural(run.seed)))))
    return Design(tuple(factors), bool(declared), tuple(arms), tuple(broken))


def _declared_factors(runs: Iterable[RunRecord]) -> list[str]:
    names = {str(key).lstrip("+~") for run in runs for key in section(run.manifest, "sweep", "factors")}
    return sorted(names - {"seed"})


def _differing_choices(runs: Iterable[RunRecord]) -> list[str]:
    choices: dict[str, set[str]] = {}
    for run in runs:
        for group, choice in section(run.manifest, "choices").items():
            choices.setdefault(group, set()).add(as_text(choice))
    return sorted(group for group, names in choices.items() if len(names) > 1 and not NO_CHOICES.match(group))


def _levels(run: RunRecord, factors: Iterable[str]) -> tuple[str, ...]:
    """One level per factor: the group choice, else the value in the config, else what the run's own sweep noted.

    The config comes before the note because it has one spelling for a value (``1e-5`` and ``0.00001`` are one level).
    """
    sources = section(run.manifest, "choices"), flatten(run.config), section(run.manifest, "sweep", "factors")
    return tuple(
        as_text(next((source[factor] for source in sources if factor in source), 0 if factor == REPEAT else ABSENT))
        for factor in factors
    )


def find_baselines(arms: Iterable[Arm], baseline: str) -> dict[str, Arm | None]:
    """The arm with which each arm (by name) is compared.

    ``baseline`` is the name of an arm, or some of its levels (``precision=fp32``): then every arm is compared with the
    one that has these levels and is otherwise like it, or with none (None) where that was not run.

    Raises:
        ConfigError: no arm has these levels.
    """
    arms = list(arms)
    for arm in arms:
        if arm.name == baseline:
            return {other.name: arm for other in arms}
    wanted = dict(part.split("=", 1) for part in baseline.split(",") if "=" in part)
    if not wanted or not any(_has_levels(arm, wanted) for arm in arms):
        raise ConfigError("baseline", baseline, [arm.name for arm in arms])
    return {arm.name: next((other for other in arms if _is_counterpart(other, arm, wanted)), None) for arm in arms}


def _has_levels(arm: Arm, wanted: Mapping[str, str]) -> bool:
    return all(same_level(arm.levels.get(factor, ABSENT), level) for factor, level in wanted.items())


def _is_counterpart(candidate: Arm, arm: Arm, wanted: Mapping[str, str]) -> bool:
    rest = {factor: level for factor, level in arm.levels.items() if factor not in wanted}
    return _has_levels(candidate, wanted) and _has_levels(candidate, rest)


def same_level(a: str, b: str) -> bool:
    """Equal as text or as numbers."""
    try:
        return a == b or float(a) == float(b)
    except ValueError:
        return False


def natural(text: str) -> tuple[int, float, str]:
    """A sort key: numbers by value, before words."""
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
