"""When a run is evaluated on held-out prompts: after a step that asks for it, or later where that was not to be."""

from typing import TYPE_CHECKING, Any

from .errors import Interrupted

if TYPE_CHECKING:
    from .trainer import AsyncGRPOTrainer


def evaluate_if_due(trainer: "AsyncGRPOTrainer", row: dict[str, Any]) -> None:
    every, control = trainer.config.trainer.eval_every, trainer.callbacks.control
    due = (every and trainer.progress.step % every == 0) or control.should_evaluate or trainer.ended()
    if trainer.task.eval and due:
        control.should_evaluate = False
        try:
            row |= trainer.source.evaluate(trainer.progress.update).metrics()
        except Interrupted:
            return  # the step is done and is kept; whoever resumes the run evaluates it
        trainer.progress.evaluated_at = trainer.progress.step
        trainer.callbacks.call("on_evaluate", metrics=row)


def owes_evaluation(trainer: "AsyncGRPOTrainer") -> bool:
    every, progress = trainer.config.trainer.eval_every, trainer.progress
    return bool(every) and progress.step % every == 0 and progress.evaluated_at != progress.step


def evaluate_late(trainer: "AsyncGRPOTrainer") -> None:
    """A step that is recorded already: the data ran out after it, or the run was stopped while it was evaluated."""
    evaluation = trainer.source.evaluate(trainer.progress.update).metrics()
    trainer.progress.evaluated_at = trainer.progress.step
    trainer.saved_at = None  # a checkpoint of this step does not know of it
    trainer.callbacks.call("on_evaluate", metrics=trainer.recorder.amend(trainer.progress.step, evaluation))
