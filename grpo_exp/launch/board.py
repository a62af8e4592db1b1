"""The live view of a sweep: a table in a terminal, a line per started and ended run elsewhere."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from ..folder import read_status
from .prepare import Action, Planned

FEW = 6  # runs that are skipped: below this they are named


class Board:
    """Shows states and steps of the runs of a sweep, from their status files."""

    def __init__(self, planned: list[Planned], console: Console) -> None:
        self.planned, self.console = planned, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._said: set[tuple[Path, str]] = set()
        self._skipped = {plan.path for plan in planned if plan.action is Action.skip}

    def __enter__(self) -> "Board":
        skipped = [plan for plan in self.planned if plan.path in self._skipped]
        if len(skipped) < FEW:
            for plan in skipped:
                self._print(f"{plan.path.name}: {plan.note}")
        else:
            for note, count in Counter(plan.note for plan in skipped).items():
                self._print(f"{count} runs: {note}")
        for plan in self.planned:
            if plan.action is Action.wait:
                self._print(f"{plan.path.name}: {plan.note}, its end is waited for")
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def update(self, running: Mapping[Path, Planned], codes: Mapping[Path, int]) -> None:
        """Called a few times a second."""
        if self._live is not None:
            self._live.update(self._table(running, codes), refresh=True)
            return
        for plan in self.planned:
            if (now := running.get(plan.path)) is not None:
                self._say(plan.path, "started" if now.action is Action.start else f"goes on ({now.note})")
            elif plan.path in codes and plan.path not in self._skipped:
                code = codes[plan.path]
                self._say(plan.path, "done" if code == 0 else f"ended with exit code {code}")

    def _say(self, path: Path, word: str) -> None:
        if (path, word) not in self._said:
            self._said.add((path, word))
            self._print(f"{path.name}: {word}")

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def _table(self, running: Mapping[Path, Planned], codes: Mapping[Path, int]) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("run", "state", "step"):
            table.add_column(column)
        for plan in self.planned:
            if plan.path in self._skipped:
                continue
            status = read_status(plan.path) or {}
            state = str(status.get("state", "")) if plan.path in running or plan.path in codes else "waiting"
            state = "starting" if plan.path in running and state in ("created", "preempted") else state
            state = "crashed" if plan.path in codes and state == "running" else state
            total = status.get("max_steps")
            step = f"{status.get('step', 0)}/{total}" if total else str(status.get("step", 0))
            table.add_row(escape(plan.path.name), state, step if state != "waiting" else "")
        return table
