"""From the gradient of a step to new weights, or to a step that is skipped and says why."""

import math
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .algo.correction import Correction
from .batch import StepBatch
from .errors import RunFailed
from .metrics import Passes
from .optim import StepOutcome, learning_rate

if TYPE_CHECKING:
    from .trainer import AsyncGRPOTrainer


def train_on(trainer: "AsyncGRPOTrainer", batch: StepBatch) -> tuple[Passes, StepOutcome]:
    """Every update of a step: ``algo.epochs`` times one for each of ``algo.mini_batches`` parts, mostly just one.

    What ``new`` is compared with is fixed before the first of them.
    """
    algo, progress = trainer.config.algo, trainer.progress
    size = -(-len(batch.groups) // algo.mini_batches)
    parts = (
        [batch]
        if algo.mini_batches == 1
        else [trainer.cut(batch.groups[n : n + size]) for n in range(0, len(batch.groups), size)]
    )
    parts = [trainer.prepared(part) for part in parts]
    done: list[tuple[Passes, StepOutcome]] = []
    for part in parts * algo.epochs:
        passes = trainer.passes.run(part, trainer.optimizer.loss_scale.scale, beside=trainer.source.going_on)
        done.append((passes, update(trainer, part, passes)))
    passes, outcome = merged(done, [len(part.rollouts) for part in parts])
    progress.update += outcome.applied
    return passes, outcome


def merged(done: list[tuple[Passes, StepOutcome]], sizes: list[int]) -> tuple[Passes, StepOutcome]:
    """What the updates of a step saw and did, as one.

    Args:
        done: of each update, in order: the parts of the step, once for every epoch.
        sizes: sequences of each part.

    Returns:
        Losses, norms and shares are means over the updates; ratios, clips, entropies and KL are of all passes; everything
        else is of the first epoch, which has every token once.
    """
    if len(done) == 1:
        return done[0]
    every, outcomes = [passes for passes, _ in done], [outcome for _, outcome in done]
    first = every[: len(sizes)]
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    joined = {
        name: torch.cat([getattr(p, name) for p in first]) for name in ("new", "old", "mu", "position", "staleness")
    }
    joined |= {
        name: torch.cat([getattr(p, name) for p in every]) for name in ("ratio", "clipped", "entropy", "reference_kl")
    }
    passes = Passes(
        loss=_mean(passes.loss for passes in every),
        kl_loss=_mean(passes.kl_loss for passes in every),
        entropy_loss=_mean(passes.entropy_loss for passes in every),
        scale=every[-1].scale,
        sequence=torch.cat([passes.sequence + start for passes, start in zip(first, starts, strict=True)]),
        correction=Correction(
            **{name: torch.cat([getattr(p.correction, name) for p in first]) for name in vars(first[0].correction)}
        ),
        **joined,
    )
    outcome = StepOutcome(
        applied=any(outcome.applied for outcome in outcomes),
        grad_norm=_mean(outcome.grad_norm for outcome in outcomes),
        changed_frac=_mean(outcome.changed_frac for outcome in outcomes),
        lr=outcomes[-1].lr,
    )
    return passes, outcome


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def update(trainer: "AsyncGRPOTrainer", batch: StepBatch, passes: Passes) -> StepOutcome:
    """Unscale, clip, step; or skip. Ends the run after too many skips in a row."""
    progress, lr = (
        trainer.progress,
        learning_rate(trainer.config.optim, trainer.progress.update, trainer.bounds.horizon),
    )
    lr *= trainer.alarm.lr_factor
    if not batch.trainable:
        trainer.updater.zero_grad()
        outcome = StepOutcome(False, math.nan, 0.0, lr)
        trainer.event("skipped_step", {"reason": "no group has two valid rewards"})
    else:
        outcome = trainer.updater.step(lr)
    trainer.keeper.trace(progress.step, passes, outcome)
    if outcome.applied:
        progress.skipped_in_a_row = 0
        trainer.read_back.after_first_step(trainer.source.pool.observed)
        trainer.updater.zero_grad()
        check_weights(trainer)
        trainer.recorder.warn_about_lost_updates(progress.step, outcome)
        return outcome
    progress.skipped_in_a_row += 1
    if batch.trainable:
        progress.skipped_total += 1
        where = trainer.find_overflow(batch.micro_batches, passes.scale)
        trainer.event("skipped_step", {"reason": "non-finite gradient", "scale": passes.scale, **where})
    trainer.updater.zero_grad()
    if progress.skipped_in_a_row >= trainer.config.trainer.max_skipped_steps:
        raise RunFailed(
            f"{progress.skipped_in_a_row} steps in a row were skipped (trainer.max_skipped_steps); events.jsonl says why"
        )
    return outcome


def check_weights(trainer: "AsyncGRPOTrainer") -> None:
    """Weights that are not finite never reach a generator."""
    if bad := trainer.updater.nonfinite_weights():
        raise RunFailed(f"step {trainer.progress.step} left non-finite weights in {', '.join(bad[:5])}")
