"""When a run is saved, and what goes into a checkpoint beside weights and moments."""

from typing import TYPE_CHECKING

from . import checkpoint

if TYPE_CHECKING:
    from .trainer import AsyncGRPOTrainer


def save_if_due(trainer: "AsyncGRPOTrainer") -> None:
    every, control = trainer.config.trainer.save_every, trainer.callbacks.control
    is_due = (every and trainer.progress.step % every == 0) or control.should_save
    if is_due and trainer.alarm.stop_reason is None:
        control.should_save = False
        save(trainer)


def save(trainer: "AsyncGRPOTrainer") -> None:
    """Write a checkpoint of the step that was just done, unless there is one."""
    if trainer.saved_at == trainer.progress.step:
        return  # groups that were started since will be started again
    trainer.saved_at = trainer.progress.step
    trainer.progress.loss_scale = trainer.optimizer.loss_scale.state_dict()
    reference = trainer.passes.reference
    trainer.progress.reference = None if reference is None else reference.checksum
    trainer.progress.base = trainer.base
    trainer.progress.alarm = trainer.alarm.state_dict()
    trainer.progress.cursor = trainer.source.stream.cursor
    trainer.progress.open_serials = sorted({*trainer.source.buffer.serials(), *trainer.source.stream.again})
    trainer.progress.groups = vars(trainer.source.buffer.counts).copy()
    path = checkpoint.save(
        trainer.folder.checkpoints,
        trainer.progress,
        trainer.model,
        trainer.tensors(),
        trainer.processing_class,
        trainer.config.trainer.keep_checkpoints,
        trainer.alarm.reach,
    )
    trainer.folder.event(trainer.progress.step, "checkpoint", {"path": path.name})
    trainer.callbacks.call("on_save")
