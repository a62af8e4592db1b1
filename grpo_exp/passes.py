"""Forward and backward passes over the micro-batches of one step."""

import torch
from torch import Tensor

from .algo.loss import ppo_clip
from .batch import MicroBatch, StepBatch
from .config.schema import AlgoConfig, OldLogprobs
from .metrics import Passes
from .policy import Policy


class PassRunner:
    """Accumulates the gradient of a step, and keeps what the metrics need."""

    def __init__(self, policy: Policy, algo: AlgoConfig, temperature: float) -> None:
        self.policy, self.algo, self.temperature = policy, algo, temperature

    def run(self, batch: StepBatch, scale: float) -> Passes:
        """Backward through every micro-batch; the loss is multiplied by ``scale`` for it, not in what is returned."""
        seen = [self.run_micro_batch(micro_batch, scale) for micro_batch in batch.micro_batches]
        joined = {name: torch.cat([part[name] for part in seen]) for name in seen[0]}
        loss = float(joined.pop("loss").sum())
        return Passes(loss=loss, scale=scale, **joined)

    def run_micro_batch(self, micro_batch: MicroBatch, scale: float) -> dict[str, Tensor]:
        """Forward and backward: adds to the gradients; returns the loss, [1], and per-token tensors by name, [n]."""
        with torch.set_grad_enabled(micro_batch.has_gradient):
            new, entropy = self.policy.logprobs(micro_batch.tokens, self.temperature)
        # one pass per step: the weights at its start are those of this very pass
        old = new.detach()
        denominator = old if self.algo.old_logprobs is OldLogprobs.recompute else micro_batch.mu
        policy_loss = ppo_clip(
            new[:, None],
            denominator[:, None],
            micro_batch.advantages,
            torch.ones_like(new[:, None], dtype=torch.bool),
            self.algo.clip_low,
            self.algo.clip_high,
            self.algo.dual_clip,
        )
        loss = (policy_loss.per_token[:, 0] * micro_batch.weights).sum()
        if micro_batch.has_gradient:
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        return {
            "loss": loss.detach()[None],
            "new": old,
            "old": old,
            "mu": micro_batch.mu,
            "ratio": policy_loss.ratio[:, 0],
            "clipped": policy_loss.clipped[:, 0],
            "entropy": entropy,
            "sequence": micro_batch.sequence,
        }
