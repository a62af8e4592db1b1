"""Completions that are not trained on: for an evaluation, or for a probe of the mismatch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..tasks import Row, Task
from .types import Request, Rollout


class Codec(Protocol):
    """Text to ids and back: :class:`grpo_exp.tokens.Codec`."""

    def encode(self, rows: Sequence[Row]) -> list[list[int]]: ...
    def decode(self, rows: Sequence[Row], token_ids: Sequence[list[int]]) -> list[Any]: ...


@dataclass
class Aside:
    """A request whose completions are not trained on, and what came of it. Its serial is negative."""

    request: Request
    row: Row
    is_rewarded: bool
    rollouts: list[Rollout] | None = None
    rewards: list[float] | None = None

    @property
    def done(self) -> bool:
        return self.rollouts is not None and (self.rewards is not None or not self.is_rewarded)


@dataclass(frozen=True)
class Evaluation:
    """Mean scores over the held-out prompts; None where the task or the mode has none."""

    accuracy: float | None
    accuracy_greedy: float | None
    reward: float | None

    def metrics(self) -> dict[str, float]:
        named = {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_greedy": self.accuracy_greedy,
            "eval/reward": self.reward,
        }
        return {key: value for key, value in named.items() if value is not None}


def accuracy(task: Task, codec: Codec, rows: list[Row], rollouts: list[Rollout]) -> float | None:
    """The share of completions, one for each row, that the task calls right; None where it does not say."""
    if task.accuracy is None or not rows:
        return None
    names = {name for row in rows for name in row} - {"prompt"}
    columns: dict[str, list[Any]] = {
        "prompts": [row["prompt"] for row in rows],
        "completions": codec.decode(rows, [rollout.token_ids for rollout in rollouts]),
        "completion_ids": [rollout.token_ids for rollout in rollouts],
        **{name: [row.get(name) for row in rows] for name in sorted(names)},
    }
    return float(np.mean(task.accuracy(**columns)))
