"""What a person sees of a run while it goes on: one live line in a terminal, two lines in all elsewhere."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .alarm import in_words

KEYS = {"reward/mean": "reward", "eval/accuracy": "accuracy", "mismatch/abs_mean": "mismatch", "perf/step_s": "s/step"}


class ConsoleProgress:
    """A callback that shows step, rate and the newest of a few metrics. Whoever makes it closes it."""

    def __init__(self, path: Path) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.newest: dict[str, float] = {}
        self._print(f"run folder: {path}")
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[metrics]}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, metrics="starting")
        self._bar.start()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._bar.update(self._task, total=state.max_steps, completed=state.global_step, metrics="")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.newest |= {key: logs[key] for key in KEYS if logs.get(key) is not None}
        shown = "  ".join(f"{KEYS[key]} {value:.3g}" for key, value in self.newest.items())
        self._bar.update(self._task, completed=state.global_step, metrics=shown)

    def on_alarm(self, args: Any, state: Any, control: Any, alarm: dict[str, Any], **kwargs: Any) -> None:
        self._print(f"alarm at step {state.global_step + 1}: {in_words(alarm)}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()
        shown = ", ".join(f"{key} {value:.3g}" for key, value in self.newest.items())
        self._print(f"{state.global_step} steps: {shown}")

    def close(self) -> None:
        """Give the terminal back; also after a failure, which ends no training."""
        self._bar.stop()

    def _print(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)
