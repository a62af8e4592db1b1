"""One run, from its folder: ``python -m grpo_exp.run RUN``. The frozen config.yaml is all it starts from.

Workers are started first, since their imports take seconds, then torch is imported here. How the run ends is in status.json
and in the exit code: 0 done, 1 failed, 2 a setting that cannot be used, 128 + signal where one stopped it.
"""

import argparse
import os
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import yaml

from . import assets
from .config.compose import to_typed
from .config.schema import Config
from .distributed.follow import follow
from .distributed.launched import launch_problems, launched
from .errors import ConfigError, ConfigErrors, RunFailed
from .folder import RunFolder, State, read_status
from .progress import ConsoleProgress
from .rollout.process import Spawned, die_with_parent, spawn_workers
from .tasks import build as build_task
from .track import Tracker, start_tracker

if TYPE_CHECKING:
    from .distributed.ranks import Ranks
    from .trainer import AsyncGRPOTrainer


IN_USE = 75
"""Exit code where another process is running in the folder: nothing is wrong with the run."""


@dataclass
class StopSignal:
    """The first SIGTERM, SIGINT, SIGUSR1 or SIGUSR2 asks the run to stop at the next step boundary; a second one ends it.

    Before training has begun there is nothing to be saved, and the first one ends it too.
    """

    number: int | None = None
    training: bool = False

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._received)

    def _received(self, number: int, frame: FrameType | None) -> None:
        first, self.number = self.number is None, self.number or number
        if not (first and self.training):
            raise KeyboardInterrupt(signal.Signals(number).name)

    def __call__(self) -> bool:
        return self.number is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.number or signal.SIGINT).name

    @property
    def exit_code(self) -> int:
        return 128 + (self.number or signal.SIGINT)


def execute(path: Path, resume: bool, console: bool = True) -> int:
    """Run a prepared run folder in this process and return the exit code."""
    stop = StopSignal()
    try:
        folder = RunFolder(path)
        folder.lock()
    except ValueError as error:  # a status.json that is none
        print(f"error: {error}: remove that file to run the folder again", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return IN_USE
    except OSError as error:
        print(f"error: {path} cannot be written to: {error.strerror}", file=sys.stderr)
        return 2
    if (read_status(path) or {}).get("state") == "done":  # by another process, since it was decided to run this
        print(f"done already: {path}")
        folder.close()
        return 0
    stop.install()
    spawned, tracker, ranks, progress = None, None, None, ConsoleProgress(path) if console else None
    code = 1
    try:
        config = to_typed(yaml.safe_load((path / "config.yaml").read_text()))
        if problems := launch_problems(config):
            raise ConfigErrors(problems)
        set_environment(config)
        add_start_folder(folder)
        _say_source(config, folder)
        if resume and folder.status.step and not folder.list_checkpoints():
            print(
                f"no checkpoint is left in {folder.checkpoints}: the run starts again from step 0"
                f" (it had reached {folder.status.step})",
                file=sys.stderr,
            )
        spawned = spawn_workers(config.rollout, folder.logs)
        ranks = join()
        tracker = start_tracker(config.tracker, folder)
        trainer = build_trainer(config, folder, spawned, tracker, stop, [progress] if progress else [], ranks)
        stop.training = True
        state = trainer.train(resume_from_checkpoint=resume)
        code = 0 if state is State.done else stop.exit_code
        if state is State.preempted:
            _record(folder, state, code, stop.name)
            print(
                f"stopped by {stop.name} after step {folder.status.step}: `grpo-exp resume {path}` goes on",
                file=sys.stderr,
            )
    except ConfigError as error:
        code = 2
        _record(folder, State.failed, code, _named(error), error)
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
    except KeyboardInterrupt:
        code = stop.exit_code
        _record(folder, State.preempted, code, f"{stop.name}, at once")
        print(f"stopped by {stop.name} at once: `grpo-exp resume {path}` goes on", file=sys.stderr)
    except Exception as error:
        print(f"error: {first_line(error)}", file=sys.stderr)
        if _record(folder, State.failed, code, _named(error), error):
            print(f"  {path / 'status.json'} has the traceback", file=sys.stderr)
    finally:
        stop.training = True  # what follows has to be done, and takes no time
        if progress is not None:
            progress.close()
        if ranks is not None:
            ranks.end(code)
        if spawned is not None:
            spawned.close()
        if tracker is not None:
            tracker.finish(code)
        folder.close()
    return code


def _say_source(config: Config, folder: RunFolder) -> None:
    """Which weights a name stands for that may stand for several, on the console or in the log, and in the manifest."""
    source = assets.source(config.model.name_or_path)
    folder.update_manifest(model={"source": source})
    if source != assets.AS_NAMED:
        print(f"model: {source}", file=sys.stderr)


def set_environment(config: Config) -> None:
    """What has to be set before torch is imported."""
    threads = str(config.trainer.num_threads)
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("MKL_NUM_THREADS", threads)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def add_start_folder(folder: RunFolder) -> None:
    """Modules of reward functions may lie where the command was given, wherever the run is resumed; installed ones win."""
    start = folder.manifest().get("run", {}).get("folder")
    if start is not None and start not in sys.path:
        sys.path.append(start)


def build_trainer(
    config: Config,
    folder: RunFolder,
    spawned: Spawned,
    tracker: Tracker,
    stop: StopSignal,
    callbacks: list[Any],
    ranks: "Ranks | None",
) -> "AsyncGRPOTrainer":
    """The two objects of the library, from a configuration."""
    from transformers.utils import logging as transformers_logging

    from .args import AsyncGRPOConfig
    from .trainer import AsyncGRPOTrainer

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    task = build_task(config.task)
    return AsyncGRPOTrainer(
        model=config.model.name_or_path,
        reward_funcs=task.reward_funcs,
        args=AsyncGRPOConfig.from_config(config, str(folder.path)),
        train_dataset=task.train,
        eval_dataset=task.eval,
        callbacks=callbacks,
        accuracy=task.accuracy,
        tracker=tracker,
        workers=spawned,
        should_stop=stop,
        folder=folder,
        ranks=ranks,
    )


def join() -> "Ranks | None":
    """Meet the other ranks, where a launcher started some."""
    found = launched()
    if not found.by_launcher:
        return None
    from .distributed.ranks import Ranks

    return Ranks(found)


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _record(folder: RunFolder, state: State, code: int, reason: str, error: BaseException | None = None) -> bool:
    """Write down how the run ended, also what ended before the trainer could do so; False if the disk does not let us."""
    try:
        folder.end(state, code, reason, error)
    except OSError as failure:
        if error is not None:
            traceback.print_exception(error)
        print(f"error: {folder.path / 'status.json'} could not be written: {failure.strerror}", file=sys.stderr)
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_exp.run", description="Run a prepared run folder.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument("--tied", type=int, metavar="PID", help="stop when the parent process, which has this id, ends")
    arguments = parser.parse_args(argv)
    if arguments.tied:
        die_with_parent(signal.SIGTERM)
        if os.getppid() != arguments.tied:  # it ended before that took effect
            return 128 + signal.SIGTERM
    warnings.filterwarnings("default", module="grpo_exp")
    if launched().rank > 0:
        return follow()
    return execute(arguments.run.resolve(), arguments.resume, console=False)


if __name__ == "__main__":
    sys.exit(main())
