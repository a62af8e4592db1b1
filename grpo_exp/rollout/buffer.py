"""Groups between their start and the step that trains them: how many may be started, and which are trained next.

With P prompts a step and a staleness bound S, a group started at version v with fewer than (S + 1) P others before it is
trained at version v + S at the latest. So bounding how many are open bounds staleness, and nothing has to be thrown away.
A finished group may overtake a slower one only as long as the slower one can still be trained in time.
"""

from collections import Counter
from dataclasses import dataclass, field

from .types import Group


@dataclass
class GroupCounts:
    """Every group ever started is in exactly one of the others at the end of a run."""

    started: int = 0
    trained: int = 0
    dropped_stale: int = 0
    dropped_failed: int = 0
    replaced: int = 0
    left_over: int = 0

    def check(self) -> None:
        """Raises RuntimeError if a group was lost or counted twice."""
        ended = self.trained + self.dropped_stale + self.dropped_failed + self.replaced + self.left_over
        if ended != self.started:
            raise RuntimeError(f"groups do not add up: {self}")


@dataclass
class GroupBuffer:
    """Admission and order.

    ``open`` maps the serial of an unfinished group to the version it was started at. ``reopened`` are groups that a
    checkpoint left open, counted as started already, until they are started again.
    """

    prompts_per_step: int
    max_staleness: int
    open: dict[int, int] = field(default_factory=dict)
    ready: dict[int, Group] = field(default_factory=dict)
    reopened: set[int] = field(default_factory=set)
    counts: GroupCounts = field(default_factory=GroupCounts)
    stale_lags: Counter[int] = field(default_factory=Counter)

    @property
    def num_held(self) -> int:
        return len(self.open) + len(self.ready)

    def room(self) -> int:
        """How many groups may be started now: those that can be trained within the staleness bound."""
        return max(0, (self.max_staleness + 1) * self.prompts_per_step - self.num_held)

    def start(self, serial: int, version: int) -> None:
        self.open[serial] = version
        if serial in self.reopened:
            self.reopened.remove(serial)
        else:
            self.counts.started += 1

    def restart(self, serial: int, version: int) -> None:
        """A retry begins anew, under a newer version."""
        self.open[serial] = version

    def finish(self, group: Group) -> None:
        """A group is complete, rewards and all. Its version is the oldest that sampled any of its tokens."""
        del self.open[group.serial]
        self.ready[group.serial] = group

    def fail(self, serial: int) -> None:
        del self.open[serial]
        self.counts.dropped_failed += 1

    def replace(self, serial: int) -> None:
        """A complete group that teaches nothing is not counted towards a batch: there is room for another."""
        del self.open[serial]
        self.counts.replaced += 1

    def drop_stale(self, version: int) -> list[Group]:
        """Remove and return finished groups that are too old for this version."""
        stale = [group for group in self.ready.values() if version - group.version > self.max_staleness]
        for group in stale:
            del self.ready[group.serial]
            self.counts.dropped_stale += 1
            self.stale_lags[version - group.version] += 1
        return stale

    def take(self, version: int, last: bool = False) -> list[Group] | None:
        """The groups of the next step, or None while it must wait.

        Args:
            last: no group will be started any more, so a smaller batch is what remains.
        """
        wanted = min(self.prompts_per_step, self.num_held) if last else self.prompts_per_step
        if len(self.ready) < wanted or wanted == 0:
            return None
        order = sorted(self.ready.values(), key=lambda group: (group.version, group.serial))
        chosen = order[:wanted]
        if not self._rest_in_time(version, order[wanted:]):
            return None
        for group in chosen:
            del self.ready[group.serial]
        return sorted(chosen, key=lambda group: group.serial)

    def _rest_in_time(self, version: int, rest: list[Group]) -> bool:
        """Whether unfinished groups can all be trained in time after a step without them."""
        unfinished = [started + self.max_staleness for started in self.open.values()]
        finished = [group.version + self.max_staleness for group in rest]
        for later in range(self.max_staleness + 1):
            waiting = sum(deadline <= version + later for deadline in unfinished)
            due = waiting + sum(deadline <= version + later for deadline in finished)
            if waiting and due > later * self.prompts_per_step:
                return False
        return True

    def serials(self) -> list[int]:
        """Groups that were started and are in no batch yet."""
        return sorted([*self.open, *self.ready, *self.reopened])

    def close(self, check: bool = True) -> None:
        """Count what is left over, and ``check`` that all adds up."""
        self.counts.left_over = len(self.serials())
        if check:
            self.counts.check()
