"""``rollout=replay``: groups of an earlier run in place of generated ones, in its order.

Evaluations and probes of the mismatch still sample, with the embedded engine in the trainer's own process. Tokens keep the
staleness they were recorded with: where this run has skipped another number of steps than that one had, their versions are
moved along with its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..config.replays import find_recording, read_index
from ..config.schema import Config
from ..errors import Interrupted
from ..recording import read_step
from ..tasks import Task
from .aside import Codec
from .pool import OnEvent, WorkerPool
from .source import RolloutSource
from .stream import PromptStream
from .types import Group


class RecordedStream(PromptStream):
    """The position in a recording: ``cursor`` counts its steps."""

    def __init__(self, num_steps: int) -> None:
        super().__init__([], seed=0, max_epochs=None)
        self.num_steps = num_steps
        self.prompts: dict[int, int] = {}  # serial → row of the data set, of the step that was read last

    def index(self, serial: int) -> int:
        return self.prompts[serial]

    @property
    def exhausted(self) -> bool:
        return self.cursor >= self.num_steps


class ReplaySource(RolloutSource):
    """Hands out what was recorded.

    Raises:
        ConfigError: there is no such recording.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        codec: Codec,
        pool: WorkerPool,
        on_event: OnEvent,
        should_stop: Callable[[], bool],
    ) -> None:
        super().__init__(config, task, codec, pool, on_event, should_stop)
        self.run = find_recording(config.rollout.replay_from or "", config.seed)
        self.index: list[dict[str, Any]] = read_index(self.run)
        self.recorded = RecordedStream(len(self.index))
        self.stream = self.recorded

    def next_batch(self, steps_left: int | None) -> list[Group] | None:
        """The groups of the next recorded step; None where there are no more.

        Raises:
            RunFailed: its file was damaged since the run began.
            Interrupted: if the run was asked to stop.
        """
        if self.should_stop():
            raise Interrupted
        if self.recorded.exhausted:
            return None
        step = self.recorded.cursor + 1
        groups, rows = read_step(self.run, step)
        self.recorded.cursor = step
        self.recorded.prompts = {group.serial: row for group, row in zip(groups, rows, strict=True)}
        self.buffer.counts.started += len(groups)
        later = self.version - self.index[step - 1]["version"]
        return [_moved(group, later) for group in groups]


def _moved(group: Group, later: int) -> Group:
    rollouts = [rollout._replace(versions=rollout.versions + later) for rollout in group.rollouts]
    return replace(group, rollouts=rollouts, version=group.version + later)
