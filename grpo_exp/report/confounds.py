"""The confound check: what else differs between arms, besides the factors that were declared.

A comparison of precisions is worth nothing if the fp16 arm was also evaluated more often or ran on another torch. Every
key of the frozen configs and of the manifests is looked at, and a difference is reported unless a declared factor
implies it: a config value implies itself, a config group its own block, and nothing else.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache

from .arms import REPEAT, Arm
from .load import RunRecord, as_text, flatten
from .metrics import Json, number

ABSENT = "(absent)"

# Differences in these change no result, or are said elsewhere. A run starts from its config and from nothing else, so
# Hydra's choices and overrides add nothing to it; memory is compared in GiB, as two equal nodes differ by some pages.
# The first sync is a measurement that the run itself holds against its bound.
IGNORED = (
    "runs_dir",
    "sweep.*",
    "tracker.*",
    "run.*",
    "choices.*",
    "overrides",
    "hardware.host",
    "generator.first_sync.*",
)


class Source(Enum):
    config = "config"
    manifest = "manifest"


class Spread(Enum):
    """Where a value differs. Only a difference within arms leaves their comparison by seed untouched."""

    between = "between arms"
    mixed = "between arms and among the runs of an arm"
    within = "among the runs of an arm, alike in all arms"


@dataclass(frozen=True)
class Confound:
    """One key that differs. ``values``: arm name → the distinct values of its runs, as text."""

    key: str
    source: Source
    spread: Spread
    values: Mapping[str, tuple[str, ...]]

    @property
    def confounds(self) -> bool:
        return self.spread is not Spread.within


Table = dict[str, dict[str, dict[str, set[str]]]]  # key → arm → seed → values


def find_confounds(arms: Sequence[Arm], factors: Iterable[str]) -> list[Confound]:
    """Every difference that the factors do not imply, confounds first. All runs are looked at, done or not."""
    factors = {*factors, "seed", REPEAT}
    found = []
    for source in Source:
        table = _table(arms, source)
        for key in sorted(table):
            if not _is_implied(key, source, factors):
                confound = _compare(key, source, table[key])
                if confound is not None:
                    found.append(confound)
    return sorted(found, key=lambda confound: not confound.confounds)


def _table(arms: Sequence[Arm], source: Source) -> Table:
    """A key that a run lacks is a value of its own, except in a manifest that may not be complete yet."""
    flat = {run: _flat(run, source) for arm in arms for run in arm.runs}
    keys = set().union(*flat.values()) if flat else set()
    table: Table = {}
    for arm in arms:
        for run in arm.runs:
            for key in keys:
                if key in flat[run] or source is Source.config or run.is_done:
                    seeds = table.setdefault(key, {}).setdefault(arm.name, {})
                    seeds.setdefault(run.seed, set()).add(flat[run].get(key, ABSENT))
    return table


def _flat(run: RunRecord, source: Source) -> dict[str, str]:
    flat = flatten(run.config if source is Source.config else run.manifest)
    return {key: _as_compared(key, value) for key, value in flat.items() if not _is_ignored(key)}


@cache
def _is_ignored(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in IGNORED)


def _as_compared(key: str, value: Json) -> str:
    size = number(value)
    if key == "hardware.memory_bytes" and size is not None:
        return f"{size / 2**30:.0f} GiB"
    if isinstance(value, list):
        return json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    return as_text(value)


def _is_implied(key: str, source: Source, factors: Iterable[str]) -> bool:
    """``precision.declared``, ``.observed``, ``.reasons`` and ``.kernels`` follow from any setting of that group."""
    for factor in factors:
        if key == factor or key.startswith(f"{factor}."):
            return True
        if source is Source.manifest and key.startswith("precision.") and factor.startswith("precision."):
            return True
    return False


def _compare(key: str, source: Source, arms: dict[str, dict[str, set[str]]]) -> Confound | None:
    values = {arm: set().union(*seeds.values()) for arm, seeds in arms.items()}
    if len(set().union(*values.values())) < 2:
        return None
    varies_within = any(len(found) > 1 for found in values.values())
    profiles = list(arms.values())
    differs_between = any(_differ(a, b) for index, a in enumerate(profiles) for b in profiles[:index])
    match varies_within, differs_between:
        case True, True:
            spread = Spread.mixed
        case False, True:
            spread = Spread.between
        case _:
            spread = Spread.within
    return Confound(key, source, spread, {arm: tuple(sorted(found)) for arm, found in values.items()})


def _differ(a: dict[str, set[str]], b: dict[str, set[str]]) -> bool:
    """By seed where the arms share seeds, as values that go with the seed cancel out of a paired difference."""
    shared = a.keys() & b.keys()
    if shared:
        return any(a[seed] != b[seed] for seed in shared)
    return set().union(*a.values()) != set().union(*b.values())
