"""Two probes, token by token: the later one's cells against those of the same name in the earlier one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..report.stats import estimate
from . import store

SAME = ("temperature", "seed")
TOLD = ("model", "device", "kernels", "versions", "git", "hardware")


def check(folder: Path, report: dict[str, Any], arrays: store.Arrays) -> None:
    """Raises ConfigError if the earlier probe asked something else, so that no token could be compared."""
    before, kept = store.read_report(folder), store.read_arrays(folder)
    for key in SAME:
        if before[key] != report[key]:
            raise ConfigError("--against", str(folder), f"a probe with {key} {report[key]}", f"this has {before[key]}")
    one = [report["grid"][key] for key in ("num_completions", "max_new_tokens")]
    if one != [before["grid"][key] for key in ("num_completions", "max_new_tokens")] or not all(
        np.array_equal(kept[name], arrays[name]) for name in ("prompts", "prompts.lengths")
    ):
        raise ConfigError("--against", str(folder), "a probe of the same prompts, as often and as long", "these differ")


def compare(folder: Path, report: dict[str, Any], arrays: store.Arrays) -> dict[str, Any]:
    """What became of generators and cells that both probes measured.

    Completions are sampled from the same seeds, so they agree up to the first token that the two probes decide otherwise;
    up to there contexts are the same, and so every difference is one of numerics or weights.
    """
    before, kept = store.read_report(folder), store.read_arrays(folder)
    found: dict[str, Any] = {
        "folder": str(folder.resolve()),
        "created": before["created"],
        "differs": list(_differences(before, report)),
        "generators": [],
        "cells": [],
    }
    places = {one["label"]: index for index, one in enumerate(before["generators"]) if one.get("num_tokens")}
    for index, one in enumerate(report["generators"]):
        if not one.get("num_tokens") or one["label"] not in places:
            continue
        pair = _Pair(kept, f"g{places[one['label']]}", arrays, f"g{index}")
        entry = {"label": one["label"], "shared": float(pair.same.mean()), **pair.apart("mu", "mu")}
        found["generators"].append(entry)
        found["cells"] += _cells(one["label"], before, report, pair)
    return found


def _differences(before: dict[str, Any], report: dict[str, Any]) -> Iterator[str]:
    """What else is not the same, a line each."""
    for key in TOLD:
        old, new = before[key], report[key]
        if isinstance(old, dict) and isinstance(new, dict):
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    yield f"{key}.{name}: {old.get(name)} → {new.get(name)}"
        elif old != new:
            yield f"{key}: {old} → {new}"


def _cells(generator: str, before: dict[str, Any], report: dict[str, Any], pair: "_Pair") -> Iterator[dict[str, Any]]:
    """The trainers that both probes have for one generator."""
    of_before, of_now = (_columns(one, generator) for one in (before, report))
    for trainer, column in of_now.items():
        if trainer not in of_before:
            continue
        old, new = f"t{of_before[trainer]}", f"t{column}"
        first, second = pair.sizes("before", old), pair.sizes("now", new)
        difference = estimate([float(b - a) for a, b in zip(first, second, strict=True)])
        yield {
            "generator": generator,
            "trainer": trainer,
            **pair.apart(old, new),
            "before": float(np.average(first, weights=pair.lengths["before"])),
            "now": float(np.average(second, weights=pair.lengths["now"])),
            "difference": difference.mean,
            "difference_half_width": None if difference.interval is None else difference.interval.half_width,
        }


def _columns(report: dict[str, Any], generator: str) -> dict[str, int]:
    """Trainer → its number, of those that were measured."""
    cells = [cell for cell in report["cells"] if cell["generator"] == generator]
    return {cell["trainer"]: number for number, cell in enumerate(cells) if cell["statistics"]}


class _Pair:
    """The same generator in two probes; ``same`` marks the tokens of the later one up to where a sequence parts."""

    def __init__(self, before: store.Arrays, old: str, now: store.Arrays, new: str) -> None:
        self.arrays = {"before": (before, old), "now": (now, new)}
        self.lengths = {"before": before[f"{old}.tokens.lengths"], "now": now[f"{new}.tokens.lengths"]}
        ours, theirs = self._split("now", "tokens"), self._split("before", "tokens")
        counts = [_common(a, b) for a, b in zip(ours, theirs, strict=True)]
        self.same = np.concatenate([np.arange(len(a)) < n for a, n in zip(ours, counts, strict=True)])
        self._there = np.concatenate([np.arange(len(b)) < n for b, n in zip(theirs, counts, strict=True)])

    def _array(self, side: str, name: str) -> NDArray[Any]:
        arrays, prefix = self.arrays[side]
        return arrays[f"{prefix}.{name}"]

    def _split(self, side: str, name: str) -> list[NDArray[Any]]:
        return np.split(self._array(side, name), np.cumsum(self.lengths[side])[:-1])

    def apart(self, old: str, new: str) -> dict[str, float]:
        """How far two arrays differ on the tokens both probes have; 0 where there are none."""
        before, now = self._array("before", old)[self._there], self._array("now", new)[self.same]
        size = np.abs(now.astype(np.float64) - before)
        return {"abs_mean": float(size.mean()), "abs_max": float(size.max())} if len(size) else NOTHING

    def sizes(self, side: str, trainer: str) -> list[float]:
        """Mean |d| of each sequence, of all its tokens."""
        scored, mu = self._split(side, trainer), self._split(side, "mu")
        return [float(np.abs(a.astype(np.float64) - b).mean()) for a, b in zip(scored, mu, strict=True)]


NOTHING = {"abs_mean": 0.0, "abs_max": 0.0}


def _common(one: NDArray[Any], other: NDArray[Any]) -> int:
    """Length of the common beginning."""
    length = min(len(one), len(other))
    parted = np.flatnonzero(one[:length] != other[:length])
    return int(parted[0]) if len(parted) else length
