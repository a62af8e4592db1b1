"""Callbacks with the methods of ``transformers.TrainerCallback``, without importing it.

A callback may have any of ``on_train_begin``, ``on_step_end``, ``on_evaluate``, ``on_log``, ``on_save``, ``on_alarm`` (with
``alarm=…``, the event) and ``on_train_end``; each is called as ``method(args, state, control, model=…, metrics=…, …)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """What has happened so far; ``log_history`` holds the last rows of metrics."""

    global_step: int = 0
    max_steps: int | None = None
    log_history: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class TrainControl:
    """What a callback may ask for: the flags are read after every step."""

    should_training_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False


class Callbacks:
    """Calls the callbacks of a trainer in order."""

    def __init__(self, callbacks: Sequence[Any], args: Any) -> None:
        self.callbacks, self.args = list(callbacks), args
        self.state, self.control = TrainState(), TrainControl()

    def call(self, event: str, **kwargs: Any) -> None:
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(self.args, self.state, self.control, **kwargs)

    def logged(self, row: dict[str, Any]) -> None:
        self.state.log_history = [*self.state.log_history[-99:], row]
