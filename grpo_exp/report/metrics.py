"""The rows of a metrics.jsonl, and how they become single numbers.

The file is read in full and nothing is sampled or joined, so first, last and best values are exact also for keys that
few rows have. A null (how NaN and infinity are written) stays a gap: it is never replaced by an older value.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"
Section: TypeAlias = "dict[str, Json]"

decode = json.JSONDecoder(parse_constant=lambda _: None).decode  # a NaN literal counts as null


@dataclass(frozen=True, eq=False)
class Metrics:
    """The rows of one metrics.jsonl in file order. Values are finite floats; everything else is None."""

    rows: tuple[Section, ...]
    problems: tuple[str, ...] = ()

    def column(self, key: str) -> list[float | None]:
        """The values of the rows that have the key, in order."""
        return [number(row[key]) for row in self.rows if key in row]

    def series(self, key: str) -> list[tuple[float | None, float | None]]:
        """(step, value) of the rows that have the key."""
        return [(number(row.get("step")), number(row[key])) for row in self.rows if key in row]

    def first(self, key: str) -> float | None:
        return next(iter(self.column(key)), None)

    def last(self, key: str, window: int = 1) -> float | None:
        """The mean of the last ``window`` rows with the key: None when one of them is null, whatever came before."""
        values: list[float] = []
        for row in reversed(self.rows):
            if key in row:
                value = number(row[key])
                if value is None:
                    return None
                values.append(value)
            if len(values) == window:
                break
        return math.fsum(values) / len(values) if values else None

    def mean(self, key: str) -> float | None:
        """Over the steps at which the value is a number."""
        values = [value for value in self.column(key) if value is not None]
        return math.fsum(values) / len(values) if values else None

    def highest(self, key: str) -> float | None:
        return max((value for value in self.column(key) if value is not None), default=None)

    def per_second(self, key: str) -> float | None:
        """A running total divided by the seconds of training, both from the last row that has the two."""
        for row in reversed(self.rows):
            total, seconds = number(row.get(key)), number(row.get("wall_s"))
            if total is not None and seconds is not None:
                return total / seconds if seconds > 0 else None
        return None

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset().union(*self.rows)


def read_metrics(path: Path) -> Metrics:
    """Read all rows. A last line without its end is still being written and is left out; others are problems."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return Metrics((), (f"{path.name} cannot be read ({error.strerror})",))
    lines = [(place, line) for place, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_torn = not text.endswith("\n")
    try:  # one call for all lines is a quarter faster than one each
        whole = decode(f"[{','.join(line for _, line in lines)}]")
        if len(whole) == len(lines) and all(isinstance(row, dict) for row in whole):
            return Metrics(tuple(whole))
    except (ValueError, RecursionError):
        pass
    rows: list[Section] = []
    problems: list[str] = []
    for place, line in lines:
        row = _decoded(line)
        if isinstance(row, dict):
            rows.append(row)
        elif not is_torn or place < lines[-1][0]:
            problems.append(f"{path.name} line {place} is not a JSON object")
    return Metrics(tuple(rows), tuple(problems))


def _decoded(text: str) -> Json:
    try:
        content: Json = decode(text)
    except (ValueError, RecursionError):
        return None
    return content


def number(value: Json) -> float | None:
    """A finite float, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None
