"""Runs on this machine: one process per run, some at a time. What the Hydra launcher ``local`` and a single run do.

However one run dies, the others go on; at the end every failure is listed with its overrides and the path of its traceback,
and the comparison is printed.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from rich.console import Console

from ..config.compose import Composed, is_single_run
from ..errors import ConfigError, RunFailed
from ..folder import read_status
from ..run import IN_USE, execute
from .board import Board
from .ending import print_end, print_interrupted
from .prepare import Action, Planned, check_all, decide, prepare_all

RETRY = ("none", "failed")
GRACE_S = 12.0  # for runs to write a checkpoint when the sweep is interrupted
POLL_S = 0.2


def run_here(job: Composed) -> int:
    """One run: in this process for ``grpo-exp``; in a child where another launcher put several jobs into one process.

    Raises:
        ConfigErrors: if the job cannot be run.
        RunFailed: in a child, if it does not end well, so that the launcher sees a failed job.
    """
    os.chdir(job.start)  # whatever hydra.job.chdir did: relative paths mean the folder of the command
    [planned] = prepare_all([job], check_all([job]), retry_failed=True)
    if planned.action in (Action.skip, Action.wait):
        print(f"{planned.note}: {planned.path}")
        return 0 if planned.action is Action.skip else 1
    if is_single_run():
        return execute(planned.path, resume=planned.action is Action.resume)
    code = subprocess.run(command(planned), stdin=subprocess.DEVNULL).returncode
    if code:
        raise RunFailed(f"{planned.path.name} ended with exit code {code}; {planned.path / 'status.json'} says why")
    return 0


def run_quietly(job: Composed) -> None:
    """One run in a child whose output goes to its log; how it ended is in its folder."""
    [planned] = prepare_all([job], check_all([job]), retry_failed=False)
    _start(planned).process.wait()


def command(planned: Planned) -> list[str]:
    """The command line that runs a prepared folder and ends with this process."""
    resume = ["--resume"] if planned.action is Action.resume else []
    safe = "-P"  # a random.py in the folder of the command is not Python's random
    return [sys.executable, safe, "-m", "grpo_exp.run", str(planned.path), "--tied", str(os.getpid()), *resume]


def launch(jobs: list[Composed], num_parallel: int, retry: str) -> list[Path]:
    """Run every job of a sweep that is not done yet; returns the run folders.

    Raises:
        ConfigErrors: if any job cannot be run; nothing is started then.
        SystemExit: 1 if a run did not end well; 128 + signal, when the sweep was interrupted.
    """
    problems = [] if num_parallel >= 1 else [ConfigError("hydra.launcher.n_jobs", num_parallel, "1 or more")]
    if retry not in RETRY:
        problems.append(ConfigError("hydra.launcher.retry", retry, RETRY))
    if problems:
        raise problems[0]
    frozen = check_all(jobs)
    planned = prepare_all(jobs, frozen, retry == "failed")
    console = Console(stderr=True, highlight=False)
    codes = _run_all(planned, num_parallel, retry == "failed", Board(planned, console))
    ended = [(plan, codes[plan.path]) for plan in planned]
    print_end(ended, frozen[0].values["sweep"], console)
    if any(codes.values()):
        raise SystemExit(1)
    return [plan.path for plan in planned]


@dataclass
class Child:
    planned: Planned
    process: subprocess.Popen[bytes]


def _run_all(planned: list[Planned], num_parallel: int, retry_failed: bool, board: Board) -> dict[Path, int]:
    """Exit code of every run; 0 for what was done before."""
    codes = {plan.path: _code_before(plan) for plan in planned if plan.action is Action.skip}
    waiting = [plan for plan in planned if plan.action is not Action.skip]
    running: list[Child] = []
    with Interruptible() as interrupted, board:
        try:
            while (waiting or running) and interrupted.number is None:
                _start_some(waiting, running, codes, num_parallel, retry_failed)
                board.update({child.planned.path: child.planned for child in running}, codes)
                time.sleep(POLL_S)
                _reap(waiting, running, codes)
            board.update({}, codes)
        finally:
            stopped = [child.planned for child in running]
            _stop(running, interrupted)
    if interrupted.number is not None:
        print_interrupted(stopped, waiting, interrupted.number, board.console)
        raise SystemExit(128 + interrupted.number)
    return codes


def _start_some(
    waiting: list[Planned], running: list[Child], codes: dict[Path, int], num_parallel: int, retry_failed: bool
) -> None:
    """Fill the free places. What is to be done is decided anew, as another sweep may have run it in the meantime."""
    for plan in list(waiting):
        if len(running) >= num_parallel:
            return
        current = plan if plan.action is Action.resume and retry_failed else decide(plan, retry_failed)
        match current.action:
            case Action.wait:
                continue
            case Action.skip:
                codes[plan.path] = _code_before(current)
            case Action.start | Action.resume:
                running.append(_start(current))
        waiting.remove(plan)


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


def _reap(waiting: list[Planned], running: list[Child], codes: dict[Path, int]) -> None:
    for child in [child for child in running if child.process.poll() is not None]:
        running.remove(child)
        if child.process.returncode == IN_USE:
            waiting.append(child.planned)
        else:
            codes[child.planned.path] = child.process.returncode


def _stop(running: list[Child], interrupted: "Interruptible") -> None:
    """Ask for checkpoints, then end what is left; a second Ctrl-C does not wait for them."""
    for child in running:
        child.process.send_signal(signal.SIGTERM)
    deadline, asked = time.monotonic() + GRACE_S, interrupted.count
    while time.monotonic() < deadline and interrupted.count == asked:
        if all(child.process.poll() is not None for child in running):
            return
        time.sleep(POLL_S)
    for child in running:
        child.process.kill()
        child.process.wait()


def _code_before(planned: Planned) -> int:
    status = read_status(planned.path) or {}
    return 0 if status.get("state") == "done" else int(status.get("exit_code") or 1)


class Interruptible:
    """SIGINT and SIGTERM as a flag while the sweep runs."""

    number: int | None = None
    count = 0

    def __enter__(self) -> Self:
        self._before = {n: signal.signal(n, self._received) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _received(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
