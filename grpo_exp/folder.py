"""The run folder: everything a run leaves behind, and the only way in which it is written. Imports no torch.

``status.json`` is replaced whole, ``metrics.jsonl`` and ``events.jsonl`` only grow; on a resume the rows after the
checkpoint are cut. A lock keeps two processes from running in one folder.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import jsonl
from .errors import RunFailed

if TYPE_CHECKING:  # comparing runs reads folders, and needs no omegaconf
    from .config.freeze import Frozen

CHECKPOINT = re.compile(r"step-(\d{6,})")
STATUS_EVERY_S = 0.5
"""How far the step in status.json may be behind while steps are quick."""
BEAT_S = 20.0
"""At the latest after this time status.json is written again while a run goes on."""
SILENCE_S = 9 * BEAT_S
"""A run on another host that was silent for so long is taken for dead."""


class State(Enum):
    created = "created"
    running = "running"
    done = "done"
    failed = "failed"
    preempted = "preempted"


@dataclass
class Status:
    """What status.json says; see the documentation of the run folder."""

    state: State = State.created
    step: int = 0
    max_steps: int | None = None
    updates: int = 0
    reason: str | None = None
    traceback: str | None = None
    exit_code: int | None = None
    pid: int | None = None
    host: str = ""
    started: str | None = None
    heartbeat: str | None = None
    ended: str | None = None
    groups: dict[str, int] | None = None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_status(path: Path) -> dict[str, Any] | None:
    """What status.json of a run folder says, None if there is none."""
    file = path / "status.json"
    return jsonl.read_json(file) if file.is_file() else None


def is_in_use(path: Path) -> bool:
    """Whether a process holds the lock of a run folder."""
    if not (path / "lock").is_file():
        return False
    with (path / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder of them, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("", "logs", "checkpoints"):
            (path / name).mkdir(parents=True, exist_ok=True)
        known = read_status(path)
        self.status = Status(**known | {"state": State(known["state"])}) if known else Status()
        self.status.host = socket.gethostname()
        self._metrics: jsonl.JsonlWriter | None = None
        self._events: jsonl.JsonlWriter | None = None
        self._trained: jsonl.JsonlWriter | None = None
        self._lock: int | None = None
        self._written_s = -STATUS_EVERY_S
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._heart: threading.Thread | None = None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def list_checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return list_checkpoints(self.checkpoints)

    def lock(self) -> None:
        """Take the folder for this process; nothing happens if this object has it already.

        Raises:
            RunFailed: if another process is running in it.
            OSError: if nothing can be written there.
        """
        if self._lock is not None:
            return
        if not os.access(self.path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.path))
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise RunFailed(f"{self.path} is in use by a run that is going on") from None

    def begin(self, max_steps: int | None, after_step: int | None, updates: int = 0) -> None:
        """Start, or go on after a step: what came later is cut, checkpoints too, as that part is run again."""
        for path in self.checkpoints.iterdir():
            step = CHECKPOINT.fullmatch(path.name)
            if step is None or after_step is None or int(step[1]) > after_step:
                shutil.rmtree(path)
        for name in ("metrics.jsonl", "events.jsonl", "trained.jsonl"):
            if after_step is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                jsonl.truncate_after(self.path / name, after_step)
        self._metrics = jsonl.JsonlWriter(self.path / "metrics.jsonl")
        self._events = jsonl.JsonlWriter(self.path / "events.jsonl")
        self._trained = jsonl.JsonlWriter(self.path / "trained.jsonl")
        if after_step is None and self.status.step:
            self.event(0, "restart", {"lost_steps": self.status.step})
        self.update(
            state=State.running,
            step=after_step or 0,
            updates=updates,
            max_steps=max_steps,
            pid=os.getpid(),
            started=now(),
            ended=None,
            reason=None,
            traceback=None,
            exit_code=None,
        )
        if self._heart is None or not self._heart.is_alive():
            self._over.clear()
            self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._heart.start()

    def _beat(self) -> None:
        """A step may take longer than anybody waits for a sign of life."""
        while not self._over.wait(BEAT_S):
            try:
                self.update()
            except OSError:  # a full disk is told by the trainer's own writing
                continue

    def update(self, **changes: Any) -> None:
        """Change fields of the status and write it with a heartbeat."""
        with self._writing:
            self._change(changes)
            self._written_s = time.monotonic()
            self.status.heartbeat = now()
            jsonl.write_json_atomic(self.path / "status.json", asdict(self.status))

    def progress(self, **changes: Any) -> None:
        """The same after a step, where quick steps need not be written one by one."""
        if time.monotonic() - self._written_s >= STATUS_EVERY_S:
            self.update(**changes)
        else:
            self._change(changes)

    def _change(self, changes: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            setattr(self.status, name, value)

    def metrics(self, row: Mapping[str, Any]) -> None:
        assert self._metrics is not None, "begin comes first"
        self._metrics.append(row)

    def amend(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Add what came late to the row of a step that is written already, and return the whole row."""
        assert self._metrics is not None, "begin comes first"
        self._metrics.close()
        path = self.path / "metrics.jsonl"
        rows = jsonl.read(path)
        found = next((known for known in reversed(rows) if known.get("step") == row["step"]), None)
        if found is None:
            rows.append(found := {})
        found |= {key: jsonl.plain(value) for key, value in row.items()}
        jsonl.replace_rows(path, rows)
        self._metrics = jsonl.JsonlWriter(path)
        return found

    def event(self, step: int, event: str, body: Mapping[str, Any]) -> None:
        assert self._events is not None, "begin comes first"
        self._events.append({"step": step, "time": time.time(), "event": event, **body})

    def trained(self, step: int, serials: list[int], prompts: list[int]) -> None:
        """Which groups a step trained: serials and rows of the data set."""
        assert self._trained is not None, "begin comes first"
        self._trained.append({"step": step, "groups": serials, "prompts": prompts})

    def end(self, state: State, exit_code: int, reason: str | None = None, error: BaseException | None = None) -> None:
        text = "".join(traceback.format_exception(error)) if error is not None else None
        self.update(state=state, exit_code=exit_code, reason=reason, traceback=text, ended=now())

    def close(self) -> None:
        self._over.set()
        if self._heart is not None:
            self._heart.join()  # the next process in this folder is the only one that writes
        for writer in (self._metrics, self._events, self._trained):
            if writer is not None:
                writer.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def describe(
        self,
        frozen: "Frozen",
        factors: dict[str, str],
        choices: dict[str, str],
        overrides: list[str],
        about: Mapping[str, Any],
    ) -> None:
        """Write config.yaml, manifest.json and, last, status.json of a run that is to start.

        Args:
            about: what the run runs on, the sections of :func:`grpo_exp.manifest.about_this_machine`.
        """
        sweep = frozen.values["sweep"]
        (self.path / "config.yaml").write_text(frozen.to_yaml(), encoding="utf-8")
        self.update_manifest(
            run={"name": self.path.name, "created": now(), "config_hash": frozen.hash, "folder": os.getcwd()},
            sweep={
                "name": sweep["name"] or Path(frozen.values["runs_dir"]).name,
                "factors": factors,
                "baseline": sweep["baseline"],
            },
            choices=choices,
            overrides=overrides,
            **about,
        )
        self.update(state=State.created)

    def manifest(self) -> dict[str, Any]:
        file = self.path / "manifest.json"
        return jsonl.read_json(file) if file.is_file() else {}

    def update_manifest(self, **sections: Any) -> None:
        jsonl.write_json_atomic(self.path / "manifest.json", self.manifest() | sections)
