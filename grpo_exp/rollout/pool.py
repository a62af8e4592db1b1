"""The trainer's side of the generator workers: who has which request, which weights, and who is still alive.

One thread, no locks: everything happens in :meth:`WorkerPool.poll`, which the trainer calls while it waits. A worker that
dies or does not answer in time is ended and started again; its requests go out once more, up to a limit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import nn

from ..config.schema import RolloutConfig
from ..errors import RunFailed
from ..precision import DTYPES
from ..sync.shm import Payload, Sender
from .inline import InlineProcess
from .process import Spawned, WorkerProcess
from .types import EngineSpec, Generated, Request

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Failed:
    """A request that was tried as often as allowed."""

    serial: int
    reason: str


@dataclass
class Member:
    """One worker and what it owes."""

    process: WorkerProcess | InlineProcess
    requests: dict[int, Request] = field(default_factory=dict)
    started_at: dict[int, float] = field(default_factory=dict)
    ready: bool = False
    version: int = -1
    since: float = field(default_factory=time.monotonic)

    @property
    def load(self) -> int:
        return sum(request.num_completions for request in self.requests.values())


class WorkerPool:
    """Generator workers: processes of their own, or one inline worker where ``num_workers`` is 0."""

    def __init__(self, config: RolloutConfig, spawned: Spawned, log_dir: Path, on_event: OnEvent) -> None:
        self.config, self.spawned, self.log_dir, self.on_event = config, spawned, log_dir, on_event
        self.fd = spawned.weights_fd
        self.members: list[Member] = [Member(process) for process in spawned.processes]
        spawned.processes = []  # they are this pool's to end from now on
        if not self.members:
            self.members = [Member(InlineProcess(self.fd))]
        self.attempts: dict[int, int] = {}
        self.failures_in_a_row = 0
        self.num_restarts = 0
        self.observed: dict[str, str] = {}
        self.num_tokens, self.busy_s, self.load_s = 0, 0.0, 0.0
        self._inbox: list[Generated | Failed] = []
        self._payload: Payload | None = None
        self._spec: EngineSpec | None = None

    def _spawn(self, index: int) -> WorkerProcess:
        return WorkerProcess(index, self.fd, self.log_dir, self.config.num_threads)

    def initialise(self, spec: EngineSpec) -> None:
        """Tell every worker which engine to build, and wait until all have."""
        self._spec = spec
        self.sender = Sender(self.fd, DTYPES[spec.dtypes["wire"]], DTYPES[spec.dtypes["rollout"]])
        for member in self.members:
            self._send(member, "init", (spec, self.config.in_flight_sync))
        self._wait_until(lambda: all(member.ready for member in self.members), "start its engine")

    def sync(self, version: int, model: nn.Module) -> None:
        """Write new weights and announce them; workers load them as soon as they can.

        Blocks only until every worker has loaded the version before, since the memory is written anew.
        """
        if self._payload is not None:
            self.wait_synced()
        self._payload = self.sender.write(version, model)
        for member in self.members:
            self._send(member, "sync", self._payload)

    def wait_synced(self) -> None:
        """Wait until every worker holds the announced version, checksum and all."""
        assert self._payload is not None
        version = self._payload.version
        self._wait_until(lambda: all(m.version == version for m in self.members), f"load version {version}")

    def submit(self, requests: list[Request]) -> None:
        """Share requests out, each to the worker that owes least."""
        parts: dict[int, list[Request]] = {}
        for request in requests:
            member = min(self.members, key=lambda m: m.load)
            member.requests[request.serial] = request
            parts.setdefault(self.members.index(member), []).append(request)
        for index, part in parts.items():
            self._send(self.members[index], "generate", part)

    def connections(self) -> list[Connection]:
        """What to wait on; an inline worker has none, it works when it is polled."""
        return [m.process.connection for m in self.members if isinstance(m.process, WorkerProcess)]

    def poll(self) -> list[Generated | Failed]:
        """Everything that has come in. Results first, then deadlines: the trainer may have been away in a long step."""
        for member in list(self.members):
            self._receive(member)
        for member in list(self.members):
            self._check_time(member)
        inbox, self._inbox = self._inbox, []
        return inbox

    def close(self) -> None:
        for member in self.members:
            try:
                member.process.connection.send(("stop", None))
            except OSError:
                continue  # dead already; close() below reaps it
        for member in self.members:
            member.process.close()
        self.members = []
        self.spawned.close()

    def _send(self, member: Member, kind: str, body: Any) -> None:
        try:
            member.process.connection.send((kind, body))
        except OSError:
            self._replace(member, f"worker {member.process.index} is gone")

    def _receive(self, member: Member) -> None:
        try:
            while member in self.members and member.process.connection.poll(0):
                kind, body = member.process.connection.recv()
                member.since = time.monotonic()
                self._handle(member, kind, body)
        except (EOFError, OSError):
            code = member.process.exit_code()
            self._replace(member, f"generator worker {member.process.index} died (exit code {code})")

    def _handle(self, member: Member, kind: str, body: Any) -> None:
        match kind:
            case "ready":
                member.ready = True
                self.observed |= body
            case "started":
                member.started_at |= dict.fromkeys(body, time.monotonic())
            case "generated":
                self._end(member, body.serial)
                self.failures_in_a_row = 0
                self._inbox.append(body)
            case "batch":
                num_tokens, seconds, observed = body
                self.num_tokens += num_tokens
                self.busy_s += seconds
                self.observed |= observed
            case "synced":
                member.version, _, seconds = body
                self.load_s += seconds
            case "failed":
                serials, error = body
                self._count_failure(error)
                self.on_event("worker_error", {"worker": member.process.index, "groups": serials, "error": error})
                self._retry([request for serial in serials if (request := self._end(member, serial))], error)
            case "sync_failed":
                version, error = body
                raise RunFailed(f"generator worker {member.process.index} could not load version {version}\n{error}")
            case "died":
                self._replace(member, body)

    def _end(self, member: Member, serial: int) -> Request | None:
        member.started_at.pop(serial, None)
        return member.requests.pop(serial, None)

    def _retry(self, requests: list[Request], reason: str) -> None:
        again = []
        for request in requests:
            self.attempts[request.serial] = self.attempts.get(request.serial, 0) + 1
            if self.attempts[request.serial] > self.config.max_retries:
                self._inbox.append(Failed(request.serial, reason))
            else:
                again.append(request)
        if again:
            self.submit(again)

    def _count_failure(self, reason: str) -> None:
        self.failures_in_a_row += 1
        if self.failures_in_a_row > self.config.max_failures:
            raise RunFailed(f"generator workers failed {self.failures_in_a_row} times in a row; the last time:\n{reason}")

    def _check_time(self, member: Member) -> None:
        oldest = min(member.started_at.values(), default=None)
        if oldest is not None and time.monotonic() - oldest > self.config.request_timeout_s:
            self._replace(member, f"worker {member.process.index} did not answer in {self.config.request_timeout_s:g} s")

    def _replace(self, member: Member, reason: str) -> None:
        """End a worker, start another in its place with the weights of now, and hand its requests out again."""
        member.process.kill()
        self._count_failure(reason + self._log_tail(member))
        self.num_restarts += 1
        self.on_event("worker_restart", {"worker": member.process.index, "reason": reason})
        new = Member(self._spawn(member.process.index))
        self.members[self.members.index(member)] = new
        if self._spec is not None:
            self._send(new, "init", (self._spec, self.config.in_flight_sync))
        if self._payload is not None:
            self._send(new, "sync", self._payload)
        started = [request for serial, request in member.requests.items() if serial in member.started_at]
        untouched = [request for serial, request in member.requests.items() if serial not in member.started_at]
        self._retry(started, reason)
        if untouched:
            self.submit(untouched)

    def _log_tail(self, member: Member) -> str:
        text = member.process.log_path.read_text(errors="replace").strip()
        return f"\nlast lines of {member.process.log_path}:\n" + "\n".join(text.splitlines()[-15:]) if text else ""

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.config.startup_timeout_s
        while not done():
            for member in list(self.members):
                member.process.connection.poll(0.02)
                self._receive(member)
            if time.monotonic() > deadline:
                late = [m.process.index for m in self.members if not m.ready or self._payload is not None]
                raise RunFailed(f"generator worker {late} did not {what} in {self.config.startup_timeout_s:g} s")
