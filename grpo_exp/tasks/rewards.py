"""Rewards for a single-threaded event loop: submit groups, wait on the connections, poll for results.

Functions of the shipped tasks are pure and fast and run in the trainer itself. Everything else runs in one separate
process, started when first needed: a function that hangs is ended by killing that process, which leaves nothing behind,
and a new one goes on with the groups that wait. No thread is started in the trainer.
"""

import io
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any, Self

import cloudpickle

from grpo_exp.config.schema import RewardErrors
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.tasks import import_path
from grpo_exp.tasks.evaluate import evaluate, failed, name_of
from grpo_exp.tasks.messages import Broken, Group, Ready, RewardResult, Started
from grpo_exp.tasks.reward_process import RewardChild, code_of_file
from grpo_exp.tasks.types import Completion, RewardFunction, RewardSpec, Row

__all__ = ["RewardResult", "RewardRunner"]

LOAD_TIMEOUT_S = 300.0
"""For starting the process and importing the user's modules, which may import torch and load a reward model."""


@dataclass(frozen=True)
class Job:
    group: Group
    data: bytes
    """The group, pickled."""


class RewardRunner:
    """Rewards of groups by the sum of ``reward_funcs``, each a function or an import path.

    Args:
        timeout_s: seconds for one group, from when the process began to work on it.
        errors: what the caller is to do with a result that has an error; kept here for it, the runner only reports.
        shuffle: permute the rewards of each group, by ``seed`` and the group's serial alone.

    Raises:
        ConfigError: no function at all, or one that cannot be sent to another process.
    """

    def __init__(
        self,
        reward_funcs: Sequence[RewardSpec],
        timeout_s: float = 60.0,
        errors: RewardErrors = RewardErrors.fail,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if not reward_funcs:
            raise ConfigError("reward_funcs", [], "one function or more")
        self.timeout_s, self.errors, self.shuffle, self.seed = timeout_s, errors, shuffle, seed
        self._functions = [f for f in reward_funcs if not isinstance(f, str) and is_shipped(f)]
        self._in_process = len(self._functions) == len(reward_funcs)
        self._names = ", ".join(repr(name_of(function)) for function in reward_funcs)
        self._payload = b"" if self._in_process else pickled(reward_funcs)
        self._queue: deque[Job] = deque()
        self._sent: deque[Job] = deque()  # in the process or in the socket's buffer, in order
        self._started_s: float | None = None  # when the process began on the first of these
        self._done: list[RewardResult] = []
        self._child: RewardChild | None = None

    def start(self) -> None:
        """Start the process now and not with the first group, so that it loads while something else does."""
        if not self._in_process and self._child is None:
            self._child = RewardChild(self._payload)

    def submit(
        self, serial: int, row: Row, completions: Sequence[Completion], completion_ids: Sequence[Sequence[int]]
    ) -> None:
        """Ask for the rewards of one group; ``serial`` is given back with them."""
        group = Group(serial, row, completions, completion_ids)
        if self._in_process:
            self._finish(evaluate(self._functions, group))
        else:
            self._queue.append(Job(group, cloudpickle.dumps(group)))
            self._advance()

    def poll(self) -> list[RewardResult]:
        """The results since the last call, without waiting. Raises :class:`RunFailed` if no function can be loaded."""
        if self._child is not None:
            # Results first: the caller may have been away for longer than a group may take.
            self._receive(self._child)
        if self._child is not None:
            self._check_time(self._child)
        self._advance()
        done, self._done = self._done, []
        return done

    @property
    def ready(self) -> bool:
        """Whether the functions are loaded; :meth:`poll` is what finds out."""
        return self._in_process or (self._child is not None and self._child.ready)

    @property
    def pending(self) -> int:
        """Groups submitted whose results :meth:`poll` has not given back yet."""
        return len(self._queue) + len(self._sent) + len(self._done)

    def connections(self) -> "list[Connection[bytes, Any]]":
        """What ``multiprocessing.connection.wait`` is to wait on; :meth:`poll` when one of them is ready."""
        return [] if self._child is None else [self._child.connection]

    def wait_s(self) -> float | None:
        """Seconds after which to :meth:`poll` though no connection is ready; None if there is nothing to wait for."""
        if self._done:
            return 0.0
        deadline_s = self._deadline_s()
        return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())

    def close(self) -> None:
        """End the process and forget what is pending. Can be called again."""
        if self._child is not None:
            self._child.kill()
            self._child = None
        self._queue.clear()
        self._sent.clear()
        self._done.clear()
        self._started_s = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _advance(self) -> None:
        """Send as many groups ahead as the socket's buffer takes, so that the process works while the caller does not."""
        if not self._queue:
            return
        self.start()
        child = self._child
        if child is None or not child.ready:
            return  # before that a large group would fill the socket and block the caller
        room = child.buffer_bytes - sum(len(job.data) for job in self._sent)
        while self._queue and (not self._sent or len(self._queue[0].data) <= room):
            job = self._queue.popleft()
            room -= len(job.data)
            self._sent.append(job)
            child.send(job.data)

    def _receive(self, child: RewardChild) -> None:
        for answer in child.receive():
            match answer:
                case Ready():
                    child.ready = True
                case Broken(error):
                    self.close()
                    raise RunFailed(f"reward function {self._names} could not be loaded\n{error}")
                case Started(_, time_s):
                    self._started_s = time_s
                case RewardResult():
                    self._sent.popleft()
                    self._started_s = None
                    self._finish(answer)
        if child.ended:
            self._give_up(child, None)

    def _check_time(self, child: RewardChild) -> None:
        deadline_s = self._deadline_s()
        if deadline_s is None or time.monotonic() <= deadline_s:
            return
        if child.ready:
            self._give_up(child, f"took longer than {self.timeout_s:g} s (task.reward_timeout_s)")
        else:
            self._give_up(child, f"was not loaded within {LOAD_TIMEOUT_S:g} s")

    def _deadline_s(self) -> float | None:
        if self._started_s is not None:
            return self._started_s + self.timeout_s
        if self._child is not None and not self._child.ready:
            return self._child.started_s + LOAD_TIMEOUT_S
        return None

    def _give_up(self, child: RewardChild, reason: str | None) -> None:
        """Kill the process and report the group it was at; the others go back to the queue.

        Without a ``reason`` the process ended by itself.
        """
        code = child.kill()
        self._child = None
        reason = reason or f"ended the reward process with exit code {code}"
        if not child.ready:
            self.close()
            raise RunFailed(f"reward function {self._names} could not be loaded: it {reason}")
        if self._sent:
            job = self._sent.popleft()
            self._finish(failed(job.group, f"reward function {self._names} {reason}"))
        self._queue.extendleft(reversed(self._sent))
        self._sent.clear()
        self._started_s = None

    def _finish(self, result: RewardResult) -> None:
        if self.shuffle:
            rewards = list(result.rewards)
            random.Random(f"{self.seed}/{result.serial}").shuffle(rewards)
            result = replace(result, rewards=rewards)
        self._done.append(result)


def is_shipped(function: RewardFunction) -> bool:
    """Whether a function is one of ours: pure, quick and free of surprises, so no process is needed for it."""
    return (getattr(function, "__module__", None) or "").startswith("grpo_exp.tasks.")


def pickled(functions: Sequence[RewardSpec]) -> bytes:
    """All functions in one pickle; those of ``__main__``, lambdas and closures go by value."""
    sendable = [import_path.absolute(f) if isinstance(f, str) else f for f in functions]
    for function in sendable:
        try:
            dumps(function)
        except Exception as error:
            fix = f"it cannot be sent to the reward process: {error}"
            raise ConfigError("reward_funcs", name_of(function), "functions that can be pickled", fix) from error
    return dumps(sendable)


def reduce_code(code: CodeType) -> tuple[Any, ...]:
    _, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return code_of_file, (code.co_filename, arguments)


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # ships no types
    """Keeps the file name of code, which cloudpickle leaves out to make its output repeatable."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: reduce_code})


def dumps(value: object) -> bytes:
    file = io.BytesIO()
    CodePickler(file).dump(value)
    return file.getvalue()
