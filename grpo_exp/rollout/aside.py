"""Completions that are not trained on: for an evaluation, or for a probe of the mismatch."""

from dataclasses import dataclass

from ..tasks import Row
from .types import Request, Rollout


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
