"""What travels between trainer and generator workers. Plain data, no torch: numpy arrays and lists."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
    options: dict[str, Any] = field(default_factory=dict)  # what only some engines have

    def for_worker(self, index: int) -> "EngineSpec":
        """The same for one worker, who has a server of its own where there are servers."""
        urls = self.options.get("urls")
        return replace(self, options=self.options | {"url": urls[index]}) if urls else self


@dataclass(frozen=True)
class Shaping:
    """What makes the sampled distribution another than the policy's: for evaluation, in engines that can."""

    top_p: float = 1.0
    top_k: int = 0  # 0 = all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


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
    shaping: Shaping = Shaping()


class Rollout(NamedTuple):
    """One completion. ``mu`` is the log-probability of each sampled token after temperature, in fp32, nats."""

    token_ids: list[int]
    mu: NDArray[np.float32]  # [T]
    versions: NDArray[np.int32]  # [T]: the policy version that sampled each token
    finished: bool  # ended with an end-of-sequence token; False: truncated


@dataclass(frozen=True)
class Generated:
    """The completions of one request, as an engine returns them."""

    serial: int
    rollouts: list[Rollout]
    version: int  # loaded when its first token was sampled

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def oldest_version(self) -> int:
        """Of all its tokens."""
        return int(np.concatenate([rollout.versions for rollout in self.rollouts]).min())

    def problem(self) -> str | None:
        """Why these completions cannot be trained on: lengths that disagree are never padded."""
        for rollout in self.rollouts:
            if not rollout.token_ids or not len(rollout.token_ids) == len(rollout.mu) == len(rollout.versions):
                return f"{len(rollout.token_ids)} tokens, {len(rollout.mu)} log-probs, {len(rollout.versions)} versions"
        if not np.isfinite(np.concatenate([rollout.mu for rollout in self.rollouts])).all():
            return "a log-probability is not finite"
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as a few arrays: one object per completion and array would cost the trainer more than the tokens."""
        lengths = [(len(r.token_ids), len(r.mu), len(r.versions)) for r in self.rollouts]
        token_ids = np.array([token for r in self.rollouts for token in r.token_ids], dtype=np.int32)
        mu = np.concatenate([r.mu for r in self.rollouts])
        versions = np.concatenate([r.versions for r in self.rollouts])
        finished = [r.finished for r in self.rollouts]
        return _unpack, (self.serial, self.version, lengths, token_ids, mu, versions, finished)


def _unpack(
    serial: int,
    version: int,
    lengths: list[tuple[int, int, int]],
    token_ids: NDArray[np.int32],
    mu: NDArray[np.float32],
    versions: NDArray[np.int32],
    finished: list[bool],
) -> Generated:
    ids, rollouts = token_ids.tolist(), []
    i = j = k = 0  # where each array is read; plain slices are far quicker than np.split
    for (num_ids, num_mu, num_versions), done in zip(lengths, finished, strict=True):
        rollouts.append(Rollout(ids[i : i + num_ids], mu[j : j + num_mu], versions[k : k + num_versions], done))
        i, j, k = i + num_ids, j + num_mu, k + num_versions
    return Generated(serial, rollouts, version)


@dataclass
class Group:
    """G rollouts of one prompt with their rewards (NaN: missing). Identity is the serial, never the prompt's text."""

    serial: int
    prompt_ids: list[int]
    row: dict[str, Any]
    rollouts: list[Rollout]
    version: int
    rewards: list[float] = field(default_factory=list)
