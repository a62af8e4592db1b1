"""What travels between trainer and generator workers. Plain data, no torch: numpy arrays and lists."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class EngineSpec:
    """What a worker needs to build its engine. Dtypes travel as names, never ``auto``."""

    factory: str  # package.module:callable
    model: str
    init_kwargs: dict[str, Any]
    trust_remote_code: bool
    dtypes: dict[str, str]  # rollout, rollout_head, wire
    device: str
    num_threads: int
    batch_size: int


@dataclass(frozen=True)
class Request:
    """Sample ``num_completions`` completions of one prompt. Temperature 0 is greedy decoding, for evaluation only."""

    serial: int
    prompt_ids: list[int]
    num_completions: int
    max_new_tokens: int
    temperature: float
    seed: int
    evaluation: bool = False
    alone: bool = False  # not to be decoded together with others: it was among them when something went wrong


@dataclass(frozen=True)
class Rollout:
    """One completion. ``mu`` is the log-probability of each sampled token after temperature, in fp32, nats."""

    token_ids: list[int]
    mu: NDArray[np.float32]  # [T]
    versions: NDArray[np.int32]  # [T]: the policy version that sampled each token
    finished: bool  # ended with an end-of-sequence token; False: truncated

    def problem(self) -> str | None:
        """Why this completion cannot be trained on: lengths that disagree are never padded."""
        if not self.token_ids or len(self.token_ids) != len(self.mu) or len(self.mu) != len(self.versions):
            return f"{len(self.token_ids)} tokens, {len(self.mu)} log-probs, {len(self.versions)} versions"
        if not np.isfinite(self.mu).all():
            return "a log-probability is not finite"
        return None


@dataclass(frozen=True)
class Generated:
    """The completions of one request, as an engine returns them."""

    serial: int
    rollouts: list[Rollout]
    version: int  # loaded when its first token was sampled


@dataclass
class Group:
    """G rollouts of one prompt with their rewards (NaN: missing). Identity is the serial, never the prompt's text."""

    serial: int
    prompt_ids: list[int]
    row: dict[str, Any]
    rollouts: list[Rollout]
    version: int
    rewards: list[float] = field(default_factory=list)
