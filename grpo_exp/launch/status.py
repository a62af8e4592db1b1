"""``grpo-exp status SWEEP`` and ``grpo-exp cancel SWEEP``: how the runs of a sweep go, from their folders.

Works while they run, and on a copy of the folders elsewhere; where Slurm is at hand it is asked what waits and why.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..arguments import Parser
from ..errors import ConfigError
from ..report.arms import design, natural
from ..report.compare import terminal
from ..report.load import RunRecord, RunState, find_runs
from . import queue

TAIL_BYTES = 65536
RECENT = 20  # rows that the speed is taken from
EVERY_S = 5.0
STYLES = {"done": "green", "running": "cyan", "failed": "red", "crashed": "red", "broken": "red", "preempted": "yellow"}


@dataclass(frozen=True)
class Line:
    """One run as it is shown."""

    arm: str
    seed: str
    state: str
    step: str
    reward: str
    eta: str
    job: str
    reason: str
    path: Path


def main(argv: list[str]) -> int:
    """``grpo-exp status``: 0 whatever the states are, 2 for a path without runs."""
    parser = Parser(prog="grpo-exp status", description="How the runs of a sweep go.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a sweep's folder, or a run's")
    parser.add_argument("--watch", action="store_true", help=f"look again every {EVERY_S:.0f} s until all is over")
    parser.add_argument("--json", action="store_true", help="a list of the runs, for programs")
    arguments = parser.parse_args(argv)
    if arguments.json:
        print(json.dumps([vars(line) | {"path": str(line.path)} for line in look(arguments.paths)], indent=2))
        return 0
    console = terminal()
    if not arguments.watch:
        console.print(_view(look(arguments.paths)))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            lines = look(arguments.paths)
            live.update(_view(lines), refresh=True)
            if not any(line.state in ("created", "running", "queued") for line in lines):
                return 0
            time.sleep(EVERY_S)


def cancel(argv: list[str]) -> int:
    """``grpo-exp cancel``: ends the Slurm jobs of a sweep. Returns 1 if Slurm does not answer."""
    parser = Parser(prog="grpo-exp cancel", description="End the Slurm jobs of a sweep.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a sweep's folder, or a run's")
    paths = parser.parse_args(argv).paths
    known = queue.jobs() if queue.is_there() else None
    if known is None:
        raise ConfigError("cancel", str(paths[0]), fix="squeue does not answer here: run this where Slurm is")
    numbers = [queue.job_of(run.path) for run in find_runs(paths)]
    ids = [number for number in numbers if number in known and not known[number].is_over]
    if ids:
        queue.cancel(ids)
    print(f"{len(ids)} jobs cancelled; a run that trained keeps a checkpoint, and the same command goes on with it")
    return 0


def look(paths: Sequence[Path]) -> list[Line]:
    """Every run at or below some paths, by arm and seed.

    Raises:
        ConfigError: a path does not exist or holds no run.
    """
    runs = find_runs(paths)
    numbers = {run.path: queue.job_of(run.path) for run in runs}
    known = queue.jobs() or {} if any(numbers.values()) and queue.is_there() else {}
    found = design(runs)
    arms = [(arm.name, run) for arm in found.arms for run in arm.runs] + [("–", run) for run in found.broken]
    return [_line(arm, run, numbers[run.path], known) for arm, run in arms]


def _line(arm: str, run: RunRecord, number: str | None, known: Mapping[str, queue.Job]) -> Line:
    job = known.get(number or "")
    state, reason = run.state.value, run.reason or ""
    if job is not None and not job.is_over and run.state is not RunState.running:
        state = "queued" if job.state == "PENDING" else "starting"
        reason = job.reason if job.state == "PENDING" and job.reason != "None" else ""
    elif run.state in (RunState.created, RunState.crashed) and job is not None and job.is_over:
        reason = f"Slurm says {job.state}"
    reached, total = run.status.get("step"), run.status.get("max_steps")
    step = reached if isinstance(reached, int) else 0
    rows = _last_rows(run.path / "metrics.jsonl")
    reward = next((row["reward/mean"] for row in reversed(rows) if row.get("reward/mean") is not None), None)
    return Line(
        arm=arm,
        seed=run.seed,
        state=state,
        step=f"{step}/{total}" if total else str(step),
        reward="" if reward is None else f"{reward:.3f}",
        eta=_eta(rows, step, total) if state == "running" else "",
        job=number or "",
        reason=" ".join(reason.split()),
        path=run.path,
    )


def _last_rows(path: Path) -> list[dict[str, Any]]:
    """The last rows of a file that may be long and may be written to."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return []
    rows = []
    for line in lines[-RECENT:]:
        try:
            rows.append(json.loads(line))
        except ValueError:  # cut at its beginning
            continue
    return [row for row in rows if isinstance(row, dict)]


def _eta(rows: Sequence[Mapping[str, Any]], step: int, total: Any) -> str:
    """Time left at the speed of the last rows; of the rows that belong to one process, where time goes on evenly."""
    if not isinstance(total, int) or len(rows) < 2 or rows[-1].get("step") == rows[0].get("step"):
        return ""
    try:
        each_s = (rows[-1]["time"] - rows[0]["time"]) / (rows[-1]["step"] - rows[0]["step"])
    except (KeyError, TypeError, ZeroDivisionError):
        return ""
    minutes, seconds = divmod(round(max(0.0, each_s * (total - step))), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"


def _view(lines: Sequence[Line]) -> Group:
    counts: dict[str, int] = {}
    for line in lines:
        counts[line.state] = counts.get(line.state, 0) + 1
    words = ", ".join(f"{count} {state}" for state, count in counts.items())
    return Group(f"{len(lines)} runs: {words}", "", _grid(lines), "", _details(lines))


def _grid(lines: Sequence[Line]) -> Table:
    """Arms × seeds."""
    table = Table(box=None, pad_edge=False)
    table.add_column("arm")
    seeds = sorted({line.seed for line in lines}, key=natural)
    for seed in seeds:
        table.add_column(f"seed {escape(seed)}")
    for arm in dict.fromkeys(line.arm for line in lines):
        cells = []
        for seed in seeds:
            here = [line for line in lines if (line.arm, line.seed) == (arm, seed)]
            cells.append("\n".join(_cell(line) for line in here))
        table.add_row(escape(arm), *cells)
    return table


def _cell(line: Line) -> str:
    style = STYLES.get(line.state, "dim")
    parts = [f"[{style}]{line.state}[/{style}]", line.step, line.reward, line.eta and f"({line.eta} left)"]
    return " ".join(part for part in parts if part)


def _details(lines: Sequence[Line]) -> Table:
    """Job and folder of every run, and why it is not done."""
    table = Table(box=None, pad_edge=False)
    for column in ("job", "reason"):
        table.add_column(column)
    table.add_column("path", overflow="fold", min_width=40)
    for line in lines:
        table.add_row(line.job, escape(line.reason), escape(str(line.path)))
    return table
