"""Forward and backward passes over the micro-batches of one step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from .algo.correction import Correction, correct
from .algo.policy_loss import Tokens, policy_loss
from .batch import MicroBatch, StepBatch
from .config.schema import AlgoConfig, CorrectionConfig, Weight
from .metrics import Passes
from .policy import Policy

Beside = Callable[[], AbstractContextManager[object]]
"""Entered around each backward pass, which is the part that leaves Python's lock to others; a forward pass does not."""


class PassRunner:
    """Accumulates the gradient of a step, and keeps what the metrics need."""

    def __init__(self, policy: Policy, algo: AlgoConfig, correction: CorrectionConfig, temperature: float) -> None:
        self.policy, self.algo, self.correction, self.temperature = policy, algo, correction, temperature

    def run(self, batch: StepBatch, scale: float, beside: Beside = nullcontext) -> Passes:
        """Backward through every micro-batch; the loss is multiplied by ``scale`` for it, not in what is returned."""
        seen = [self.run_micro_batch(micro_batch, scale, beside) for micro_batch in batch.micro_batches]
        joined = {name: torch.cat([part[name] for part in seen]) for name in seen[0]}
        loss = float(joined.pop("loss").sum())
        names = ("proximal", "weight", "log_raw", "kept")
        correction = Correction(**{name: joined.pop(name) for name in names})
        if self.correction.batch_norm:
            mean = self._mean_weight(correction.weight, joined["sequence"], batch.included)
            self._divide_gradients(mean)
            loss /= mean
            correction = replace(correction, weight=correction.weight / mean)
        return Passes(loss=loss, scale=scale, correction=correction, **joined)

    def run_micro_batch(self, micro_batch: MicroBatch, scale: float, beside: Beside = nullcontext) -> dict[str, Tensor]:
        """Forward and backward: adds to the gradients; returns the loss, [1], and per-token tensors by name, [n]."""
        with torch.set_grad_enabled(micro_batch.has_gradient):
            new, entropy = self.policy.logprobs(micro_batch.tokens, self.temperature)
        # one pass per step: the weights at its start are those of this very pass
        old = new.detach()
        correction = correct(
            micro_batch.mu,
            old,
            micro_batch.same_weights,
            micro_batch.staleness,
            micro_batch.sequence,
            self.correction,
        )
        found = policy_loss(
            Tokens(new, correction.proximal, micro_batch.mu, micro_batch.advantages, micro_batch.sequence), self.algo
        )
        loss = (found.per_token * correction.weight * micro_batch.weights).sum()
        if micro_batch.has_gradient:
            with beside():
                (loss * scale).backward()  # type: ignore[no-untyped-call]
        return {
            "loss": loss.detach()[None],
            "new": old,
            "old": old,
            "mu": micro_batch.mu,
            "ratio": found.ratio,
            "clipped": found.clipped,
            "entropy": entropy,
            "sequence": micro_batch.sequence,
            "position": micro_batch.position,
            "staleness": micro_batch.staleness,
            **vars(correction),
        }

    def _mean_weight(self, weight: Tensor, sequence: Tensor, included: Tensor) -> float:
        """Over the tokens that are counted in the loss, or their sequences where the weight is one of sequences."""
        counted = included.to(sequence.device)[sequence]
        if self.correction.weight is Weight.seq_tis:
            first = torch.ones_like(counted)
            first[1:] = sequence[1:] != sequence[:-1]
            counted = counted & first
        return float(weight[counted].double().mean()) if bool(counted.any()) else 1.0  # float64: a sum over many tokens

    def _divide_gradients(self, divisor: float) -> None:
        """The mean weight is known only after the last micro-batch; the loss is linear in it, so that is early enough."""
        gradients = [p.grad for p in self.policy.model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, divisor)
