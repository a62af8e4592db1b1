"""What ``hydra/launcher=slurm`` can be told, and the text that is given to ``sbatch``. Pure, and light to import.

One array per command: task n runs the n-th folder of a list. The shell stays in front of the run, since it is what Slurm
signals before a time limit and what can ask for the job to be queued again where the run itself sits in a container.
"""

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

RETRY = ("none", "failed")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
KEY = "hydra.launcher"


@dataclass
class SlurmOptions:
    """What is null is left out of the script, so that the cluster's own default holds. docs/slurm.md explains each."""

    n_jobs: int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    mem: str | None = None
    cpus: int | None = None
    gpus: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    grace_s: int = 120
    max_requeues: int = 100
    setup: list[str] = field(default_factory=list)
    container: str | None = None
    python: str | None = None
    extra: list[str] = field(default_factory=list)
    retry: str = "none"
    wait: bool = True
    poll_s: float = 5.0
    dry_run: bool = False


@dataclass(frozen=True)
class Submission:
    """One ``sbatch`` call: ``folder`` gets the script, the list of runs and what Slurm itself prints."""

    name: str
    folder: Path
    code: Path
    runs: list[Path]


def find_problems(options: SlurmOptions) -> list[ConfigError]:
    """What cannot be used, before anything is made."""
    problems = []
    if options.retry not in RETRY:
        problems.append(ConfigError(f"{KEY}.retry", options.retry, RETRY))
    counts = {"n_jobs": options.n_jobs, "cpus": options.cpus, "grace_s": options.grace_s}
    for name, value in counts.items():
        if value is not None and value < 1:
            problems.append(ConfigError(f"{KEY}.{name}", value, "1 or more"))
    if options.max_requeues < 0:
        problems.append(ConfigError(f"{KEY}.max_requeues", options.max_requeues, "0 or more"))
    if options.poll_s <= 0:
        problems.append(ConfigError(f"{KEY}.poll_s", options.poll_s, "seconds, more than 0"))
    if options.time is not None:
        seconds = time_limit_s(options.time)
        if seconds is None:
            fix = "quote it in a YAML file, where 1:30:00 is a number"
            problems.append(ConfigError(f"{KEY}.time", options.time, "minutes, H:MM:SS or D-HH:MM:SS", fix))
        elif options.grace_s >= seconds:
            fix = f"the signal would come at once: the limit is {seconds} s"
            problems.append(ConfigError(f"{KEY}.grace_s", options.grace_s, f"less than {KEY}.time", fix))
    one_line = {"partition", "account", "qos", "mem", "gpus", "constraint", "exclude", "container", "python"}
    for name in sorted(one_line):
        if "\n" in (getattr(options, name) or ""):
            problems.append(ConfigError(f"{KEY}.{name}", getattr(options, name), "one line"))
    return problems


def time_limit_s(text: str) -> int | None:
    """Seconds of a time limit as ``sbatch`` reads it; None if it is none. ``0`` and ``UNLIMITED`` are no limit."""
    if text.strip().upper() in ("UNLIMITED", "INFINITE", "0"):
        return sys.maxsize
    found = TIME.fullmatch(text.strip())
    if found is None:
        return None
    parts = [int(part) for part in found["rest"].split(":")]
    if found["days"] is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return int(found["days"]) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(parts) == 3:  # hours:minutes:seconds, else minutes[:seconds]
        return parts[0] * 3600 + parts[1] * 60 + parts[2]
    minutes, seconds = [*parts, 0][:2]
    return minutes * 60 + seconds


def script(options: SlurmOptions, submission: Submission) -> str:
    """The batch script of an array of runs."""
    limit = "" if options.n_jobs is None else f"%{options.n_jobs}"
    gpus = None if options.gpus is None else f"gpu:{options.gpus}"
    settings: dict[str, Any] = {
        "job-name": submission.name,
        "array": f"0-{len(submission.runs) - 1}{limit}",
        "output": submission.folder / "%A_%a.log",
        "open-mode": "append",
        "chdir": submission.folder,
        "signal": f"B:USR2@{options.grace_s}",
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "mem": options.mem,
        "cpus-per-task": options.cpus,
        "gres": gpus,
        "constraint": options.constraint,
        "exclude": options.exclude,
    }
    lines = [f"--{name}={value}" for name, value in settings.items() if value is not None]
    header = "\n".join(f"#SBATCH {line}" for line in ["--ntasks=1", "--requeue", *lines, *options.extra])
    setup = "".join(f"{line}\n" for line in options.setup)
    prefix = f"{options.container} " if options.container else ""
    python = shlex.quote(options.python or sys.executable)
    return f"""#!/bin/bash
{header}

{setup}export PYTHONPATH={shlex.quote(str(submission.code))}${{PYTHONPATH:+:$PYTHONPATH}}
run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(submission.folder / "runs.txt"))})

# USR2 comes before a time limit or a preemption: the run saves a checkpoint, and the job goes back into the queue.
again=
trap 'again=1; kill -USR2 "$pid" 2>/dev/null' USR2
trap : TERM  # reaches the run itself; the shell stays to hand on its exit code
{prefix}{python} -P -m grpo_exp.run "$run" --resume >>"$run/logs/run.log" 2>&1 &
pid=$!
while true; do
  wait "$pid"
  code=$?
  kill -0 "$pid" 2>/dev/null || break
done
if [ -n "$again" ] && [ "$code" -ge 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.max_requeues} ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" && sleep 60  # the id of the last task alone means all
fi
exit "$code"
"""
