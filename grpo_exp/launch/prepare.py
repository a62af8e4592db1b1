"""From a composed job to a run folder that is ready to start, and what is to be done with one that exists already.

The folder's name ends in the hash of the frozen configuration; that hash is how the same command finds its runs again.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ..config.compose import PACKAGE, Composed, to_typed
from ..config.freeze import Frozen, freeze, run_name
from ..config.validate import find_problems
from ..errors import ConfigErrors
from ..folder import RunFolder, State, now, read_status
from ..manifest import git_state, hardware, versions
from ..report.load import find_runs


class Action(Enum):
    start = "start"
    resume = "resume"
    skip = "skip"


@dataclass(frozen=True)
class Planned:
    """One run of a command: its folder, and what to do."""

    path: Path
    action: Action
    note: str
    overrides: list[str]


def check_all(jobs: list[Composed]) -> list[Frozen]:
    """Freeze every job of a command. Nothing is written before all are known to be right.

    Raises:
        ConfigErrors: every problem of every job, each once.
    """
    frozen, problems = [], []
    for job in jobs:
        config = to_typed(job.config)
        found = find_problems(config)
        problems += [error for error in found if str(error) not in {str(known) for known in problems}]
        if not found:
            frozen.append(freeze(config))
    if problems:
        raise ConfigErrors(problems)
    return frozen


def prepare(job: Composed, frozen: Frozen, factors: dict[str, str], retry_failed: bool) -> Planned:
    """Make the run folder of a job, or find the one that it has."""
    runs_dir = Path(frozen.values["runs_dir"])
    found = sorted(runs_dir.glob(f"*_{frozen.hash}")) if runs_dir.is_dir() else []
    if found:
        action, note = decide(found[0], retry_failed)
        return Planned(found[0], action, note, job.overrides)
    folder = RunFolder(runs_dir / run_name(factors, frozen.hash))
    (folder.path / "config.yaml").write_text(frozen.to_yaml())
    sweep = frozen.values["sweep"]
    folder.update_manifest(
        run={"name": folder.path.name, "created": now(), "config_hash": frozen.hash},
        sweep={"name": sweep["name"] or runs_dir.name, "factors": factors, "baseline": sweep["baseline"]},
        choices=job.choices,
        overrides=job.overrides,
        versions=versions(),
        git=git_state(PACKAGE),
        hardware=hardware(),
    )
    folder.update(state=State.created)
    return Planned(folder.path, Action.start, "new", job.overrides)


def decide(path: Path, retry_failed: bool) -> tuple[Action, str]:
    """What the same command does with a run that exists: skip what is done, go on with what was interrupted."""
    status = read_status(path)
    if status is None:
        return Action.start, "new"
    record = find_runs([path])[0]
    match record.state.value:
        case "done":
            return Action.skip, "done already"
        case "failed" if not retry_failed:
            return Action.skip, "failed before"
        case "running":
            return Action.skip, "running now"
        case "created":
            return Action.start, "new"
        case state:
            return Action.resume, f"was {state}"
