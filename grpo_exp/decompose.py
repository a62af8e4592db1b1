"""The decomposition in a run: every ``probe.every`` steps, fresh completions are scored in five ways and thrown away.

Fresh means that the generator sampled them under the very weights that the trainer holds, which makes beta exact without
keeping any older ones; after the optimizer step that follows, the same tokens are scored again, which makes alpha exact
for one version. The mathematics is in :mod:`grpo_exp.algo.decomposition`.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .algo.decomposition import Scores, alpha_of_stale, decompose, decomposition_metrics
from .batch import MicroBatch, StepBatch, build_batch
from .checkpoint import Progress
from .config.schema import Config
from .metrics import Passes
from .policy import Policy
from .rollout.pool import OnEvent
from .rollout.source import RolloutSource
from .token_batch import Completion, RowBatch
from .weights import rounded, swapped


@dataclass(frozen=True)
class Fresh:
    """Completions that were sampled under the weights of version ``version``, and what the trainer made of them then."""

    batch: StepBatch
    version: int
    own: Tensor  # [n]
    lowered: Tensor  # [n]
    alone: Tensor  # [n]


class Decomposer:
    """Takes the gap apart when it is due and not too dear; ``progress.probe_s`` has what that has cost."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        wall_s: Callable[[], float],
        on_event: OnEvent,
        unwatched: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """How a run is probed.

        Args:
            wall_s: seconds of training so far, for the bound on the share of it.
            unwatched: a context in which nobody takes the dtypes that are computed in for those of the run.
        """
        self.config, self.policy, self.wall_s, self.on_event = config, policy, wall_s, on_event
        self.unwatched = unwatched
        self.temperature = config.rollout.temperature
        self._last_s = 0.0

    def sample(self, source: RolloutSource, progress: Progress) -> Fresh | None:
        """Before a step: fresh completions and their scores under the weights of now; None where no probe is made.

        Raises:
            Interrupted: if the run was asked to stop.
        """
        every = self.config.probe.every
        if not every or (progress.step + 1) % every or not self._affordable(progress):
            return None
        start = time.perf_counter()
        batch = self._build(source, progress.update)
        fresh = self.score(batch, progress.update)
        self._last_s = time.perf_counter() - start
        progress.probe_s += self._last_s
        return fresh

    def measure(self, fresh: Fresh | None, passes: Passes, progress: Progress) -> dict[str, float]:
        """After the step: the metrics of a probe, and nothing where there was none."""
        if fresh is None:
            return {}
        start = time.perf_counter()
        measured = self.metrics(fresh)
        measured["alpha_stale"] = alpha_of_stale(passes.old - passes.mu, passes.staleness, measured["beta_mean"])
        seconds = time.perf_counter() - start
        self._last_s += seconds
        progress.probe_s += seconds
        measured["lag"] = progress.update - fresh.version
        measured["share"] = progress.probe_s / self.wall_s()
        return {f"probe/{name}": value for name, value in measured.items()}

    def score(self, batch: StepBatch, version: int) -> Fresh:
        """What the trainer makes of some completions under the weights it holds."""
        own = self._logprobs(self.policy, batch.micro_batches)
        lower = self._lowered_policy()
        weights = rounded(self.policy.model, self.policy.precision.wire, self.policy.precision.rollout)
        with self.unwatched(), swapped(self.policy.model, weights):
            lowered = self._logprobs(lower, batch.micro_batches)
            alone = self._logprobs(lower, [row for mb in batch.micro_batches for row in self._rows(batch, mb)])
        return Fresh(batch, version, own, lowered, alone)

    def metrics(self, fresh: Fresh) -> dict[str, float]:
        """Statistics of the parts, with the weights of now for the later ones."""
        later = self._logprobs(self.policy, fresh.batch.micro_batches)
        joined = {
            name: torch.cat([getattr(micro_batch, name) for micro_batch in fresh.batch.micro_batches])
            for name in ("mu", "advantages", "sequence", "position")
        }
        parts = decompose(Scores(joined["mu"], fresh.own, fresh.lowered, fresh.alone, later))
        return decomposition_metrics(parts, **joined, clip=self.config.algo.clip) | {"tokens": len(later)}

    def _affordable(self, progress: Progress) -> bool:
        """Whether another probe as dear as the last one keeps within the share; the first one is taken at its word."""
        bound = self.config.probe.max_share
        share = (progress.probe_s + self._last_s) / (self.wall_s() + self._last_s)
        if bound > 0 and share <= bound:
            return True
        self.on_event("probe_left_out", {"share": share, "max_share": bound})
        return False

    def _build(self, source: RolloutSource, version: int) -> StepBatch:
        config = self.config
        return build_batch(
            source.fresh_groups(config.probe.prompts),
            config.algo,
            config.task.max_completion_tokens,
            config.trainer.tokens_per_micro_batch,
            self.policy.device,
            share_prompts=config.trainer.share_prompts and self.policy.shares_prompts,
            version=version,
        )

    def _lowered_policy(self) -> Policy:
        """The trainer's code in the generator's dtypes."""
        own, lower = self.policy.precision, copy(self.policy)
        lower.precision = replace(own, params=own.rollout, compute=own.rollout, head=own.rollout_head)
        return lower

    def _rows(self, batch: StepBatch, micro_batch: MicroBatch) -> list[RowBatch]:
        """Every completion of a micro-batch as a batch of its own, in the order of its tokens."""
        size, found = self.config.algo.group_size, []
        for row in torch.unique_consecutive(micro_batch.sequence).tolist():
            completion = Completion(0, batch.groups[row // size].prompt_ids, batch.rollouts[row].token_ids)
            found.append(RowBatch.build([completion], self.policy.device))
        return found

    @torch.no_grad()
    def _logprobs(self, policy: Policy, batches: "list[MicroBatch] | list[RowBatch]") -> Tensor:
        """Log-probabilities of all tokens, one forward pass for each batch."""
        tokens = [batch.tokens if isinstance(batch, MicroBatch) else batch for batch in batches]
        return torch.cat([policy.logprobs(one, self.temperature)[0] for one in tokens])
