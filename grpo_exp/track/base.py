"""What a tracker is: it is told of a run once, of every row of metrics, and of the end.

The run folder is the record of a run; a tracker only shows it elsewhere. So a tracker may lose rows, but it may never
end, slow down or change the training: see :mod:`grpo_exp.track.guard`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker learns of a run.

    Args:
        run_dir: the run folder; whatever the tracker writes goes there.
        name: as the run is listed, e.g. the name of its folder.
        config: the frozen configuration as plain nested dictionaries, enums as their names.
        sweep: name of the sweep that the run belongs to.
        factors: what the sweep varied, e.g. ``{"precision": "bf16", "seed": "0"}``.
        choices: the option of each config group, e.g. ``{"model": "tiny"}``.
        tags: besides those of the configuration.
    """

    run_dir: Path
    name: str
    config: Mapping[str, object]
    sweep: str | None = None
    factors: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, str] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """A completion of a step, as a reader wants to see it."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    num_tokens: int
    finished: bool


@dataclass(frozen=True)
class Details:
    """What does not fit in a row: some completions, and a histogram of ``old - mu`` over the tokens of the step.

    Args:
        counts: tokens in each bin, [bins].
        edges: of the bins, in nats, [bins + 1].
    """

    samples: list[Sample]
    counts: list[int]
    edges: list[float]


class Tracker(Protocol):
    details_every: int  # steps between two that have details; 0: never

    def start(self, run: TrackedRun) -> None:
        """Called once, before the first row; again, by another process, when the run is resumed."""

    def log(self, step: int, row: Mapping[str, float | None]) -> None:
        """One row of metrics. ``step`` is the optimizer step; after a resume it may be lower than one seen before."""

    def details(self, step: int, details: Details) -> None:
        """Comes before the row of its step."""

    def finish(self, exit_code: int) -> None:
        """The last call; ``exit_code`` is what the process will end with, 0 for a run that is done."""


class NullTracker:
    """The tracker of ``tracker=none``."""

    details_every = 0

    def start(self, run: TrackedRun) -> None:
        pass

    def log(self, step: int, row: Mapping[str, float | None]) -> None:
        pass

    def details(self, step: int, details: Details) -> None:
        pass

    def finish(self, exit_code: int) -> None:
        pass
