"""The rows of a run: what a step's metrics are made of, and everyone who is told of them."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .batch import StepBatch
from .callbacks import Callbacks
from .checkpoint import Progress
from .config.schema import AlgoConfig
from .details import details_of
from .folder import RunFolder
from .metrics import Passes, peak_memory_bytes, step_metrics
from .optim import StepOutcome
from .precision import dtype_name
from .rollout.buffer import GroupCounts
from .rollout.source import RolloutSource
from .track import Tracker

FEW_CHANGED = 0.05
"""Below this share of changed parameters, updates are being lost to rounding rather than small."""


class Clock:
    """Wall time of the parts of a step, in seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now

    @property
    def total_s(self) -> float:
        """Up to the last lap."""
        return self._last - self._start


class Recorder:
    """Writes rows to the run folder and shows them to tracker and callbacks."""

    def __init__(
        self, folder: RunFolder, tracker: Tracker, callbacks: Callbacks, model: nn.Module, algo: AlgoConfig
    ) -> None:
        self.folder, self.tracker, self.callbacks, self.model, self.algo = folder, tracker, callbacks, model, algo
        self.params = next(model.parameters())
        self._warned = False

    def begin(self, progress: Progress, source: RolloutSource) -> None:
        """Start the clock of ``wall_s``, which goes on where a checkpoint was."""
        pool, self._replaced_before = source.pool, source.buffer.counts.replaced
        self._wall_start = time.perf_counter() - progress.wall_s
        self._busy_before, self._tokens_before = pool.busy_s, pool.num_tokens

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._wall_start

    def details(
        self,
        step: int,
        batch: StepBatch,
        passes: Passes,
        num_samples: int,
        decode: Callable[[Sequence[Any], Any], list[Any]],
    ) -> None:
        """Show the tracker, where it is due, what does not fit in a row."""
        every = getattr(self.tracker, "details_every", 0)
        if every and step % every == 0:
            self.tracker.details(step, details_of(step, batch, passes, num_samples, decode))

    def row(
        self,
        progress: Progress,
        batch: StepBatch,
        passes: Passes,
        outcome: StepOutcome,
        clock: Clock,
        source: RolloutSource,
    ) -> dict[str, Any]:
        """Every metric of one step but the evaluation; advances the totals in ``progress``."""
        pool, counts = source.pool, source.buffer.counts
        progress.samples += len(batch.rollouts)
        progress.tokens += batch.num_tokens
        progress.wall_s = self.wall_s
        busy_s, num_tokens = pool.busy_s - self._busy_before, pool.num_tokens - self._tokens_before
        self._busy_before, self._tokens_before = pool.busy_s, pool.num_tokens
        replaced, self._replaced_before = counts.replaced - self._replaced_before, counts.replaced
        return {
            "step": progress.step,
            "time": time.time(),
            "wall_s": progress.wall_s,
            "samples": progress.samples,
            "tokens": progress.tokens,
            **step_metrics(batch, passes, self.algo),
            "group/replaced": replaced,
            "grad/norm": outcome.grad_norm,
            "params/changed_frac": outcome.changed_frac,
            "lr": outcome.lr,
            "fp16/scale": passes.scale,
            "fp16/skipped_total": progress.skipped_total,
            **{f"perf/{name}_s": seconds for name, seconds in clock.laps.items()},
            "perf/step_s": clock.total_s,
            "perf/rollout_tok_s": num_tokens / busy_s if busy_s > 0 else None,
            "perf/trained_tok_s": batch.num_tokens / clock.total_s,
            "memory/peak_bytes": peak_memory_bytes(self.params.device),
        }

    def record(self, row: dict[str, Any], progress: Progress, counts: GroupCounts) -> None:
        self.folder.metrics(row)
        self.folder.progress(step=progress.step, updates=progress.update, groups=vars(counts).copy())
        self.tracker.log(progress.step, {key: value for key, value in row.items() if key != "step"})
        self.callbacks.state.global_step = progress.step
        self.callbacks.logged(row)
        self.callbacks.call("on_log", logs=row, model=self.model)
        if progress.step:
            self.callbacks.call("on_step_end", metrics=row, model=self.model)

    def amend(self, step: int, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Add an evaluation to a step that is recorded already, and return its row."""
        row = self.folder.amend({"step": step, **evaluation})
        self.tracker.log(step, evaluation)
        return row

    def event(self, step: int, event: str, body: dict[str, Any]) -> None:
        self.folder.event(step, event, body)

    def warn_about_lost_updates(self, step: int, outcome: StepOutcome) -> None:
        """16-bit weights swallow small updates: said once, when next to nothing of an applied step arrived."""
        is_16_bit = torch.finfo(self.params.dtype).bits == 16
        if self._warned or not outcome.applied or not is_16_bit or outcome.changed_frac >= FEW_CHANGED:
            return
        self._warned = True
        text = (
            f"only {outcome.changed_frac:.2%} of the parameters changed: updates of lr={outcome.lr:g} round to nothing in"
            f" {dtype_name(self.params.dtype)} weights (precision.params=fp32 keeps them)"
        )
        self.event(step, "warning", {"message": text})
