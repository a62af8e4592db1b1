"""What Slurm knows of our jobs, through its own commands; and which job a run folder belongs to."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .. import jsonl
from ..errors import ConfigError, RunFailed
from ..folder import now

OVER = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
LIMIT_S = 60


@dataclass(frozen=True)
class Job:
    """A task of an array. ``state`` is Slurm's word, ``reason`` why it waits."""

    id: str
    state: str
    reason: str

    @property
    def is_over(self) -> bool:
        return self.state in OVER


def is_there() -> bool:
    return shutil.which("squeue") is not None


def jobs() -> dict[str, Job] | None:
    """Our jobs by id (``12_3``), those that ended lately too; None while the controller does not answer."""
    try:
        done = _call(["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T|%r"])
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    found = [line.split("|", 2) for line in done.stdout.splitlines() if line.count("|") >= 2]
    return {parts[0]: Job(*parts) for parts in found}


def submit(script: Path) -> str:
    """Hand a script to ``sbatch`` and return the id of the array.

    Raises:
        ConfigError: with what Slurm says of it.
    """
    try:
        done = _call(["sbatch", "--parsable", str(script)])
    except FileNotFoundError:
        fix = "sbatch is not on the PATH: run this where Slurm is, or add hydra.launcher.dry_run=true"
        raise ConfigError("hydra/launcher", "slurm", fix=fix) from None
    except subprocess.TimeoutExpired:
        raise RunFailed(
            f"sbatch did not answer in {LIMIT_S} s; grpo-exp status shows whether it took the jobs"
        ) from None
    if done.returncode:
        said = " ".join(line.removeprefix("sbatch: error: ") for line in done.stderr.splitlines())
        raise ConfigError("hydra/launcher", "slurm", fix=f"sbatch refused {script}: {said}")
    return done.stdout.strip().partition(";")[0]


def cancel(ids: Iterable[str]) -> None:
    """Have Slurm end some jobs: a run that trains saves a checkpoint first.

    Raises:
        RunFailed: with what Slurm says.
    """
    done = _call(["scancel", *ids])
    if done.returncode:
        raise RunFailed(f"scancel: {' '.join(done.stderr.split())}")


def _call(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Without the settings of a job that this may run in: a script's own lines count, not its job's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}
    return subprocess.run(
        command, capture_output=True, text=True, env=kept, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False
    )


def remember(run: Path, job: str, script: Path) -> None:
    """Write ``slurm.json``: the job that a run was last submitted as."""
    jsonl.write_json_atomic(run / "slurm.json", {"job": job, "submitted": now(), "script": str(script), "ended": None})


def note_end(run: Path, state: str) -> None:
    """Slurm's last word on the job of a run, for when the run itself could say none."""
    jsonl.write_json_atomic(run / "slurm.json", jsonl.read_json(run / "slurm.json") | {"ended": state})


def job_of(run: Path) -> str | None:
    """The id of the job that a run was last submitted as."""
    return _recorded(run, "job")


def end_of(run: Path) -> str | None:
    """How Slurm said that job ended, if anybody looked."""
    return _recorded(run, "ended")


def _recorded(run: Path, key: str) -> str | None:
    file = run / "slurm.json"
    value = jsonl.read_json(file).get(key) if file.is_file() else None
    return value if isinstance(value, str) else None
