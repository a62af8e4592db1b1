"""Runs on this machine: one process per run, some at a time. What the Hydra launcher ``local`` and a single run do.

However one run dies, the others go on; at the end every failure is listed with its overrides and the path of its traceback,
and the comparison is printed.
"""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..config.compose import Composed, is_single_run, varied_keys
from ..folder import read_status
from ..report.compare import render
from .board import Board
from .prepare import Action, Planned, check_all, prepare

GRACE_S = 12.0  # for runs to write a checkpoint when the sweep is interrupted
POLL_S = 0.3


def run_here(job: Composed) -> int:
    """One run: in this process for ``grpo-exp``; in a child where another launcher put several jobs into one process."""
    frozen = check_all([job])[0]
    planned = prepare(job, frozen, {}, retry_failed=True)
    if planned.action is Action.skip:
        print(f"{planned.note}: {planned.path}")
        return 0 if planned.note == "done already" else 1
    if not is_single_run():
        code = subprocess.run(command(planned), stdin=subprocess.DEVNULL).returncode
        if code:
            raise RuntimeError(f"{planned.path.name} ended with exit code {code}; {planned.path / 'status.json'} says why")
        return 0
    from ..run import execute

    return execute(planned.path, resume=planned.action is Action.resume)


def command(planned: Planned) -> list[str]:
    """The command line that runs a prepared folder."""
    resume = ["--resume"] if planned.action is Action.resume else []
    return [sys.executable, "-m", "grpo_exp.run", str(planned.path), "--tied", *resume]


@dataclass
class Child:
    planned: Planned
    process: subprocess.Popen[bytes]


def run_sweep(jobs: list[Composed], num_parallel: int, retry_failed: bool) -> list[tuple[Planned, int]]:
    """Run every job that is not done yet; returns each with its exit code (0 for what was done before).

    Raises:
        ConfigErrors: if any job cannot be run; nothing is started then.
        SystemExit: 128 + signal, when the sweep was interrupted; runs that were going on have written a checkpoint.
    """
    frozen = check_all(jobs)
    factors = varied_keys([job.overrides for job in jobs])
    planned = [
        prepare(job, one, levels, retry_failed) for job, one, levels in zip(jobs, frozen, factors, strict=True)
    ]
    unique = list({plan.path: plan for plan in planned}.values())
    console = Console(stderr=True, highlight=False)
    codes = _run_all(unique, num_parallel, Board(unique, console))
    ended = [(plan, codes[plan.path]) for plan in unique]
    _print_end(ended, frozen[0].values["sweep"], console)
    return ended


def _run_all(planned: list[Planned], num_parallel: int, board: Board) -> dict[Path, int]:
    codes = {plan.path: _code_before(plan) for plan in planned if plan.action is Action.skip}
    waiting = [plan for plan in planned if plan.action is not Action.skip]
    running: list[Child] = []
    with Interruptible() as interrupted, board:
        try:
            while waiting or running:
                while waiting and len(running) < num_parallel:
                    running.append(_start(waiting.pop(0)))
                time.sleep(POLL_S)
                for child in [child for child in running if child.process.poll() is not None]:
                    running.remove(child)
                    codes[child.planned.path] = child.process.returncode
                board.update({child.planned.path for child in running}, codes)
                if interrupted.number is not None:
                    raise SystemExit(128 + interrupted.number)
        finally:
            _stop(running)
    return codes


def _start(planned: Planned) -> Child:
    with (planned.path / "logs" / "run.log").open("ab") as log:
        process = subprocess.Popen(
            command(planned),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C reaches the sweep alone, which then stops its runs in order
        )
    return Child(planned, process)


def _stop(running: list[Child]) -> None:
    for child in running:
        child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    for child in running:
        try:
            child.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


def _code_before(planned: Planned) -> int:
    status = read_status(planned.path) or {}
    return 0 if status.get("state") in ("done", "running") else int(status.get("exit_code") or 1)


def _print_end(ended: list[tuple[Planned, int]], sweep: dict[str, Any], console: Console) -> None:
    render([plan.path for plan, _ in ended], Console(highlight=False), sweep["baseline"], sweep["metric"])
    failures = [(plan, code) for plan, code in ended if code != 0]
    if failures:
        console.print(f"\n{len(failures)} of {len(ended)} runs did not end well:", style="bold")
    for plan, code in failures:
        status = read_status(plan.path) or {}
        reason = str(status.get("reason") or f"exit code {code}").splitlines()[0]
        console.print(f"  {' '.join(plan.overrides) or plan.path.name}: {reason}", soft_wrap=True)
        console.print(f"    {plan.path / 'status.json'}  {plan.path / 'logs' / 'run.log'}", soft_wrap=True)
    if any(plan.note == "failed before" for plan, _ in failures):
        console.print("  hydra.launcher.retry=failed runs what failed before again")


class Interruptible:
    """SIGINT and SIGTERM as a flag while the sweep runs."""

    number: int | None = None

    def __enter__(self) -> "Interruptible":
        self._before = {n: signal.signal(n, self._received) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _received(self, number: int, frame: Any) -> None:
        self.number = number

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


