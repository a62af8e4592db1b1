"""What is printed when a sweep is over or was interrupted: the comparison, and every run that did not end well."""

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import ConfigError
from ..folder import read_status
from ..report.compare import PLAIN_WIDTH, render
from .prepare import Planned
from .queue import end_of

EVERY_RUN_HAS = "reward/mean"
NAME_ANOTHER = "add it, or name another one with \"sweep.baseline='FACTOR=LEVEL'\""


def print_end(ended: list[tuple[Planned, int]], sweep: Mapping[str, Any], console: Console) -> None:
    """The comparison goes to standard output, everything else to the console."""
    try:
        _compare([plan.path for plan, _ in ended], sweep, console)
    except ConfigError as error:  # nothing to compare, or not what was asked for: the failures are still to be told
        console.print(f"no comparison: {error}", soft_wrap=True, markup=False)
    failures = [(plan, code) for plan, code in ended if code != 0]
    if failures:
        console.print(f"\n{len(failures)} of {len(ended)} runs did not end well:", style="bold")
    for plan, code in failures:
        overrides = " ".join(plan.overrides) or plan.path.name
        console.print(f"  {overrides}: {reason(plan.path, code)}", soft_wrap=True, markup=False)
        console.print(
            f"    {plan.path / 'status.json'}  {plan.path / 'logs' / 'run.log'}", soft_wrap=True, markup=False
        )
    if failures:
        console.print("hydra.launcher.retry=failed added to the same command runs what failed again")


def _compare(paths: list[Path], sweep: Mapping[str, Any], console: Console) -> None:
    """By baseline and metric of the sweep; where no run has them, by the first arm and the reward, which is said."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    output = Console(highlight=False, width=None if is_sized else PLAIN_WIDTH)
    baseline, metric = sweep["baseline"], sweep["metric"]
    for _ in range(3):
        try:
            render(paths, output, baseline, metric)
            break
        except ConfigError as error:
            if error.key == "metric" and metric != EVERY_RUN_HAS:
                said, metric = f"no run has {metric}: compared by {EVERY_RUN_HAS}", EVERY_RUN_HAS
            elif error.key == "baseline" and baseline is not None:
                said, baseline = f"no run of this sweep is its baseline {baseline}: {NAME_ANOTHER}", None
            else:
                raise
            console.print(said, soft_wrap=True, markup=False)
    sys.stdout.flush()


def print_interrupted(stopped: list[Planned], waiting: list[Planned], number: int, console: Console) -> None:
    """What was going on, and how to go on."""
    for plan in stopped:
        status = read_status(plan.path) or {}
        where = f"stopped after step {status.get('step', 0)}" if status.get("state") == "preempted" else "stopped"
        console.print(f"{plan.path.name}: {where}", soft_wrap=True, markup=False)
    name = signal.Signals(number).name
    console.print(f"{name}: {len(stopped)} runs were stopped, {len(waiting)} not started; the same command goes on")


def reason(path: Path, code: int) -> str:
    """Why a run did not end well, in a line."""
    status = read_status(path) or {}
    if status.get("state") in ("failed", "preempted") and status.get("reason"):
        return str(status["reason"]).splitlines()[0]
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint} at step {status.get('step', 0)}"
    if (ended := end_of(path)) is not None:
        return f"Slurm says {ended} at step {status.get('step', 0)}"
    return f"exit code {code}"
