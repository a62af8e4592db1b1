"""The trainer's side of the generator workers: who has which request, which weights, and who is still alive.

Everything happens in :meth:`WorkerPool.poll`, which the trainer calls while it waits. A worker that dies or does not
answer in time is ended and started again; its requests go out once more, up to a limit, and each by itself, so that the
one that is to blame takes no others with it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch import nn

from ..config.schema import RolloutConfig
from ..errors import Interrupted, RunFailed
from ..precision import DTYPES
from ..sync.shm import Payload, Sender
from .inline import InlineProcess
from .process import Spawned, WorkerProcess, end_all
from .types import EngineSpec, Generated, Request

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Failed:
    """A request that was tried as often as allowed."""

    serial: int
    reason: str


@dataclass(frozen=True)
class Retried:
    """A request that begins anew, under this version or a later one."""

    serial: int
    version: int


Item = Generated | Failed | Retried


@dataclass(eq=False)
class Member:
    """One worker and what it owes."""

    process: WorkerProcess | InlineProcess
    requests: dict[int, Request] = field(default_factory=dict)
    started_at: dict[int, float] = field(default_factory=dict)
    ready: bool = False
    version: int = -1
    failures_in_a_row: int = 0

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
        self.num_restarts = 0
        self.observed: dict[str, str] = {}
        self.about: dict[str, Any] = {}  # what engines say of themselves, for the manifest
        self.num_tokens, self.busy_s, self.load_s = 0, 0.0, 0.0
        self._inbox: list[Item] = []
        self._payload: Payload | None = None
        self._spec: EngineSpec | None = None
        self._engines_built = False

    def initialise(self, spec: EngineSpec, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Tell every worker which engine to build, and wait until all have.

        Raises:
            RunFailed: with the worker's traceback, if an engine cannot be built.
            Interrupted: if ``should_stop`` says so meanwhile.
        """
        self._spec = spec
        self.sender = Sender(self.fd, DTYPES[spec.dtypes["wire"]], DTYPES[spec.dtypes["rollout"]])
        for member in self.members:
            member.process.send(("init", (spec.for_worker(member.process.index), self.config.in_flight_sync)))
        self._wait_until(lambda member: member.ready, "start its engine", should_stop)
        self._engines_built = True

    def sync(self, version: int, model: nn.Module) -> None:
        """Write new weights and announce them; workers load them as soon as they can.

        Blocks only until every worker has loaded the version before, since the memory is written anew.
        """
        if self._payload is not None:
            self.wait_synced()
        self._payload = self.sender.write(version, model)
        for member in self.members:
            member.process.send(("sync", self._payload))

    def wait_synced(self) -> None:
        """Wait until every worker holds the announced version, checksum and all."""
        assert self._payload is not None
        version = self._payload.version
        self._wait_until(lambda member: member.version == version, f"load version {version}")

    def submit(self, requests: Iterable[Request]) -> None:
        """Share requests out, each to the worker that owes least."""
        parts: dict[Member, list[Request]] = {}
        for request in requests:
            member = min(self.members, key=lambda m: m.load)
            member.requests[request.serial] = request
            parts.setdefault(member, []).append(request)
        for member, part in parts.items():
            member.process.send(("generate", part))

    def connections(self) -> "list[Connection[Any, Any]]":
        """What to wait on; an inline worker has none, it works when it is polled."""
        return [m.process.connection for m in self.members if isinstance(m.process, WorkerProcess)]

    @property
    def works_when_polled(self) -> bool:
        """An inline worker has something to do: nobody else's news are worth waiting for before it has done it."""
        return any(m.requests and not isinstance(m.process, WorkerProcess) for m in self.members)

    def poll(self) -> list[Item]:
        """Everything that has come in. Results first, then deadlines: the trainer may have been away in a long step."""
        for member in list(self.members):
            self._receive(member)
        for member in list(self.members):
            self._check_time(member)
        inbox, self._inbox = self._inbox, []
        return inbox

    def close(self) -> None:
        started = [(m.ready, m.process) for m in self.members if isinstance(m.process, WorkerProcess)]
        for ready, process in started:
            if not ready:
                process.kill()  # it is still importing, and would not read for seconds
        end_all(process for _, process in started)
        self.members = []
        self.spawned.close()

    def _receive(self, member: Member) -> None:
        while member in self.members:
            try:
                if not member.process.connection.poll(0):
                    return
                kind, body = member.process.connection.recv()
            except (EOFError, OSError):
                self._lost(member)
                return
            self._handle(member, kind, body)

    def _handle(self, member: Member, kind: str, body: Any) -> None:
        match kind:
            case "ready":
                member.ready = True
                observed, about = body
                self.observed |= observed
                self.about |= about
            case "started":
                member.started_at |= dict.fromkeys(body, time.monotonic())
            case "generated":
                member.failures_in_a_row = 0
                for generated in body:
                    self._end(member, generated.serial)
                    self.attempts.pop(generated.serial, None)  # the next evaluation uses its serials again
                self._inbox.extend(body)
            case "batch":
                num_tokens, seconds = body
                self.num_tokens += num_tokens
                self.busy_s += seconds
            case "observed":
                self.observed |= body
            case "synced":
                self._synced(member, *body)
            case "failed":
                serials, error = body
                self.on_event("worker_error", {"worker": member.process.index, "groups": serials, "error": error})
                self._count_failure(member, error)
                self._retry([request for serial in serials if (request := self._end(member, serial))], error)
            case "retried":
                self.on_event("request_retry", {"worker": member.process.index, "errors": body})
            case "sync_failed":
                self._sync_failed(member, *body)
            case "refused":
                if not self._engines_built:
                    raise body
                self._count_failure(member, str(body))  # it was right when the run began
                self._replace(member, str(body))
            case "died":
                if not self._engines_built:
                    raise RunFailed(f"generator worker {member.process.index} could not start its engine\n{body}")
                self._count_failure(member, body)
                self._replace(member, body)
            case _:
                raise RunFailed(f"generator worker {member.process.index} sent an unknown message {kind!r}")

    def _synced(self, member: Member, version: int, held: int, seconds: float, observed: dict[str, str]) -> None:
        """Believe a worker only by its checksum: whoever dropped an update would sample from old weights."""
        assert self._payload is not None
        if (version, held) != (self._payload.version, self._payload.checksum):
            raise RunFailed(
                f"generator worker {member.process.index} holds other weights than it was sent: version {version} with"
                f" checksum {held:016x}, not version {self._payload.version} with {self._payload.checksum:016x}"
            )
        member.version = version
        self.load_s += seconds
        self.observed |= observed

    def _sync_failed(self, member: Member, version: int, error: str) -> None:
        """The version before goes on serving; the new one is sent once more."""
        self.on_event("sync_failed", {"worker": member.process.index, "version": version, "error": error})
        self._count_failure(member, f"it could not load version {version}\n{error}")
        assert self._payload is not None
        if version == self._payload.version:
            member.process.send(("sync", self._payload))

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
                again.append(replace(request, alone=not request.evaluation))
                self._inbox.append(Retried(request.serial, self._payload.version if self._payload else 0))
        self.submit(again)

    def _count_failure(self, member: Member, reason: str) -> None:
        """Errors and deaths count, a request that is not answered does not: the worker may have done nothing wrong."""
        member.failures_in_a_row += 1
        if member.failures_in_a_row > self.config.max_failures:
            raise RunFailed(
                f"generator worker {member.process.index} failed {member.failures_in_a_row} times in a row"
                f" (rollout.max_failures); the last time:\n{reason}"
            )

    def _check_time(self, member: Member) -> None:
        oldest = min(member.started_at.values(), default=None)
        if oldest is not None and time.monotonic() - oldest > self.config.request_timeout_s:
            self._replace(member, f"no answer in {self.config.request_timeout_s:g} s (rollout.request_timeout_s)")

    def _lost(self, member: Member) -> None:
        assert isinstance(member.process, WorkerProcess)
        code = member.process.wait(1.0)
        reason = f"generator worker {member.process.index} died (exit code {code}){log_tail(member.process.log_path)}"
        self._count_failure(member, reason)
        self._replace(member, reason)

    def _replace(self, member: Member, reason: str) -> None:
        """End a worker, start another in its place with the weights of now, and hand its requests out again."""
        assert isinstance(member.process, WorkerProcess)
        index = member.process.index
        member.process.kill()
        self.num_restarts += 1
        self.on_event("worker_restart", {"worker": index, "reason": reason})
        process = WorkerProcess(index, self.fd, self.log_dir, self.config.num_threads, self.config.backend)
        self.members[self.members.index(member)] = Member(process, failures_in_a_row=member.failures_in_a_row)
        if self._spec is not None:
            process.send(("init", (self._spec.for_worker(index), self.config.in_flight_sync)))
        if self._payload is not None:
            process.send(("sync", self._payload))
        self.submit(request for serial, request in member.requests.items() if serial not in member.started_at)
        self._retry([request for serial, request in member.requests.items() if serial in member.started_at], reason)

    def _wait_until(
        self, done: Callable[[Member], bool], what: str, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        deadline = time.monotonic() + self.config.startup_timeout_s
        while late := [member for member in self.members if not done(member)]:
            late[0].process.connection.poll(0.02)
            for member in list(self.members):
                self._receive(member)
                self._check_time(member)
            if should_stop():
                raise Interrupted
            if time.monotonic() > deadline:
                names = ", ".join(str(member.process.index) for member in late)
                raise RunFailed(
                    f"generator worker {names} did not {what} in {self.config.startup_timeout_s:g} s"
                    " (rollout.startup_timeout_s)"
                )


def log_tail(path: Path, num_lines: int = 15) -> str:
    """The last lines of a worker's log, for an error message."""
    lines = path.read_text(errors="replace").strip().splitlines()[-num_lines:]
    return "\n".join([f"; the last lines of {path}:", *lines]) if lines else ""
