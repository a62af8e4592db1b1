"""The generator worker's process: receives requests and weights, sends completions.

    trainer ──("init", EngineSpec) ("sync", Payload) ("generate", [Request]) ("stop", None)──▶ worker
    trainer ◀──("ready", (dtypes, about)) ("synced", …) ("started", serials) ("generated", …) ("failed", …) ("died", …)── worker

New weights are loaded between two decode steps (in-flight) or between two batches. A failure is sent with its traceback;
the process ends when its connection does. What happens between two messages is in :mod:`grpo_exp.rollout.loop`.
"""

import os
import queue
import signal
import sys
import threading
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from ..allocator import keep_freed_memory
from ..errors import ConfigError
from .loop import Send, build_engine, loop_for
from .process import die_with_parent


class Stop(BaseException):
    """The trainer has no more work, or is gone. Also raised in the middle of a batch: no handler of errors may catch it."""


def main() -> None:
    die_with_parent()
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in a terminal reaches the whole group; the trainer decides
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # a cluster may signal every process of a job
        signal.signal(number, signal.SIG_IGN)
    for fd in sys.argv[1:3]:  # a process that an engine starts must not keep the trainer's connection open
        os.set_inheritable(int(fd), False)
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
        serve(connection, weights_fd, outgoing.put, sys.argv[3])
    except Stop:
        return
    except ConfigError as error:
        outgoing.put(("refused", error))
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


def serve(connection: Connection, weights_fd: int, send: Send, module: str) -> None:
    """Receive and work until a stop message or the end of the connection.

    Args:
        module: of the engine, imported before the spec is there, since that takes seconds.
    """
    warm_up = getattr(import_module(module), "warm_up", None)
    if warm_up is not None:
        warm_up()
    _, (spec, in_flight) = receive(connection)
    loop = loop_for(build_engine(spec), spec, weights_fd, in_flight, send)
    send(("ready", (loop.engine.observed(), getattr(loop.engine, "about", {}))))

    def drain(block: bool = False) -> None:
        while block or connection.poll(0):
            block = False
            loop.handle(*receive(connection))

    try:
        while True:
            drain(block=loop.idle)
            loop.work(drain)
    finally:
        close = getattr(loop.engine, "close", None)
        if close is not None:
            close()


if __name__ == "__main__":
    main()
