"""The asynchronous GRPO trainer.

    RolloutSource.next_batch ─▶ build_batch ─▶ forward_backward ─▶ Optimizer.step ─▶ publish(version + 1)
            ▲   groups, each with the versions that sampled it                            │
            └──────────────────────────── generator workers ◀─────────────────────────────┘

The policy version is the number of applied optimizer steps. A skipped step (a non-finite gradient, or no valid reward)
advances neither version nor learning rate, and nothing is published for it.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import checkpoint
from .alarm import Alarm
from .allocator import keep_freed_memory
from .args import AsyncGRPOConfig
from .assets import locate
from .batch import StepBatch, build_batch
from .bounds import Bounds
from .callbacks import Callbacks
from .checkpoint import Progress
from .checks import check
from .config.freeze import freeze
from .config.schema import Proximal, TaskName
from .decompose import Decomposer
from .device import compute_device
from .errors import ConfigError, Interrupted, RunFailed
from .first_sync import check_first_sync
from .folder import RunFolder, State
from .keep import Keeper
from .manifest import about_this_machine
from .metrics import Passes
from .observe import ReadBack
from .optim import Optimizer, StepOutcome, learning_rate
from .overflow import find_overflow
from .passes import PassRunner
from .policy import Policy, load_policy, read_checkpoint_dtype
from .precision import mix_warning, resolve
from .record import Clock, Recorder
from .rollout.process import Spawned
from .rollout.start import start_source
from .tasks import Accuracy, RewardSpec, Row, Task, import_path
from .tokens import Codec, load_tokenizer
from .track import NullTracker, Tracker, start_tracker
from .weights import OlderWeights


class AsyncGRPOTrainer:
    """Trains a causal language model with GRPO while generator workers go on sampling.

    Args:
        model: name or path, for ``from_pretrained``.
        reward_funcs: one or several functions (or import paths) with TRL's signature
            ``f(prompts, completions, completion_ids, **columns) -> list``; several are summed.
        args: the settings; ``args.output_dir`` becomes the run folder.
        train_dataset: rows with a ``"prompt"`` (a string or chat messages); other keys are columns for the functions.
        eval_dataset: held-out rows for the evaluation in the loop.
        processing_class: the tokenizer; that of the model where it is None.
        callbacks: objects with any of the methods of ``transformers.TrainerCallback``.
        accuracy: a function with the signature of a reward function that returns bools, for ``eval/accuracy``.
        tracker: where else metrics are shown; started and finished by the caller.
        workers: generator workers that were started before torch was imported.
        folder: the run folder, if the caller holds it already; else ``args.output_dir`` is opened and locked.
        should_stop: asked while the trainer waits and after each step; True ends the run as preempted.

    Raises:
        ConfigError: (a ValueError) for settings that cannot be used, before any weights are loaded.
    """

    def __init__(
        self,
        model: str | Path,
        reward_funcs: RewardSpec | Sequence[RewardSpec],
        args: AsyncGRPOConfig | None = None,
        train_dataset: Sequence[Row] = (),
        eval_dataset: Sequence[Row] | None = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] | None = None,
        *,
        accuracy: Accuracy | None = None,
        tracker: Tracker | None = None,
        workers: Spawned | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        folder: RunFolder | None = None,
    ) -> None:
        self.args = args or AsyncGRPOConfig()
        self.config = config = self.args.to_config()
        if not isinstance(model, str | Path):
            raise ConfigError("model", repr(model), "the name or path of a model")
        config.model.name_or_path = str(model)
        check(config)
        if folder is None:
            config.task.name = TaskName.python  # a frozen configuration must not name data that were not used
        one = callable(reward_funcs) or isinstance(reward_funcs, str)
        funcs: list[RewardSpec] = [reward_funcs] if one else list(reward_funcs)  # type: ignore[list-item, arg-type]
        self.task = Task(config.task.name.name, list(train_dataset), list(eval_dataset or ()), funcs, accuracy)
        if not self.task.train:
            raise ConfigError("train_dataset", "[]", "one prompt or more")
        for name in [function for function in funcs if isinstance(function, str)]:
            if problem := import_path.problem(name):
                raise ConfigError("reward_funcs", name, import_path.ALLOWED, problem)
        self.device = compute_device(config)
        kwargs, source = config.model.init_kwargs, locate(config.model.name_or_path)
        own_dtype = read_checkpoint_dtype(source, kwargs, config.model.trust_remote_code)
        self.precision = resolve(config.precision, own_dtype, self.device, kwargs, config.optim.eps)
        torch.set_num_threads(config.trainer.num_threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.model = load_policy(source, kwargs, self.precision.params, config.model.trust_remote_code, self.device)
        self.policy = Policy(self.model, self.precision, config.trainer.logprob_chunk)
        self.optimizer = Optimizer(self.model, config.optim, self.precision)
        self.passes = PassRunner(self.policy, config.algo, config.correction, config.rollout.temperature)
        self.processing_class = processing_class or load_tokenizer(
            locate(config.model.tokenizer or source), config.model.trust_remote_code, kwargs.get("revision")
        )
        self.codec = Codec(self.processing_class, self._max_prompt_tokens())
        self._describes = folder is None
        self.folder = folder or RunFolder(Path(self.args.output_dir))
        self.read_back = ReadBack(self.precision, self.policy, self.optimizer, self.folder)
        self.bounds = Bounds(config.trainer, len(self.task.train))
        self.should_stop, self._workers = should_stop, workers
        self.callbacks = Callbacks(callbacks or (), self.args)
        self.recorder = Recorder(self.folder, tracker or NullTracker(), self.callbacks, self.model, config.algo)
        self.decomposer = Decomposer(
            config, self.policy, lambda: self.recorder.wall_s, self._event, self.read_back.paused
        )
        self.older = OlderWeights(self.policy, config.rollout.temperature, config.rollout.staleness_bound)
        self._starts_tracker = tracker is None
        self.alarm = Alarm(config.alarm)
        self.progress = Progress()
        self.stop_reason: str | None = None
        self._saved_at: int | None = None

    def train(self, resume_from_checkpoint: bool | str | Path = False) -> State:
        """Run until a bound is met and return ``done``, or ``preempted`` if ``should_stop`` said so.

        Args:
            resume_from_checkpoint: a checkpoint's path, or True for the latest one of the run folder.

        Raises:
            RunFailed, ConfigError, …: whatever ended the run; status.json of the run folder has reason and traceback.
        """
        self.folder.lock()
        if self._describes:
            self._describe()
        state, error = State.failed, None
        try:
            self._start(resume_from_checkpoint)
            while not self._ended() and self.step():
                pass
            state = self._finish()
        except Interrupted:
            state = self._preempt()
        except BaseException as caught:  # the one place that records why a run ended, whatever it was
            error = caught
            raise
        finally:
            self._close(state, error)
        return state

    def step(self) -> bool:
        """One optimizer step. False: the data are used up."""
        fresh = self.decomposer.sample(self.source, self.progress)
        clock = Clock()
        groups = self.source.next_batch(self.bounds.steps_left(self.progress.step))
        if groups is None:
            return False
        clock.lap("wait")
        batch = self._build(groups)
        with self.source.going_on():
            passes = self.passes.run(batch, self.optimizer.loss_scale.scale)
        outcome = self._update(batch, passes)
        clock.lap("train")
        self._publish(outcome)
        clock.lap("sync")
        row = self.recorder.row(self.progress, batch, passes, outcome, clock, self.source.pool)
        row |= self.decomposer.measure(fresh, passes, self.progress)
        self._look_for_collapse(row)
        self._evaluate_if_due(row)
        self._record(row)
        self._save_if_due()
        return True

    def _max_prompt_tokens(self) -> int | None:
        """What the model's context leaves for a prompt; None where the model does not say how long it is."""
        context = getattr(self.model.config, "max_position_embeddings", None)
        length = self.config.task.max_completion_tokens
        if context is None or length < context:
            return None if context is None else context - length
        raise ConfigError("task.max_completion_tokens", length, f"less than the model's context of {context} tokens")

    # -- the parts of a step

    def _build(self, groups: list[Any]) -> StepBatch:
        config = self.config
        self.progress.step += 1
        batch = build_batch(
            groups,
            config.algo,
            config.task.max_completion_tokens,
            config.trainer.tokens_per_micro_batch,
            self.device,
            share_prompts=config.trainer.share_prompts and self.policy.shares_prompts,
            version=self.progress.update,
        )
        if config.correction.proximal is Proximal.beta_removal:
            batch = self.older.score(batch, self.progress.update)
        stream, serials = self.source.stream, [group.serial for group in groups]
        num_dropped = int(batch.advantages.dropped.sum())
        self.source.buffer.counts.trained += len(groups) - num_dropped
        self.source.buffer.counts.dropped_failed += num_dropped
        rows = [stream.index(serial) for serial in serials]
        self.folder.trained(self.progress.step, serials, rows)
        self.keeper.groups(self.progress.step, self.progress.update, groups, rows)
        return batch

    def _update(self, batch: StepBatch, passes: Passes) -> StepOutcome:
        """Unscale, clip, step; or skip. Ends the run after too many skips in a row."""
        progress, lr = self.progress, learning_rate(self.config.optim, self.progress.update, self.bounds.horizon)
        lr *= self.alarm.lr_factor
        if not batch.trainable:
            self.optimizer.zero_grad()
            outcome = StepOutcome(False, math.nan, 0.0, lr)
            self._event("skipped_step", {"reason": "no group has two valid rewards"})
        else:
            outcome = self.optimizer.step(lr)
        self.keeper.trace(progress.step, passes, outcome)
        if outcome.applied:
            progress.update += 1
            progress.skipped_in_a_row = 0
            self.read_back.after_first_step(self.source.pool.observed)
            self.optimizer.zero_grad()
            self._check_weights()
            self.recorder.warn_about_lost_updates(progress.step, outcome)
            return outcome
        progress.skipped_in_a_row += 1
        if batch.trainable:
            progress.skipped_total += 1
            where = find_overflow(self.passes, self.optimizer, batch.micro_batches, passes.scale)
            self._event("skipped_step", {"reason": "non-finite gradient", "scale": passes.scale, **where})
        self.optimizer.zero_grad()
        if progress.skipped_in_a_row >= self.config.trainer.max_skipped_steps:
            raise RunFailed(
                f"{progress.skipped_in_a_row} steps in a row were skipped (trainer.max_skipped_steps); events.jsonl says why"
            )
        return outcome

    def _publish(self, outcome: StepOutcome) -> None:
        if outcome.applied:
            self.source.publish(self.progress.update, self.model)

    def _look_for_collapse(self, row: dict[str, Any]) -> None:
        for alarm in self.alarm.check(row):
            self._event("alarm", alarm)
            self.callbacks.call("on_alarm", alarm=alarm)

    def _evaluate_if_due(self, row: dict[str, Any]) -> None:
        every, control = self.config.trainer.eval_every, self.callbacks.control
        due = (every and self.progress.step % every == 0) or control.should_evaluate or self._ended()
        if self.task.eval and due:
            control.should_evaluate = False
            try:
                row |= self.source.evaluate(self.progress.update).metrics()
            except Interrupted:
                return  # the step is done and is kept; whoever resumes the run evaluates it
            self.progress.evaluated_at = self.progress.step
            self.callbacks.call("on_evaluate", metrics=row)

    def _owes_evaluation(self) -> bool:
        every, progress = self.config.trainer.eval_every, self.progress
        return bool(every) and progress.step % every == 0 and progress.evaluated_at != progress.step

    def _evaluate_late(self) -> None:
        """A step that is recorded already: the data ran out after it, or the run was stopped while it was evaluated."""
        evaluation = self.source.evaluate(self.progress.update).metrics()
        self.progress.evaluated_at = self.progress.step
        self._saved_at = None  # a checkpoint of this step does not know of it
        self.callbacks.call("on_evaluate", metrics=self.recorder.amend(self.progress.step, evaluation))

    def _record(self, row: dict[str, Any]) -> None:
        self.recorder.record(row, self.progress, self.source.buffer.counts)

    def _save_if_due(self) -> None:
        every, control = self.config.trainer.save_every, self.callbacks.control
        is_due = (every and self.progress.step % every == 0) or control.should_save
        if is_due and self.alarm.stop_reason is None:
            control.should_save = False
            self._save()

    def _ended(self) -> bool:
        """Whether the step that was just done is the last."""
        if self.stop_reason is None:
            if self.alarm.stop_reason is not None:
                self.stop_reason = self.alarm.stop_reason
            elif self.callbacks.control.should_training_stop:
                self.stop_reason = "a callback asked to stop"
            else:
                used_up = self.source.stream.exhausted and not self.source.buffer.num_held
                reason = self.bounds.reason_to_end(self.progress.step, self.recorder.wall_s, used_up)
                self.stop_reason = reason
        return self.stop_reason is not None

    def _check_weights(self) -> None:
        """Weights that are not finite never reach a generator."""
        norms = torch._foreach_norm([parameter.detach() for _, parameter in self.optimizer.named])
        if bool(torch.stack(norms).sum().isfinite()):
            return  # the usual case: one look at all of them
        bad = [name for name, p in self.optimizer.named if not bool(torch.isfinite(p).all())]
        if bad:
            raise RunFailed(f"step {self.progress.step} left non-finite weights in {', '.join(bad[:5])}")

    # -- start and end

    def _describe(self) -> None:
        """What the command line does for a run before it starts: a folder that says what it is, and the tracker."""
        named = {"precision": self.args.precision} if isinstance(self.args.precision, str) else {}
        self.folder.describe(freeze(self.config), {}, named, [], about_this_machine())
        if self._starts_tracker:
            self.recorder.tracker = start_tracker(self.config.tracker, self.folder)

    def _start(self, resume: bool | str | Path) -> None:
        torch.set_float32_matmul_precision(self.precision.matmul)
        resumed = self._restore(resume)
        self.folder.begin(self.bounds.horizon, self.progress.step if resumed else None, self.progress.update)
        self.read_back.write()
        mixed = mix_warning(self.precision)
        if mixed is not None and not resumed:
            self._event("warning", {"message": mixed})
        self._saved_at = self.progress.step
        self.keeper = Keeper(
            self.config, self.precision, self.folder, self.optimizer, self.codec.vocabulary(),
            self.progress.step if resumed else None,
        )  # fmt: skip
        self.source = start_source(
            self.config, self.precision, self.task, self.codec, self._workers, self.folder.logs,
            str(self.device), self._event, self.should_stop,
        )  # fmt: skip
        if resumed:
            self.source.resume(self.progress.cursor, self.progress.open_serials, self.progress.groups)
            self.folder.event(self.progress.step, "resume", {"from": resumed.name})
        self.read_back.at_startup(self.source.pool.observed)
        self.source.publish(self.progress.update, self.model)
        self.source.pool.wait_synced()
        if self.should_stop():
            raise Interrupted
        self.recorder.begin(self.progress, self.source.pool)
        self.callbacks.state.max_steps = self.bounds.horizon
        self.callbacks.call("on_train_begin", model=self.model)
        try:
            first_sync = check_first_sync(self.source, self.policy, self.config.rollout.temperature)
        except RunFailed:
            self.read_back.at_first_sync(self.source.pool.observed)  # says which site it is, if it is one
            raise
        self.folder.update_manifest(generator=self.source.pool.about | {"first_sync": first_sync})
        if self.task.eval and not resumed:
            self._record({"step": 0, "time": time.time()} | self.source.evaluate(0).metrics())
        elif self.task.eval and self._owes_evaluation():
            self._evaluate_late()

    def _restore(self, resume: bool | str | Path) -> Path | None:
        if resume is False:
            return None
        found = checkpoint.list_checkpoints(self.folder.checkpoints) if resume is True else [Path(resume)]
        if not found:
            return None
        checkpoint.load(found[-1], self.model, self.optimizer)
        self.progress = checkpoint.read_progress(found[-1])
        self.optimizer.loss_scale.load_state_dict(self.progress.loss_scale)
        self.alarm.load_state_dict(self.progress.alarm)
        return found[-1]

    def _save(self) -> None:
        if self._saved_at == self.progress.step:
            return  # groups that were started since will be started again
        self._saved_at = self.progress.step
        self.progress.loss_scale = self.optimizer.loss_scale.state_dict()
        self.progress.alarm = self.alarm.state_dict()
        self.progress.cursor = self.source.stream.cursor
        self.progress.open_serials = sorted({*self.source.buffer.serials(), *self.source.stream.again})
        self.progress.groups = vars(self.source.buffer.counts).copy()
        path = checkpoint.save(
            self.folder.checkpoints,
            self.progress,
            self.model,
            self.optimizer,
            self.processing_class,
            self.config.trainer.keep_checkpoints,
            self.alarm.reach,
        )
        self.folder.event(self.progress.step, "checkpoint", {"path": path.name})
        self.callbacks.call("on_save")

    def _finish(self) -> State:
        if self.progress.update == 0:
            raise RunFailed("the run ended without a single update; events.jsonl says why")
        if self.task.eval and self.progress.evaluated_at != self.progress.step:
            self._evaluate_late()
        good = self.alarm.good_until
        if good is None or checkpoint.last_until(self.folder.list_checkpoints(), good) is None:
            self._save()  # the weights after an alarm are worth keeping only where there are no others
        self.callbacks.call("on_train_end")
        return State.done

    def _preempt(self) -> State:
        self.stop_reason = None  # it may have come to its end and been stopped in the last evaluation
        self._save()
        return State.preempted

    def _close(self, state: State, error: BaseException | None) -> None:
        """End the workers, then write down how the run ended; the caller decides on the exit code."""
        source = getattr(self, "source", None)
        if source is not None:
            source.close()
            source.buffer.close(check=error is None)
            self.folder.status.groups = vars(source.buffer.counts).copy()
        elif self._workers is not None:
            self._workers.close()
        if getattr(self, "keeper", None) is not None:
            self.keeper.close()
        reason = self.stop_reason if error is None else f"{type(error).__name__}: {error}"
        code = {State.done: 0, State.failed: 1}.get(state, 143)
        self.folder.end(state, code, reason, error)
        if self._starts_tracker:
            self.recorder.tracker.finish(code)
        self.folder.close()

    def _event(self, event: str, body: dict[str, Any]) -> None:
        self.recorder.event(self.progress.step, event, body)
