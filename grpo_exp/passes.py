"""Forward and backward passes over the micro-batches of one step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from .algo.correction import Correction, correct
from .algo.penalty import reference_kl
from .algo.policy_loss import Tokens, policy_loss
from .batch import MicroBatch, StepBatch
from .config.schema import AlgoConfig, CorrectionConfig, Weight
from .metrics import Passes
from .policy import LogProbs, Policy
from .weights import Reference

Beside = Callable[[], AbstractContextManager[object]]
"""Entered around each backward pass, which is the part that leaves Python's lock to others; a forward pass does not."""


class Across(Protocol):
    """Several ranks, each of which makes the passes over some of the micro-batches."""

    def prepare(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]: ...

    def run(
        self, micro_batches: list[MicroBatch], scale: float, beside: Beside, mean_weight: float
    ) -> list[dict[str, Tensor]]: ...

    def divide(self, divisor: float) -> None: ...


class PassRunner:
    """Accumulates the gradient of a step, and keeps what the metrics need."""

    def __init__(
        self,
        policy: Policy,
        algo: AlgoConfig,
        correction: CorrectionConfig,
        temperature: float,
        reference: Reference | None = None,
    ) -> None:
        self.policy, self.algo, self.correction, self.temperature = policy, algo, correction, temperature
        self.reference = reference
        self.across: Across | None = None
        self.logprobs: LogProbs = policy.logprobs
        policy.entropy_gradient = algo.entropy_coef != 0
        # the mean weight is known after the last pass only, too late for what it does not divide
        self._needs_old = algo.num_updates > 1 or (correction.batch_norm and algo.penalises)

    def prepare(self, batch: StepBatch) -> StepBatch:
        """Before the first update of a step: log-probabilities that its losses compare with, where a pass has not got them."""
        if not self._needs_old and self.reference is None:
            return batch
        if self.across is not None:
            return replace(batch, micro_batches=self.across.prepare(batch.micro_batches))
        return replace(batch, micro_batches=[self.prepared(micro_batch) for micro_batch in batch.micro_batches])

    @torch.no_grad()
    def prepared(self, micro_batch: MicroBatch) -> MicroBatch:
        """A micro-batch with them."""
        old = self.logprobs(micro_batch.tokens, self.temperature)[0] if self._needs_old else None
        reference = None if self.reference is None else self.reference.logprobs(micro_batch.tokens)
        return replace(micro_batch, old=old, reference=reference)

    def run(self, batch: StepBatch, scale: float, beside: Beside = nullcontext) -> Passes:
        """Backward through every micro-batch; the loss is multiplied by ``scale`` for it, not in what is returned."""
        known = self._known_mean(batch)
        run = self.run_micro_batches if self.across is None else self.across.run
        seen = run(batch.micro_batches, scale, beside, known or 1.0)
        joined = {name: torch.cat([part[name] for part in seen]) for name in seen[0]}
        loss, kl_loss, entropy_loss = (float(joined.pop(name).sum()) for name in ("loss", "kl_loss", "entropy_loss"))
        names = ("proximal", "weight", "log_raw", "kept")
        correction = Correction(**{name: joined.pop(name) for name in names})
        if self.correction.batch_norm and known is None:
            mean = self._mean_weight(correction.weight, joined["sequence"], batch.included)
            self._divide_gradients(mean)
            loss /= mean
            correction = replace(correction, weight=correction.weight / mean)
        return Passes(
            loss=loss, kl_loss=kl_loss, entropy_loss=entropy_loss, scale=scale, correction=correction, **joined
        )

    def run_micro_batches(
        self, micro_batches: list[MicroBatch], scale: float, beside: Beside, mean_weight: float
    ) -> list[dict[str, Tensor]]:
        """All of them on this rank."""
        return [self.run_micro_batch(micro_batch, scale, beside, mean_weight) for micro_batch in micro_batches]

    def run_micro_batch(
        self,
        micro_batch: MicroBatch,
        scale: float,
        beside: Beside = nullcontext,
        mean_weight: float = 1.0,
        logprobs: LogProbs | None = None,
    ) -> dict[str, Tensor]:
        """Forward and backward: adds to the gradients; returns the losses, [1], and per-token tensors by name, [n].

        Args:
            logprobs: instead of the policy's, one with a wrapper's hooks around it.
        """
        with torch.set_grad_enabled(micro_batch.has_gradient):
            new, entropy = (logprobs or self.logprobs)(micro_batch.tokens, self.temperature)
        # with one pass per step the weights at its start are those of this very pass
        old = new.detach() if micro_batch.old is None else micro_batch.old
        correction = self._correct(micro_batch, old, mean_weight)
        found = policy_loss(
            Tokens(new, correction.proximal, micro_batch.mu, micro_batch.advantages, micro_batch.sequence), self.algo
        )
        loss = (found.per_token * correction.weight * micro_batch.weights).sum()
        kl = torch.full_like(old, torch.nan)
        terms = {"loss": loss, "kl_loss": torch.zeros_like(loss), "entropy_loss": torch.zeros_like(loss)}
        if micro_batch.reference is not None:
            kl = reference_kl(new, micro_batch.reference, self.algo.kl_estimator)
            terms["kl_loss"] = self.algo.kl_coef * (kl * micro_batch.weights).sum()
        if self.algo.entropy_coef:
            terms["entropy_loss"] = -self.algo.entropy_coef * (entropy * micro_batch.weights).sum()
        if micro_batch.has_gradient:
            with beside():
                (torch.stack(list(terms.values())).sum() * scale).backward()  # type: ignore[no-untyped-call]
        return {
            **{name: term.detach()[None] for name, term in terms.items()},
            "new": new.detach(),
            "old": old,
            "mu": micro_batch.mu,
            "ratio": found.ratio,
            "clipped": found.clipped,
            "entropy": entropy.detach(),
            "reference_kl": kl.detach(),
            "sequence": micro_batch.sequence,
            "position": micro_batch.position,
            "staleness": micro_batch.staleness,
            **vars(correction),
        }

    def _correct(self, micro_batch: MicroBatch, old: Tensor, mean_weight: float) -> Correction:
        found = correct(
            micro_batch.mu,
            old,
            micro_batch.same_weights,
            micro_batch.staleness,
            micro_batch.sequence,
            self.correction,
        )
        return found if mean_weight == 1.0 else replace(found, weight=found.weight / mean_weight)

    def _known_mean(self, batch: StepBatch) -> float | None:
        """The mean weight that ``batch_norm`` divides by, where log-probabilities are known before the passes."""
        if not self.correction.batch_norm or batch.micro_batches[0].old is None:
            return None
        weights = [self._correct(mb, mb.old, 1.0).weight for mb in batch.micro_batches if mb.old is not None]
        sequence = torch.cat([micro_batch.sequence for micro_batch in batch.micro_batches])
        return self._mean_weight(torch.cat(weights), sequence, batch.included)

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
        if self.across is not None:
            return self.across.divide(divisor)
        gradients = [p.grad for p in self.policy.model.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, divisor)
