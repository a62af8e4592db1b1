"""Engines with one fault each, importable by worker processes, and a pool that answers as it is told.

monkeypatch.setitem(ENGINES, Backend.hf, "engines:BrokenEngine"); monkeypatch.setenv("PYTHONPATH", str(TESTS))
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grpo_exp.errors import ConfigError
from grpo_exp.rollout.hf import HFEngine
from grpo_exp.rollout.pool import Item
from grpo_exp.rollout.types import EngineSpec, Generated, Request, Rollout
from grpo_exp.sync.shm import Payload, checksum, unique_parameters

TESTS = Path(__file__).parent
Between = Callable[[], None] | None


def trains(requests: list[Request]) -> bool:
    return not requests[0].evaluation


class NeverBuilt(HFEngine):
    """Cannot even be built."""

    def __init__(self, spec: EngineSpec) -> None:
        raise RuntimeError("no such weights")


class BrokenEngine(HFEngine):
    """Raises at once, whatever it is asked."""

    def generate(self, requests: list[Request], between_steps: Between = None) -> Iterator[Generated]:
        raise RuntimeError("the engine broke")
        yield


class RaisesOnce(HFEngine):
    """Raises in the middle of its first batch for training, then works."""

    raised = False

    def generate(self, requests: list[Request], between_steps: Between = None) -> Iterator[Generated]:
        answers = super().generate(requests, between_steps)
        if trains(requests) and not self.raised:
            self.raised = True
            yield next(answers)
            raise RuntimeError("once only")
        yield from answers


class StumblesInEvaluation(HFEngine):
    """Raises once in every evaluation."""

    stumbled_at = -1

    def generate(self, requests: list[Request], between_steps: Between = None) -> Iterator[Generated]:
        if not trains(requests) and self.stumbled_at != self.version:
            self.stumbled_at = self.version
            raise RuntimeError("once in an evaluation")
        yield from super().generate(requests, between_steps)


class Dies(HFEngine):
    """Its process ends when it is to work."""

    def generate(self, requests: list[Request], between_steps: Between = None) -> Iterator[Generated]:
        os._exit(7)
        yield


class GoneForGood(HFEngine):
    """As a server that dies when it is first to work for training: nobody after it finds one."""

    def __init__(self, spec: EngineSpec) -> None:
        if Path(os.environ["GONE"]).exists():
            raise ConfigError("rollout.urls", "http://127.0.0.1:9", "a server", "ConnectionRefusedError")
        super().__init__(spec)

    def generate(self, requests: list[Request], between_steps: Between = None) -> Iterator[Generated]:
        if trains(requests):
            Path(os.environ["GONE"]).touch()
            os._exit(7)
        yield from super().generate(requests, between_steps)


class NeverAnswersGroup2(HFEngine):
    """Hangs whenever group 2 is in the batch, before anything is answered."""

    def generate(self, requests: list[Request], between_steps: Between = None) -> Iterator[Generated]:
        if any(request.serial == 2 for request in requests):
            time.sleep(3600)
        yield from super().generate(requests, between_steps)


class DropsUpdates(HFEngine):
    """Takes its first weights, and says of all later ones that it has them."""

    def load(self, payload: Payload, fd: int) -> int:
        if self.loads == 0:
            return super().load(payload, fd)
        self.version = payload.version
        return checksum(unique_parameters(self.model).values())


class SlowPrompts(HFEngine):
    """Prompts whose last letter has an odd token take five times as long."""

    def generate(self, requests: list[Request], between_steps: Between = None) -> Iterator[Generated]:
        slow = {request.serial for request in requests if request.prompt_ids[-2] % 2}
        answers = list(super().generate(requests, between_steps))
        for answer in sorted(answers, key=lambda one: one.serial in slow):
            if trains(requests):
                time.sleep(0.05 if answer.serial in slow else 0.01)
            if between_steps is not None:
                between_steps()
            yield answer


class Unhurried(HFEngine):
    """Takes its time for every token, so that there is time to interrupt it."""

    def generate(self, requests: list[Request], between_steps: Between = None) -> Iterator[Generated]:
        def slowly() -> None:
            time.sleep(0.02)
            if between_steps is not None:
                between_steps()

        yield from super().generate(requests, slowly)


class ScriptedPool:
    """In place of a :class:`WorkerPool`: gives every request to ``answer(request, version)`` when it is polled.

    An answer of None is no answer, now or ever.
    """

    works_when_polled = False

    def __init__(self, answer: Callable[[Request, int], Item | None]) -> None:
        self.answer = answer
        self.version = 0
        self.requests: list[Request] = []
        self._waiting: list[Request] = []

    def sync(self, version: int, model: Any) -> None:
        self.version = version

    def wait_synced(self) -> None:
        pass

    def submit(self, requests: list[Request]) -> None:
        self.requests += requests
        self._waiting += requests

    def connections(self) -> list[Any]:
        return []

    def poll(self) -> list[Item]:
        answers = [self.answer(request, self.version) for request in self._waiting]
        self._waiting = []
        return [answer for answer in answers if answer is not None]

    def close(self) -> None:
        pass


def completed(request: Request, version: int, token_ids: list[int] | None = None) -> Generated:
    """A well-formed answer; every completion has the same tokens."""
    ids = token_ids or [5, 6, 2]
    mu, versions = np.full(len(ids), -1.0, np.float32), np.full(len(ids), version, np.int32)
    return Generated(request.serial, [Rollout(ids, mu, versions, True)] * request.num_completions, version)
