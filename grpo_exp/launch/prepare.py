"""From composed jobs to run folders that are ready to start, and what is to be done with one that exists already.

The folder's name ends in the hash of the frozen configuration; that hash is how the same command finds its runs again.
"""

import fcntl
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from ..checks import choice_problems, find_problems, machine_problems
from ..config.compose import PACKAGE, Composed, to_typed, varied_keys
from ..config.freeze import Frozen, freeze, run_name
from ..errors import ConfigError, ConfigErrors
from ..folder import RunFolder, is_in_use, read_status
from ..manifest import about_this_machine, git_diff
from ..report.load import RunState, read_run


class Action(Enum):
    start = "start"
    resume = "resume"
    skip = "skip"
    wait = "wait"


@dataclass(frozen=True)
class Planned:
    """One run of a command: its folder, and what to do."""

    path: Path
    action: Action
    note: str
    overrides: list[str]


def check_all(jobs: list[Composed], starts_ranks: bool = False) -> list[Frozen]:
    """Freeze every job of a command. Nothing is written before all are known to be right.

    Args:
        starts_ranks: the launcher starts the ranks of a run itself.

    Raises:
        ConfigErrors: every problem of every job, each once.
    """
    frozen: list[Frozen] = []
    problems: dict[str, ConfigError] = {}
    for job in jobs:
        try:
            config = to_typed(job.config)
        except ConfigErrors as errors:
            problems |= {str(error): error for error in errors.errors}
            continue
        found = [*find_problems(config), *machine_problems(config, starts_ranks), *choice_problems(config, job.choices)]
        problems |= {str(error): error for error in found}
        if not found:
            frozen.append(freeze(config))
    if problems:
        raise ConfigErrors(list(problems.values()))
    return frozen


def prepare_all(jobs: list[Composed], frozen: list[Frozen], retry_failed: bool) -> list[Planned]:
    """The run folders of the jobs of a command, made where there is none yet, each once."""
    about, diff = about_this_machine(), git_diff(PACKAGE)
    varied = varied_keys([job.overrides for job in jobs])  # where another sweeper than ours has not said it
    planned: dict[Path, Planned] = {}
    for job, one, levels in zip(jobs, frozen, varied, strict=True):
        with alone(Path(one.values["runs_dir"])):
            path = _find(one) or _make(job, one, job.factors or levels, about, diff)
        planned.setdefault(path, decide(Planned(path, Action.start, "new", job.overrides), retry_failed))
    return list(planned.values())


def foresee(jobs: list[Composed], frozen: list[Frozen], retry_failed: bool) -> list[Planned]:
    """What :func:`prepare_all` would return; nothing is made."""
    varied = varied_keys([job.overrides for job in jobs])
    planned: dict[Path, Planned] = {}
    for job, one, levels in zip(jobs, frozen, varied, strict=True):
        known = _find(one)
        path = known or Path(one.values["runs_dir"]) / run_name(job.factors or levels, one.hash)
        plan = Planned(path, Action.start, "new", job.overrides)
        planned.setdefault(path, plan if known is None else decide(plan, retry_failed))
    return list(planned.values())


def decide(planned: Planned, retry_failed: bool) -> Planned:
    """What is to be done with a run as it is now: what is done is skipped, what was interrupted goes on."""

    def so(action: Action, note: str) -> Planned:
        return replace(planned, action=action, note=note)

    if is_in_use(planned.path):
        return so(Action.wait, "running in another process")
    run = read_run(planned.path)
    match run.state:
        case RunState.created:
            return so(Action.start, "new")
        case RunState.done:
            return so(Action.skip, "done already")
        case RunState.failed if not retry_failed:
            return so(Action.skip, "failed before")
        case RunState.running if run.status.get("host") != socket.gethostname():  # its lock may not reach us
            return so(Action.wait, f"running on {run.status.get('host')}")
        case RunState.running:  # but nothing holds the folder
            return so(Action.resume, "was interrupted")
        case state:
            return so(Action.resume, f"was {state.value}" if state is not RunState.failed else "failed before")


def _find(frozen: Frozen) -> Path | None:
    """The folder of an earlier command with this configuration; status.json is the last file that making one writes."""
    found = sorted(Path(frozen.values["runs_dir"]).glob(f"*_{frozen.hash}"))
    return next((path for path in found if read_status(path) is not None), None)


def _make(job: Composed, frozen: Frozen, factors: dict[str, str], about: dict[str, Any], diff: bytes | None) -> Path:
    runs_dir = Path(frozen.values["runs_dir"])
    try:
        folder = RunFolder(runs_dir / run_name(factors, frozen.hash))
        if diff:
            (folder.path / "code.diff").write_bytes(diff)
        folder.describe(frozen, factors, job.choices, job.overrides, about)
    except OSError as error:
        raise _not_writable(runs_dir, error) from None
    return folder.path


def _not_writable(runs_dir: Path, error: OSError) -> ConfigError:
    fix = f"{error.strerror or error}: name a folder that can be written to"
    return ConfigError("runs_dir", str(runs_dir), fix=fix)


@contextmanager
def alone(runs_dir: Path) -> Iterator[None]:
    """Two commands that want the same run at the same time get one folder for it."""
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        lock = (runs_dir / ".lock").open("a")
    except OSError as error:
        raise _not_writable(runs_dir, error) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
