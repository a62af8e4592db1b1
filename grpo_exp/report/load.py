"""Finds run folders and reads them, whatever state they are in.

A run folder that cannot be understood becomes a record in state ``broken`` with the reason, never an exception: a
comparison must also work on the sweep that went wrong. Every file is read once; ``metrics.jsonl`` only when somebody
asks for it.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cached_property
from pathlib import Path

import yaml

from ..errors import ConfigError
from ..folder import SILENCE_S
from .metrics import Json, Metrics, Section, decode, read_metrics

ABSENT = "–"
ORIGIN = "origin"
"""A file in the folder of a run that was fetched from elsewhere: where it is at home."""

SKIPPED_FOLDERS = {"rollouts", "checkpoints", "logs"}
_Loader: type[yaml.SafeLoader] | type[yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class RunState(Enum):
    """The states of status.json, and two that only a reader can see."""

    created = "created"
    running = "running"
    done = "done"
    failed = "failed"
    preempted = "preempted"
    crashed = "crashed"  # says running, but its process is gone, or nothing was heard from its host for minutes
    broken = "broken"  # a file is missing or cannot be read


class UnreadableError(Exception):
    """Why a file of a run folder is of no use; the message names the file."""


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run folder. ``config``, ``manifest`` and ``status`` are empty where the file is broken."""

    path: Path
    name: str
    state: RunState
    reason: str | None
    config: Section
    manifest: Section
    status: Section

    @cached_property
    def origin(self) -> str:
        """Where a reader finds the run: its folder, or its address in wandb."""
        try:
            return (self.path / ORIGIN).read_text(encoding="utf-8").strip()
        except OSError:
            return str(self.path)

    @property
    def is_done(self) -> bool:
        return self.state is RunState.done

    @property
    def seed(self) -> str:
        """The seed as text, ``–`` where none is recorded."""
        value = self.config.get("seed", section(self.manifest, "sweep", "factors").get("seed"))
        return ABSENT if value is None else as_text(value)

    @cached_property
    def metrics(self) -> Metrics:
        return read_metrics(self.path / "metrics.jsonl")


def find_runs(paths: Iterable[Path]) -> list[RunRecord]:
    """Read every run folder at or below some paths, in order of path, each once.

    Raises:
        ConfigError: a path does not exist, is no folder, or holds no run.
    """
    found: dict[Path, RunRecord] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError("PATH", str(path), fix="not a folder" if path.exists() else "no such folder")
        folders = list(run_folders(path))
        if not folders:
            raise ConfigError("PATH", str(path), fix="no run in it (a run folder has config.yaml and status.json)")
        for folder in folders:
            real = folder.resolve()
            if real not in found:
                found[real] = read_run(folder)
    return list(found.values())


def run_folders(path: Path, seen: set[Path] | None = None) -> Iterator[Path]:
    """The run folders at or below a path, each once also where links make a loop.

    Runs do not nest, and hidden folders (Hydra's, git's) hold none. A folder that may not be entered is handed out as
    if it were a run, so that reading it says why.
    """
    seen = set() if seen is None else seen
    real = path.resolve()
    if real in seen:
        return
    seen.add(real)
    try:
        is_run = _is_run_folder(path)
        inner = [] if is_run else sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    except PermissionError:
        is_run, inner = True, []
    if is_run:
        yield path
    for name in inner:
        if name not in SKIPPED_FOLDERS and not name.startswith("."):
            yield from run_folders(path / name, seen)


def _is_run_folder(path: Path) -> bool:
    """A config.yaml alone may also be the primary config of a Hydra app, which has a defaults list."""
    if (path / "status.json").is_file() or (path / "manifest.json").is_file():
        return True
    if not (path / "config.yaml").is_file():
        return False
    lines = (path / "config.yaml").read_text(encoding="utf-8", errors="replace").splitlines()
    return not any(line.startswith("defaults:") for line in lines)


def read_run(path: Path) -> RunRecord:
    """Read config, manifest and status of one folder."""
    problems: list[str] = []
    config = _part(path / "config.yaml", problems)
    manifest = _part(path / "manifest.json", problems)
    status = _part(path / "status.json", problems)
    state, reason = (RunState.broken, "; ".join(problems)) if problems else _state(status)
    name = section(manifest, "run").get("name") or path.resolve().name
    return RunRecord(path, as_text(name), state, reason, config, manifest, status)


def is_running(path: Path) -> bool:
    """Whether the run of a folder goes on, as far as one can see from here."""
    return read_run(path).state is RunState.running


def _part(path: Path, problems: list[str]) -> Section:
    try:
        return _read_mapping(path)
    except UnreadableError as error:
        problems.append(str(error))
        return {}


def _read_mapping(path: Path) -> Section:
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.load(text, _Loader) if path.suffix == ".yaml" else decode(text)
    except FileNotFoundError:
        raise UnreadableError(f"{path.name} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"{path.name} cannot be read ({error})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableError(f"{path.name} is not valid {path.suffix[1:]} ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UnreadableError(f"{path.name} is empty" if content is None else f"{path.name} holds no mapping")
    return content


def _state(status: Section) -> tuple[RunState, str | None]:
    written = status.get("state")
    if written not in [state.value for state in RunState]:
        return RunState.broken, f"status.json: unknown state {written!r}"
    state = RunState(written)
    reason = status.get("reason")
    if state is RunState.running and _process_is_gone(status):
        return RunState.crashed, f"its process {status['pid']} is gone" + (f" ({reason})" if reason else "")
    if state is RunState.running and (silence_s := _silence_s(status)) > SILENCE_S:
        return RunState.crashed, f"no heartbeat from {status.get('host')} for {silence_s / 60:.0f} min"
    return state, str(reason) if reason else None


def _process_is_gone(status: Section) -> bool:
    """Only said of a process of this host: of the others it is known by their silence."""
    pid = status.get("pid")
    if status.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return False


def _silence_s(status: Section) -> float:
    """Seconds since the last heartbeat of a run on another host, 0 for one of this host."""
    if status.get("host") == socket.gethostname():
        return 0.0
    try:
        return time.time() - datetime.fromisoformat(str(status.get("heartbeat"))).timestamp()
    except ValueError:
        return 0.0


def section(mapping: Mapping[str, Json], *keys: str) -> Section:
    """A nested mapping, empty where any level is missing or something else."""
    for key in keys:
        inner = mapping.get(key)
        mapping = inner if isinstance(inner, dict) else {}
    return dict(mapping)


def flatten(mapping: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    """Dotted keys of all leaves. Lists and empty mappings are leaves."""
    flat: dict[str, Json] = {}
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def as_text(value: object) -> str:
    """A value as one writes it in YAML, on one line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)
