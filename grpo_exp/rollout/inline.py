"""``rollout.num_workers=0``: a generator worker without a process, for lockstep runs that repeat bit for bit.

It has the face of a :class:`~grpo_exp.rollout.process.WorkerProcess`; receiving from it is what makes it work.
"""

from collections import deque
from typing import Any

from .loop import WorkerLoop, build_engine

Message = tuple[str, Any]


class InlineProcess:
    """Engine and loop of a worker, run inside the trainer's process."""

    index = 0

    def __init__(self, weights_fd: int) -> None:
        self.connection = InlineConnection(weights_fd)
        self.send = self.connection.send


class InlineConnection:
    """What is sent is done when it is polled for."""

    def __init__(self, weights_fd: int) -> None:
        self._weights_fd = weights_fd
        self._loop: WorkerLoop | None = None
        self._replies: deque[Message] = deque()

    def send(self, message: Message) -> None:
        kind, body = message
        if kind == "init":
            spec, in_flight = body
            self._loop = WorkerLoop(build_engine(spec), spec, self._weights_fd, in_flight, self._replies.append)
            self._replies.append(("ready", (self._loop.engine.observed(), {})))
        elif kind != "stop":
            assert self._loop is not None, "init comes first"
            self._loop.handle(kind, body)

    def poll(self, timeout: float = 0.0) -> bool:
        if not self._replies and self._loop is not None:
            self._loop.work(drain=lambda: None)
        return bool(self._replies)

    def recv(self) -> Message:
        return self._replies.popleft()
