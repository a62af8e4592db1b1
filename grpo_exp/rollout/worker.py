"""The generator worker's process: receives requests and weights, sends completions.

    trainer ──("init", EngineSpec) ("sync", Payload) ("generate", [Request]) ("stop", None)──▶ worker
    trainer ◀──("ready", dtypes) ("synced", …) ("started", serials) ("generated", …) ("failed", …)── worker

New weights are loaded between two decode steps (in-flight) or between two batches. A failure is sent with its traceback;
the process ends when its connection does.
"""

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol

from .process import die_with_parent
from .types import EngineSpec, Request


class Engine(Protocol):
    """What a generation engine offers; ``factory`` in the spec names a callable that takes the spec and returns one."""

    version: int

    def load(self, payload: Any, fd: int) -> int: ...
    def observed(self) -> dict[str, str]: ...
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


class Stop(BaseException):
    """The trainer has no more work, or is gone. Also raised in the middle of a batch: no handler of errors may catch it."""


class WorkerLoop:
    """Runs one engine. ``receive`` and ``send`` are all it knows of the process it lives in."""

    def __init__(self, engine: Engine, spec: EngineSpec, weights_fd: int, in_flight: bool, send: Any) -> None:
        self.engine, self.spec, self.weights_fd, self.in_flight, self.send = engine, spec, weights_fd, in_flight, send
        self.waiting: deque[Request] = deque()
        self.pending_sync: Any = None

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

    def run_batch(self, drain: Any) -> None:
        """Decode one batch, if there is work. ``drain`` receives what has come in meanwhile."""
        self.apply_sync()
        batch = take_batch(self.waiting, self.spec.batch_size)
        if not batch:
            return
        self.send(("started", [request.serial for request in batch]))
        open_serials = [request.serial for request in batch]
        error = "the engine ended without an answer"

        def between_steps() -> None:
            drain()
            if self.in_flight:
                self.apply_sync()

        start = time.perf_counter()
        num_tokens = 0
        try:
            for generated in self.engine.generate(batch, between_steps):
                if len(open_serials) == len(batch):  # before the trainer can train on anything of this batch
                    self.send(("observed", self.engine.observed()))
                open_serials.remove(generated.serial)
                num_tokens += sum(len(rollout.token_ids) for rollout in generated.rollouts)
                self.send(("generated", generated))
        except Exception:
            error = traceback.format_exc()
        if open_serials:
            self.send(("failed", (open_serials, error)))
        self.send(("batch", (num_tokens, time.perf_counter() - start)))


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in a terminal reaches the whole group; the trainer decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for fd in sys.argv[1:3]:
        os.set_inheritable(
            int(fd), False
        )  # a process that an engine starts must not keep the trainer's connection open
    connection, weights_fd = Connection(int(sys.argv[1])), int(sys.argv[2])
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()  # so that a full pipe never keeps this process from reading

    def send_all() -> None:
        while (message := outgoing.get()) is not None:
            try:
                connection.send(message)
            except OSError:
                return

    sender = threading.Thread(target=send_all, daemon=True)
    sender.start()
    try:
        serve(connection, weights_fd, outgoing.put)
    except Stop:
        return
    except Exception:
        outgoing.put(("died", traceback.format_exc()))
    outgoing.put(None)
    sender.join(5.0)


def receive(connection: "Connection[Any, Any]") -> tuple[str, Any]:
    """The next message; :class:`Stop` where there will be no more."""
    try:
        kind, body = connection.recv()
    except (EOFError, ConnectionError):
        raise Stop from None
    if kind == "stop":
        raise Stop
    return kind, body


def serve(connection: Connection, weights_fd: int, send: Any) -> None:
    """Receive and work until a stop message or the end of the connection."""
    from . import hf  # noqa: F401  (imported before the spec is there: it takes seconds)

    _, (spec, in_flight) = receive(connection)
    loop = WorkerLoop(build_engine(spec), spec, weights_fd, in_flight, send)
    send(("ready", loop.engine.observed()))

    def drain(block: bool = False) -> None:
        while block or connection.poll(0):
            block = False
            loop.handle(*receive(connection))

    while True:
        drain(block=not loop.waiting and loop.pending_sync is None)
        loop.run_batch(drain)


if __name__ == "__main__":
    main()
