"""The asynchronous GRPO trainer.

    RolloutSource.next_batch ─▶ build_batch ─▶ PassRunner.run ─▶ Optimizer.step ─▶ publish(version + 1)
            ▲   groups, each with the versions that sampled it                            │
            └──────────────────────────── generator workers ◀─────────────────────────────┘

The policy version is the number of steps that changed the weights, by one optimizer update or several. A skipped step (a
non-finite gradient, or no valid reward) advances neither version nor learning rate, and nothing is published for it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .alarm import Alarm
from .allocator import fewer_collections, keep_freed_memory
from .args import AsyncGRPOConfig
from .assets import locate
from .batch import MicroBatch, StepBatch, build_batch
from .bounds import Bounds
from .callbacks import Callbacks
from .checkpoint import Progress, Tensors
from .checks import check
from .config.schema import Proximal, Strategy, TaskName
from .decompose import Decomposer
from .device import compute_device
from .distributed.ranks import Ranks
from .distributed.start import build_optimizer, build_passes, wrap
from .distributed.team import Team
from .errors import ConfigError, Interrupted
from .evaluating import evaluate_if_due
from .folder import RunFolder, State
from .keep import Keeper
from .lifecycle import close, describe, finish, preempt, start
from .lora import is_adapted
from .observe import ReadBack
from .optim import Optimizer
from .overflow import find_overflow
from .policy import Policy, load_trained, read_checkpoint_dtype
from .precision import resolve
from .record import Clock, Recorder
from .rollout.process import Spawned
from .rollout.source import RolloutSource
from .rollout.types import Group
from .saving import save_if_due
from .sync.shm import checksum, unique_parameters
from .tasks import Accuracy, RewardSpec, Row, Task, import_path
from .tokens import Codec, load_tokenizer
from .track import NullTracker, Tracker
from .updating import train_on
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
        ranks: those of this run, where a launcher started several; this one leads them.
        should_stop: asked while the trainer waits and after each step; True ends the run as preempted.

    Raises:
        ConfigError: (a ValueError) for settings that cannot be used, before any weights are loaded.
    """

    source: RolloutSource  # as soon as training starts
    keeper: Keeper

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
        ranks: Ranks | None = None,
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
        self.precision = resolve(
            config.precision,
            own_dtype,
            self.device,
            kwargs,
            config.optim.eps,
            config.distributed.strategy,
            config.lora.rank > 0,
        )
        torch.set_num_threads(config.trainer.num_threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.model = load_trained(config, self.precision, self.device)
        self.base = checksum(unique_parameters(self.model).values()) if is_adapted(self.model) else None
        self.policy = Policy(self.model, self.precision, config.trainer.logprob_chunk)
        self.processing_class = processing_class or load_tokenizer(
            locate(config.model.tokenizer or source), config.model.trust_remote_code, kwargs.get("revision")
        )
        self.codec = Codec(self.processing_class, self._max_prompt_tokens())
        self._describes = folder is None
        self.folder = folder or RunFolder(Path(self.args.output_dir))
        self._assemble(ranks)
        self.updater: Optimizer | Team = self.team or self.optimizer
        self.bounds = Bounds(config.trainer, len(self.task.train))
        self.should_stop, self.workers = should_stop, workers
        self.callbacks = Callbacks(callbacks or (), self.args)
        self.recorder = Recorder(self.folder, tracker or NullTracker(), self.callbacks, self.model, config.algo)
        self.decomposer = Decomposer(
            config, self.policy, lambda: self.recorder.wall_s, self.event, self.read_back.paused
        )
        self.older = OlderWeights(self.policy, config.rollout.temperature, config.rollout.staleness_bound)
        self.starts_tracker = tracker is None
        self.alarm = Alarm(config.alarm)
        self.progress = Progress()
        self.stop_reason: str | None = None
        self.saved_at: int | None = None

    def train(self, resume_from_checkpoint: bool | str | Path = False) -> State:
        """Run until a bound is met and return ``done``, or ``preempted`` if ``should_stop`` said so.

        Args:
            resume_from_checkpoint: a checkpoint's path, or True for the latest one of the run folder.

        Raises:
            RunFailed, ConfigError, …: whatever ended the run; status.json of the run folder has reason and traceback.
        """
        self.folder.lock()
        if self._describes:
            describe(self)
        state, error = State.failed, None
        try:
            start(self, resume_from_checkpoint)
            with fewer_collections():
                while not self.ended() and self.step():
                    pass
            state = finish(self)
        except Interrupted:
            state = preempt(self)
        except BaseException as caught:  # the one place that records why a run ended, whatever it was
            error = caught
            raise
        finally:
            close(self, state, error)
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
        passes, outcome = train_on(self, batch)
        clock.lap("train")
        if outcome.applied:
            self.publish()
        clock.lap("sync")
        self.recorder.details(self.progress.step, batch, passes, self.config.tracker.num_samples, self.codec.decode)
        row = self.recorder.row(self.progress, batch, passes, outcome, clock, self.source)
        row |= self.decomposer.measure(fresh, passes, self.progress)
        self._look_for_collapse(row)
        evaluate_if_due(self, row)
        self.record(row)
        save_if_due(self)
        return True

    def _max_prompt_tokens(self) -> int | None:
        """What the model's context leaves for a prompt; None where the model does not say how long it is."""
        context = getattr(self.model.config, "max_position_embeddings", None)
        length = self.config.task.max_completion_tokens
        if context is None or length < context:
            return None if context is None else context - length
        raise ConfigError("task.max_completion_tokens", length, f"less than the model's context of {context} tokens")

    # -- the parts of a step

    def _assemble(self, ranks: Ranks | None) -> None:
        """What computes, on this rank or on several: the others build the same, and wait for orders from then on."""
        config = self.config
        if ranks is not None and config.distributed.strategy is not Strategy.single:
            ranks.broadcast(("begin", (config,)))
        wrapped = wrap(config, self.policy, ranks)
        self.optimizer = build_optimizer(config, self.policy, ranks)
        self.read_back = ReadBack(self.precision, self.policy, self.optimizer, self.folder)
        self.passes = build_passes(config, self.policy, wrapped, self.read_back.paused)
        self.read_back.with_reference(self.passes.reference)
        self.team: Team | None = None
        if ranks is not None and wrapped is not None:
            self.team = Team(config.distributed.strategy, ranks, self.passes, self.optimizer, wrapped)
            self.passes.across = self.team
            self.read_back.with_team(self.team)

    def cut(self, groups: list[Group]) -> StepBatch:
        """The micro-batches of some groups under the version that is trained."""
        config = self.config
        return build_batch(
            groups,
            config.algo,
            config.task.max_completion_tokens,
            config.trainer.tokens_per_micro_batch,
            self.device,
            share_prompts=config.trainer.share_prompts and self.policy.shares_prompts,
            version=self.progress.update,
        )

    def prepared(self, batch: StepBatch) -> StepBatch:
        """With all that its losses compare with; it is the same for every update of the step."""
        if self.config.correction.proximal is Proximal.beta_removal:
            batch = self.older.score(batch, self.progress.update)
        return self.passes.prepare(batch)

    def _build(self, groups: list[Group]) -> StepBatch:
        self.progress.step += 1
        batch = self.cut(groups)
        stream, serials = self.source.stream, [group.serial for group in groups]
        num_dropped = int(batch.advantages.dropped.sum())
        self.source.buffer.counts.trained += len(groups) - num_dropped
        self.source.buffer.counts.dropped_failed += num_dropped
        rows = [stream.index(serial) for serial in serials]
        self.folder.trained(self.progress.step, serials, rows)
        self.keeper.groups(self.progress.step, self.progress.update, groups, rows)
        return batch

    def publish(self) -> None:
        """Send the workers the weights that are trained now."""
        if self.team is not None:
            self.team.give_weights()
        self.source.publish(self.progress.update, self.model)

    def tensors(self) -> Tensors:
        """What a checkpoint has of weights and moments."""
        return Tensors.of(self.model, self.optimizer) if self.team is None else self.team.tensors()

    def find_overflow(self, micro_batches: list[MicroBatch], scale: float) -> dict[str, str]:
        """Where a step that was skipped first had a non-finite number."""
        if self.team is not None:
            return self.team.find_overflow(micro_batches, scale)
        return find_overflow(self.passes, self.optimizer.nonfinite_grads(), micro_batches, scale)

    def _look_for_collapse(self, row: dict[str, Any]) -> None:
        for alarm in self.alarm.check(row):
            self.event("alarm", alarm)
            self.callbacks.call("on_alarm", alarm=alarm)

    def record(self, row: dict[str, Any]) -> None:
        self.recorder.record(row, self.progress, self.source.buffer.counts)

    def ended(self) -> bool:
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

    def event(self, event: str, body: dict[str, Any]) -> None:
        self.recorder.event(self.progress.step, event, body)
