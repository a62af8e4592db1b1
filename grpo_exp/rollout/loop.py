"""What a generator worker does between two messages: requests wait here, weights are loaded, answers are sent.

An engine that decodes one batch after another runs in :class:`WorkerLoop`. One whose requests join while others run does in
:class:`JoiningLoop`:

    waiting ──admit, as long as there is room──▶ engine ──step──▶ answers of requests whose completions have all ended

New weights are loaded between two decode steps (in-flight) or when nothing is being decoded, and until then nothing begins.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from .types import EngineSpec, Generated, Request

Send = Callable[[tuple[str, Any]], None]


class Engine(Protocol):
    """What every generation engine offers; ``factory`` in the spec names a callable that takes the spec and returns one."""

    version: int

    def load(self, payload: Any, fd: int) -> int:
        """Take over new weights and return the checksum of what is held; an error leaves the old ones serving."""

    def observed(self) -> dict[str, str]:
        """Precision site → dtype, read from live objects."""


class BatchEngine(Engine, Protocol):
    """An engine that decodes one batch after another."""

    def generate(self, requests: list[Request], between_steps: Any = None) -> Any: ...


def build_engine(spec: EngineSpec) -> Engine:
    module, _, name = spec.factory.partition(":")
    engine: Engine = getattr(import_module(module), name)(spec)
    return engine


def take_batch(waiting: deque[Request], batch_size: int) -> list[Request]:
    """The next requests to decode together: evaluation first and apart, at most ``batch_size`` completions."""
    evaluation = any(request.evaluation for request in waiting)
    batch: list[Request] = []
    room = batch_size
    for request in [r for r in waiting if r.evaluation == evaluation]:
        if batch and (request.alone or batch[0].alone or request.num_completions > room):
            break
        batch.append(request)
        room -= request.num_completions
        waiting.remove(request)
    return batch


class WorkerLoop:
    """Runs one engine, batch after batch. ``drain`` and ``send`` are all it knows of the process it lives in."""

    def __init__(self, engine: Any, spec: EngineSpec, weights_fd: int, in_flight: bool, send: Send) -> None:
        self.engine, self.spec, self.weights_fd, self.in_flight, self.send = engine, spec, weights_fd, in_flight, send
        self.waiting: deque[Request] = deque()
        self.pending_sync: Any = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do until a message comes."""
        return not self.waiting and self.pending_sync is None

    def handle(self, kind: str, body: Any) -> None:
        match kind:
            case "generate":
                self.waiting.extend(body)
            case "sync":
                self.pending_sync = body
            case _:
                raise ValueError(f"unknown message {kind}")

    def apply_sync(self) -> None:
        if self.pending_sync is None:
            return
        payload, self.pending_sync = self.pending_sync, None
        start = time.perf_counter()
        try:
            held = self.engine.load(payload, self.weights_fd)
        except Exception:
            self.send(("sync_failed", (payload.version, traceback.format_exc())))
            return
        self.send(("synced", (payload.version, held, time.perf_counter() - start, self.engine.observed())))

    def work(self, drain: Callable[[], None]) -> None:
        """Decode one batch, if there is work. ``drain`` receives what has come in meanwhile."""
        self.apply_sync()
        batch = take_batch(self.waiting, self.spec.batch_size)
        if not batch:
            return
        self.send(("started", [request.serial for request in batch]))
        open_serials = [request.serial for request in batch]
        ended: list[Generated] = []  # since the last step: one message for all of them
        error = "the engine ended without an answer"

        def send_ended() -> None:
            nonlocal ended
            if ended:
                if len(open_serials) == len(batch):  # before the trainer can train on anything of this batch
                    self.send(("observed", self.engine.observed()))
                for generated in ended:
                    open_serials.remove(generated.serial)
                self.send(("generated", ended))
                ended = []

        def between_steps() -> None:
            send_ended()
            drain()
            if self.in_flight:
                self.apply_sync()

        start = time.perf_counter()
        num_tokens = 0
        try:
            for generated in self.engine.generate(batch, between_steps):
                ended.append(generated)
                num_tokens += generated.num_tokens
        except Exception:
            error = traceback.format_exc()
        send_ended()
        if open_serials:
            self.send(("failed", (open_serials, error)))
        self.send(("batch", (num_tokens, time.perf_counter() - start)))


@dataclass(frozen=True)
class Unanswered:
    """A request that an engine gave up, though it goes on with the others."""

    serial: int
    error: str


@runtime_checkable
class JoiningEngine(Engine, Protocol):
    """An engine with continuous batching."""

    num_running: int  # completions

    def add(self, request: Request) -> None:
        """Let a request in; its completions share the next steps with all others."""

    def step(self) -> list[Generated | Unanswered]:
        """Advance everything a little; returns what has ended. Raises if the engine cannot go on."""


class JoiningLoop(WorkerLoop):
    """An error of :meth:`JoiningEngine.step` ends the worker: what such an engine would do next is anyone's guess."""

    def __init__(self, engine: JoiningEngine, spec: EngineSpec, weights_fd: int, in_flight: bool, send: Send) -> None:
        super().__init__(engine, spec, weights_fd, in_flight, send)
        self.joining = engine
        self.alone = False  # a request that wants no company is running
        self._observed: dict[str, str] = {}
        self._num_tokens, self._busy_s = 0, 0.0

    @property
    def idle(self) -> bool:
        can_admit = bool(self.waiting) and self.joining.version >= 0
        return self.pending_sync is None and not can_admit and not self.joining.num_running

    def work(self, drain: Callable[[], None]) -> None:
        """One step."""
        if self.in_flight or not self.joining.num_running:
            self.apply_sync()
        if self.pending_sync is None and self.joining.version >= 0:
            self._admit()
        if not self.joining.num_running:
            return
        start = time.perf_counter()
        answers = self.joining.step()
        self._busy_s += time.perf_counter() - start
        if retries := getattr(self.joining, "retries", []):
            self.send(("retried", [retries.pop(0) for _ in range(len(retries))]))  # threads of the engine append
        if answers:
            self._report()
            self._answer(answers)
        if answers or not self.joining.num_running:
            self.send(("batch", (self._num_tokens, self._busy_s)))
            self._num_tokens, self._busy_s = 0, 0.0
        drain()

    def _admit(self) -> None:
        """Evaluation first; at most ``batch_size`` completions, or one request that is larger than that."""
        for request in sorted(self.waiting, key=lambda request: not request.evaluation):
            running = self.joining.num_running
            if running == 0:
                self.alone = False
            if running and (self.alone or request.alone or running + request.num_completions > self.spec.batch_size):
                return
            self.waiting.remove(request)
            self.alone = request.alone
            self.send(("started", [request.serial]))
            self.joining.add(request)

    def _report(self) -> None:
        """What is observed goes ahead of what is trained on; only what has changed is said."""
        observed = self.joining.observed()
        if observed != self._observed:
            self._observed = observed
            self.send(("observed", observed))

    def _answer(self, answers: list[Generated | Unanswered]) -> None:
        if ended := [answer for answer in answers if isinstance(answer, Generated)]:
            self._num_tokens += sum(generated.num_tokens for generated in ended)
            self.send(("generated", ended))
        for answer in answers:
            if isinstance(answer, Unanswered):
                self.send(("failed", ([answer.serial], answer.error)))


def loop_for(engine: Any, spec: EngineSpec, weights_fd: int, in_flight: bool, send: Send) -> WorkerLoop:
    """The loop that fits an engine."""
    kind = JoiningLoop if isinstance(engine, JoiningEngine) else WorkerLoop
    return kind(engine, spec, weights_fd, in_flight, send)
