"""The live view of a sweep: a table in a terminal, a line per started and ended run elsewhere."""

from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..folder import read_status
from .prepare import Action, Planned


class Board:
    """Shows states and steps of the runs of a sweep, from their status files."""

    def __init__(self, planned: list[Planned], console: Console) -> None:
        self.planned, self.console = planned, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._said: set[tuple[Path, str]] = set()

    def __enter__(self) -> "Board":
        if self._live is not None:
            self._live.__enter__()
        skipped = [plan for plan in self.planned if plan.action is Action.skip]
        for plan in skipped:
            self.console.print(f"{plan.path.name}: {plan.note}", soft_wrap=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def update(self, running: set[Path], codes: dict[Path, int]) -> None:
        """Called a few times a second."""
        if self._live is not None:
            self._live.update(self._table(running, codes), refresh=True)
            return
        for plan in self.planned:
            if plan.path in running:
                self._say(plan.path, "started")
            elif plan.path in codes and plan.action is not Action.skip:
                self._say(plan.path, "done" if codes[plan.path] == 0 else f"ended with exit code {codes[plan.path]}")

    def _say(self, path: Path, word: str) -> None:
        if (path, word) not in self._said:
            self._said.add((path, word))
            self.console.print(f"{path.name}: {word}", soft_wrap=True)

    def _table(self, running: set[Path], codes: dict[Path, int]) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("run", "state", "step"):
            table.add_column(column)
        for plan in self.planned:
            status = read_status(plan.path) or {}
            state = str(status.get("state", "")) if plan.path in running or plan.path in codes else "waiting"
            state = "starting" if plan.path in running and state == "created" else state
            total = status.get("max_steps")
            step = f"{status.get('step', 0)}/{total}" if total else str(status.get("step", 0))
            table.add_row(plan.path.name, state, step if state != "waiting" else "")
        return table
