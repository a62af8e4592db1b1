"""What ``hydra/launcher=slurm`` can be told, and the text that is given to ``sbatch``. Pure, and light to import.

One array per command: task n runs the n-th folder of a list. The shell stays in front of the run, since it is what Slurm
signals before a time limit and what can ask for the job to be queued again where the run itself sits in a container.
"""

import re
import shlex
import sys
from collections.abc import Iterable
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
    nodes: int = 1
    ranks_per_node: int = 1
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

    @property
    def num_ranks(self) -> int:
        """Trainer ranks of a run."""
        return self.nodes * self.ranks_per_node


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
    names = ("n_jobs", "cpus", "grace_s", "nodes", "ranks_per_node")
    counts: dict[str, int | None] = {name: getattr(options, name) for name in names}
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


def rank_problems(options: SlurmOptions, strategies: Iterable[str]) -> list[ConfigError]:
    """Where the ranks that are asked of Slurm are not those of ``distributed.strategy``, of any run."""
    problems = []
    for strategy in dict.fromkeys(strategies):
        if strategy == "single" and options.num_ranks > 1:
            key = "nodes" if options.nodes > 1 else "ranks_per_node"
            fix = "distributed=single is one trainer process; or distributed=ddp, fsdp2"
            problems.append(ConfigError(f"{KEY}.{key}", getattr(options, key), "1", fix))
        if strategy != "single" and options.num_ranks == 1:
            fix = f"distributed={strategy} is for several ranks"
            problems.append(ConfigError(f"{KEY}.ranks_per_node", 1, f"2 or more, or {KEY}.nodes", fix))
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
    tasks = [f"--nodes={options.nodes}", f"--ntasks-per-node={options.ranks_per_node}"]
    first = ["--ntasks=1"] if options.num_ranks == 1 else tasks
    header = "\n".join(f"#SBATCH {line}" for line in [*first, "--requeue", *lines, *options.extra])
    setup = "".join(f"{line}\n" for line in options.setup)
    return f"""#!/bin/bash
{header}

{setup}export PYTHONPATH={shlex.quote(str(submission.code))}${{PYTHONPATH:+:$PYTHONPATH}}
run=$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(submission.folder / "runs.txt"))})
{_meeting_place(options)}
# USR2 comes before a time limit or a preemption: the run saves a checkpoint, and the job goes back into the queue.
again=
trap 'again=1; kill -USR2 "$pid" 2>/dev/null' USR2
trap : TERM  # reaches the run itself; the shell stays to hand on its exit code
{_command(options)} >>"$run/logs/run.log" 2>&1 &
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


def _command(options: SlurmOptions) -> str:
    """What runs a folder. ``srun`` starts a process for every rank, and ends all where one is killed."""
    container = f"{options.container} " if options.container else ""
    run = f'{container}{shlex.quote(options.python or sys.executable)} -P -m grpo_exp.run "$run" --resume'
    if options.num_ranks == 1:
        return run
    cpus = "" if options.cpus is None else f" --cpus-per-task={options.cpus}"  # srun does not take it from the job
    ranks = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"
    return f"srun --kill-on-bad-exit=1{cpus} bash -c {shlex.quote(f'{ranks}; exec {run}')}"


def _meeting_place(options: SlurmOptions) -> str:
    """Where ranks find each other."""
    if options.num_ranks == 1:
        return ""
    return """export run MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((15000 + SLURM_JOB_ID % 15000))
"""
