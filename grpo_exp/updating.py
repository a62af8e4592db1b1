"""From the gradient of a step to new weights, or to a step that is skipped and says why."""

import math
from typing import TYPE_CHECKING

import torch

from .batch import StepBatch
from .errors import RunFailed
from .metrics import Passes
from .optim import StepOutcome, learning_rate
from .overflow import find_overflow

if TYPE_CHECKING:
    from .trainer import AsyncGRPOTrainer


def update(trainer: "AsyncGRPOTrainer", batch: StepBatch, passes: Passes) -> StepOutcome:
    """Unscale, clip, step; or skip. Ends the run after too many skips in a row."""
    progress, lr = (
        trainer.progress,
        learning_rate(trainer.config.optim, trainer.progress.update, trainer.bounds.horizon),
    )
    lr *= trainer.alarm.lr_factor
    if not batch.trainable:
        trainer.optimizer.zero_grad()
        outcome = StepOutcome(False, math.nan, 0.0, lr)
        trainer.event("skipped_step", {"reason": "no group has two valid rewards"})
    else:
        outcome = trainer.optimizer.step(lr)
    trainer.keeper.trace(progress.step, passes, outcome)
    if outcome.applied:
        progress.update += 1
        progress.skipped_in_a_row = 0
        trainer.read_back.after_first_step(trainer.source.pool.observed)
        trainer.optimizer.zero_grad()
        check_weights(trainer)
        trainer.recorder.warn_about_lost_updates(progress.step, outcome)
        return outcome
    progress.skipped_in_a_row += 1
    if batch.trainable:
        progress.skipped_total += 1
        where = find_overflow(trainer.passes, trainer.optimizer, batch.micro_batches, passes.scale)
        trainer.event("skipped_step", {"reason": "non-finite gradient", "scale": passes.scale, **where})
    trainer.optimizer.zero_grad()
    if progress.skipped_in_a_row >= trainer.config.trainer.max_skipped_steps:
        raise RunFailed(
            f"{progress.skipped_in_a_row} steps in a row were skipped (trainer.max_skipped_steps); events.jsonl says why"
        )
    return outcome


def check_weights(trainer: "AsyncGRPOTrainer") -> None:
    """Weights that are not finite never reach a generator."""
    norms = torch._foreach_norm([parameter.detach() for _, parameter in trainer.optimizer.named])
    if bool(torch.stack(norms).sum().isfinite()):
        return  # the usual case: one look at all of them
    bad = [name for name, p in trainer.optimizer.named if not bool(torch.isfinite(p).all())]
    if bad:
        raise RunFailed(f"step {trainer.progress.step} left non-finite weights in {', '.join(bad[:5])}")
