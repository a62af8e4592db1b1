"""Command lines of the program for tests, and what they leave behind."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_exp.folder import read_status

PLUGINS = str(Path(__file__).parent / "plugins")
PROGRAM = str(Path(sys.executable).with_name("grpo-exp"))
SMALL = ("debug=smoke", "rollout=lockstep", "trainer.max_steps=2", "trainer.eval_every=0", "trainer.save_every=0")
PATIENCE_S = 90.0  # for what takes seconds on a machine that is not busy


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    wall_s: float


class Command:
    """A command line that goes on while the test looks."""

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            [PROGRAM, *arguments],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def end(self) -> Ended:
        out, err = self.process.communicate(timeout=PATIENCE_S * 2)
        return Ended(self.process.returncode, out, err, time.monotonic() - self.start)


def command(*arguments: str, cwd: Path, **environment: str) -> Ended:
    return Command(*arguments, cwd=cwd, **environment).end()


def runs(folder: Path) -> dict[str, Path]:
    """Run folders by the part of their names that says what varied."""
    return {path.name.rpartition("_")[0]: path for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def wait_for(what: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def step(path: Path) -> int:
    return int((read_status(path) or {}).get("step", 0))


def processes(folder: Path) -> list[psutil.Process]:
    """Runs below a folder, whoever started them, with their children."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (
            any(str(folder) in part for part in process.info["cmdline"] or ())
            and "grpo_exp.run" in process.info["cmdline"]
        ):
            found += [process, *process.children(recursive=True)]
    return found


def in_a_terminal(arguments: list[str], cwd: Path) -> tuple[int, str]:
    """Run a command in a pseudo-terminal; its exit code and what was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux says so when the other side is closed
            break
        shown += part
    os.close(ours)
    return process.wait(), shown.decode(errors="replace")
