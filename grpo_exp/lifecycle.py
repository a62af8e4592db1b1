"""What comes before the first step of a run and after its last: folder, checkpoint, workers, the checks between them."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import checkpoint
from .config.freeze import freeze
from .errors import Interrupted, RunFailed
from .evaluating import evaluate_late, owes_evaluation
from .first_sync import check_first_sync
from .folder import State
from .keep import Keeper
from .manifest import about_this_machine
from .precision import mix_warning
from .rollout.start import start_source
from .saving import save
from .track import start_tracker

if TYPE_CHECKING:
    from .trainer import AsyncGRPOTrainer


def describe(trainer: "AsyncGRPOTrainer") -> None:
    """What the command line does for a run before it starts: a folder that says what it is, and the tracker."""
    named = {"precision": trainer.args.precision} if isinstance(trainer.args.precision, str) else {}
    trainer.folder.describe(freeze(trainer.config), {}, named, [], about_this_machine())
    if trainer.starts_tracker:
        trainer.recorder.tracker = start_tracker(trainer.config.tracker, trainer.folder)


def start(trainer: "AsyncGRPOTrainer", resume: bool | str | Path) -> None:
    """Put back what a checkpoint has, start the workers, and check that what is in effect is what was asked for."""
    torch.set_float32_matmul_precision(trainer.precision.matmul)
    resumed = restore(trainer, resume)
    trainer.folder.begin(trainer.bounds.horizon, trainer.progress.step if resumed else None, trainer.progress.update)
    trainer.read_back.write()
    mixed = mix_warning(trainer.precision)
    if mixed is not None and not resumed:
        trainer.event("warning", {"message": mixed})
    trainer.saved_at = trainer.progress.step
    trainer.keeper = Keeper(
        trainer.config, trainer.precision, trainer.folder, trainer.optimizer, trainer.codec.vocabulary(),
        trainer.progress.step if resumed else None,
    )  # fmt: skip
    trainer.source = start_source(
        trainer.config, trainer.precision, trainer.task, trainer.codec, trainer.workers, trainer.folder.logs,
        str(trainer.device), trainer.event, trainer.should_stop,
    )  # fmt: skip
    if resumed:
        trainer.source.resume(trainer.progress.cursor, trainer.progress.open_serials, trainer.progress.groups)
        trainer.folder.event(trainer.progress.step, "resume", {"from": resumed.name})
    trainer.read_back.at_startup(trainer.source.pool.observed)
    trainer.publish()
    trainer.source.pool.wait_synced()
    if trainer.should_stop():
        raise Interrupted
    trainer.recorder.begin(trainer.progress, trainer.source)
    trainer.callbacks.state.max_steps = trainer.bounds.horizon
    trainer.callbacks.call("on_train_begin", model=trainer.model)
    try:
        first_sync = check_first_sync(
            trainer.source,
            trainer.policy,
            trainer.config.rollout.temperature,
            trainer.policy.logprobs if trainer.team is None else trainer.team.logprobs,
        )
    except RunFailed:
        trainer.read_back.at_first_sync(trainer.source.pool.observed)  # says which site it is, if it is one
        raise
    trainer.folder.update_manifest(generator=trainer.source.pool.about | {"first_sync": first_sync})
    if trainer.task.eval and not resumed:
        trainer.record({"step": 0, "time": time.time()} | trainer.source.evaluate(0).metrics())
    elif trainer.task.eval and owes_evaluation(trainer):
        evaluate_late(trainer)


def restore(trainer: "AsyncGRPOTrainer", resume: bool | str | Path) -> Path | None:
    """The checkpoint that was loaded; None where the run begins at step 0."""
    if resume is False:
        return None
    found = checkpoint.list_checkpoints(trainer.folder.checkpoints) if resume is True else [Path(resume)]
    if not found:
        return None
    tensors = checkpoint.load(found[-1], trainer.model)
    trainer.progress = checkpoint.read_progress(found[-1])
    reference, name = trainer.passes.reference, trainer.config.model.name_or_path
    if reference is not None and reference.checksum != trainer.progress.reference:
        raise RunFailed(f"{name} is not the checkpoint that the run began with: it is the reference of algo.kl_coef")
    if trainer.base != trainer.progress.base:
        raise RunFailed(f"{name} is not the checkpoint that the run began with: its adapters are beside other weights")
    trainer.optimizer.loss_scale.load_state_dict(trainer.progress.loss_scale)
    if trainer.team is not None:
        trainer.team.put(tensors)
    else:
        tensors.put_into(trainer.model, trainer.optimizer)
    trainer.alarm.load_state_dict(trainer.progress.alarm)
    return found[-1]


def finish(trainer: "AsyncGRPOTrainer") -> State:
    """The last evaluation and checkpoint of a run that met a bound."""
    if trainer.progress.update == 0:
        raise RunFailed("the run ended without a single update; events.jsonl says why")
    if trainer.task.eval and trainer.progress.evaluated_at != trainer.progress.step:
        evaluate_late(trainer)
    good = trainer.alarm.good_until
    if good is None or checkpoint.last_until(trainer.folder.list_checkpoints(), good) is None:
        save(trainer)  # the weights after an alarm are worth keeping only where there are no others
    trainer.callbacks.call("on_train_end")
    return State.done


def preempt(trainer: "AsyncGRPOTrainer") -> State:
    """A run that was asked to stop is saved as it is."""
    trainer.stop_reason = None  # it may have come to its end and been stopped in the last evaluation
    save(trainer)
    return State.preempted


def close(trainer: "AsyncGRPOTrainer", state: State, error: BaseException | None) -> None:
    """End the workers, then write down how the run ended; the caller decides on the exit code."""
    source = getattr(trainer, "source", None)
    if source is not None:
        source.close()
        source.buffer.close(check=error is None)
        trainer.folder.status.groups = vars(source.buffer.counts).copy()
    elif trainer.workers is not None:
        trainer.workers.close()
    if getattr(trainer, "keeper", None) is not None:
        trainer.keeper.close()
    reason = trainer.stop_reason if error is None else f"{type(error).__name__}: {error}"
    code = {State.done: 0, State.failed: 1}.get(state, 143)
    trainer.folder.end(state, code, reason, error)
    if trainer.starts_tracker:
        trainer.recorder.tracker.finish(code)
    trainer.folder.close()
