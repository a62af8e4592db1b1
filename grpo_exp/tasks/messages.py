"""What the trainer and the reward process say to each other: plain dataclasses, pickled over a socket pair.

The process is sent the functions, answers :class:`Ready` or :class:`Broken`, and then for every :class:`Group` in turn
:class:`Started` and :class:`RewardResult`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """One prompt's row and its completions. ``completions`` and ``completion_ids`` have the same length."""

    serial: int
    row: dict[str, Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]


@dataclass(frozen=True)
class RewardResult:
    """``rewards``: one per completion, NaN where there is none; all NaN with an ``error``.

    ``num_invalid`` of them were returned as NaN or infinity, to be counted apart from a deliberate None. ``error`` has
    the function's name, the prompt and the original traceback.
    """

    serial: int
    rewards: list[float]
    num_invalid: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Ready:
    """The functions are loaded."""


@dataclass(frozen=True)
class Broken:
    """The functions could not be loaded; ``error`` is a traceback."""

    error: str


@dataclass(frozen=True)
class Started:
    """Work on a group has begun. ``time_s`` is :func:`time.monotonic`: one clock for all processes of a machine."""

    serial: int
    time_s: float


Answer = Ready | Broken | Started | RewardResult
