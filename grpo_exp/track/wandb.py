"""Shows runs in wandb: one wandb run for each run folder, online or offline.

The x axis is our own metric ``step``. wandb also counts by itself, and drops every row whose count is lower than one it
has seen; a run that is resumed therefore goes on counting from ``RUN/wandb_step``. Steps that it does again, since the
checkpoint was older, are there once: as they were the first time. Only this module imports wandb, and only inside functions. Use it through
:func:`grpo_exp.track.guarded`, which adds the limits of time.
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_exp.config.schema import TrackerConfig
from grpo_exp.folder import list_checkpoints
from grpo_exp.track import wandb_options as options
from grpo_exp.track.base import Details, Sample, TrackedRun
from grpo_exp.track.summary import summary
from grpo_exp.track.wandb_files import KeptFiles

if TYPE_CHECKING:
    import psutil  # type: ignore[import-untyped]  # ships no types
    import wandb

AXES = ("step", "samples", "tokens", "wall_s")  # any of them can be the x axis of a panel
SERVICE = "wandb-core"  # the process that wandb starts to write and send what is logged
OF_THE_TRAINER = ("optimizer.safetensors", "trainer.json")  # in a checkpoint, for a resume alone
INIT_S = 20.0
KILL_S = 1.0
CHECKPOINT_S = 600.0  # more, where a checkpoint is to be uploaded
UPLOAD_S = 15.0  # at the end of an online run; below the limit of `guarded`, so that wandb can end by itself


class WandbTracker:
    """One run in wandb.

    Args:
        config: the ``tracker`` group.
        on_warning: is told when a run that should be online goes on offline.
        init_s: seconds to wait for the server at the start.
    """

    def __init__(self, config: TrackerConfig, on_warning: Callable[[str], None], init_s: float = INIT_S) -> None:
        self._config = config
        self.details_every = config.details_every
        self.artifact_s = CHECKPOINT_S if config.log_checkpoint else 0.0
        self._details: dict[str, object] = {}
        self._on_warning = on_warning
        self._init_s = init_s
        self._run: wandb.Run | None = None
        self._steps: _Steps | None = None
        self._pid = -1
        self._owns_service = False
        self._files: KeptFiles | None = None
        self._has_lost_files = False

    def start(self, run: TrackedRun) -> None:
        mode = options.choose_mode(self._config)
        if mode == "online" and not options.has_api_key():  # wandb would ask for one and wait for the answer
            self._on_warning("wandb: no API key found, the run is kept offline")
            mode = "offline"
        if mode == "disabled":
            return
        self._pid = os.getpid()
        self._owns_service = not _services()
        self._run = self._init_online(run) if mode == "online" else self._init(run, "offline")
        self._steps = _Steps(run.run_dir / "wandb_step", at_least=self._run.step)
        for axis in AXES:
            self._run.define_metric(axis)
        self._run.define_metric("*", step_metric="step")
        self._run_dir = run.run_dir
        self._files = KeptFiles(self._run, run.run_dir, options.has_secret(options.run_config(run)))
        self._keep()
        if not self._run.offline:
            logging.getLogger("grpo_exp.track").info("wandb: %s", self._run.url)

    def log(self, step: int, row: Mapping[str, float | None]) -> None:
        """Null values are left out: wandb has no point to draw for them.

        So are steps that an earlier attempt of the run has shown; what is added to one later, an evaluation, is not.
        """
        if self._run is None or self._steps is None or self._pid != os.getpid():
            return
        if "time" in row and self._steps.shown_before(step):
            return
        self._keep()
        known = {key: value for key, value in row.items() if value is not None}
        details, self._details = self._details, {}
        self._run.log({**known, **details, "step": step}, step=self._steps.next(step), commit=True)

    def _keep(self) -> None:
        """A folder that cannot be read or written costs the comparison its files, and the run nothing."""
        try:
            if self._files is not None:
                self._files.update()
        except (OSError, ValueError) as error:
            if not self._has_lost_files:
                self._on_warning(f"wandb: the run misses files that `compare --wandb` reads: {error}")
            self._has_lost_files = True

    def details(self, step: int, details: Details) -> None:
        """Kept for the row of the step: wandb has one row for each of its counts."""
        if self._run is None or self._pid != os.getpid():
            return
        import numpy as np
        import wandb

        rows = [list(vars(sample).values()) for sample in details.samples]
        columns: list[str | int] = [entry.name for entry in fields(Sample)]
        histogram = (np.array(details.counts), np.array(details.edges))
        self._details = {
            "completions": wandb.Table(columns=columns, data=rows),
            "log_ratio": wandb.Histogram(np_histogram=histogram),
        }

    def finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is None or self._pid != os.getpid():
            return
        if self._steps is not None:
            self._steps.close()
        try:
            self._keep()
            self._summarize(run)
            if exit_code == 0:
                self._log_checkpoint(run)
            run.finish(exit_code=exit_code)
        finally:
            if self._owns_service:  # only then is all on disk; else it would be at the exit of the interpreter
                _end_service()

    def _summarize(self, run: "wandb.Run") -> None:
        try:
            run.summary.update(summary(self._run_dir))
        except ConnectionError:  # the service is gone, as the end will say
            return
        except Exception as error:  # the end of the run must be told, whatever becomes of its overview
            self._on_warning(f"wandb: the run has no summary: {type(error).__name__}: {error}")

    def _log_checkpoint(self, run: "wandb.Run") -> None:
        checkpoints = list_checkpoints(self._run_dir / "checkpoints")
        if not self._config.log_checkpoint or not checkpoints:
            return
        try:
            run.log_artifact(_artifact(checkpoints[-1], f"checkpoint-{run.id}"))
        except Exception as error:  # as above
            self._on_warning(f"wandb: the checkpoint is not logged: {type(error).__name__}: {error}")

    def abandon(self) -> None:
        """Ends the service process, so that a call that waits for it fails instead of hanging.

        What was logged until about a second ago is in the run folder and can still be uploaded.
        """
        if self._pid == os.getpid():
            _kill_services()

    def _init_online(self, run: TrackedRun) -> "wandb.Run":
        try:
            return self._init(run, "online")
        except Exception as error:
            self._on_warning(f"wandb: cannot go online, the run is kept offline: {type(error).__name__}: {error}")
        if self._owns_service:
            _end_service()  # it holds on to the id of the run that failed
        return self._init(run, "offline")

    def _init(self, run: TrackedRun, mode: "options.Mode") -> "wandb.Run":
        import wandb

        config = options.run_config(run)
        if mode == "online" and wandb.run is None:
            wandb.setup(wandb.Settings(silent=True))  # else init prints where it found the key
        return wandb.init(
            mode=mode,
            dir=str(run.run_dir.resolve()),
            id=options.run_id(run.run_dir),
            resume="allow" if mode == "online" else None,  # offline, wandb ignores it with a warning
            reinit="create_new",  # never take over a run that the user's own code has open
            project=self._config.project,
            entity=self._config.entity,
            name=options.shorten(run.name, options.MAX_NAME),
            group=options.shorten(run.sweep, options.MAX_NAME) if run.sweep else None,
            tags=options.clean_tags([*self._config.tags, *run.tags]),
            config=config,
            settings=_settings(
                self._init_s, UPLOAD_S + self.artifact_s, keep_command_line=not options.has_secret(config)
            ),
        )


def _artifact(checkpoint: Path, name: str) -> "wandb.Artifact":
    """Weights, configuration and tokenizer: what loads by ``from_pretrained``."""
    import wandb

    artifact = wandb.Artifact(name, type="model", metadata={"step": checkpoint.name})
    for path in sorted(checkpoint.iterdir()):
        if path.name not in OF_THE_TRAINER:  # uploaded from where they are: wandb would copy them to the user's home
            artifact.add_file(str(path), policy="immutable", skip_cache=True)
    return artifact


class _Steps:
    """Counts for wandb: the step itself, raised by as much as it takes never to repeat or go back.

    The last count and the highest step are kept in a file, so that the count also rises from one attempt of a run to the
    next, and a step that is done again after a resume from an older checkpoint is known.
    """

    def __init__(self, path: Path, at_least: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        count, _, highest = os.pread(self._fd, 32, 0).strip().partition(b" ")
        self._free = max(at_least, int(count) + 1 if count.isdigit() else 0)
        self._before = self._highest = int(highest) if highest.isdigit() else -1
        self._raise_by = 0

    def shown_before(self, step: int) -> bool:
        """By an earlier attempt."""
        return step <= self._before

    def next(self, step: int) -> int:
        self._raise_by = max(self._raise_by, self._free - step)
        count = step + self._raise_by
        self._free, self._highest = count + 1, max(self._highest, step)
        os.pwrite(self._fd, b"%012d %012d\n" % (count, self._highest), 0)
        return count

    def close(self) -> None:
        os.close(self._fd)


def _settings(init_s: float, finish_s: float, keep_command_line: bool) -> "wandb.Settings":
    import wandb

    wanted: dict[str, object] = {
        "silent": True,
        "console": "off",  # the run folder has the logs
        "init_timeout": init_s,
        "finish_timeout": finish_s,
        "finish_timeout_raises": True,
        "x_disable_meta": not keep_command_line,
        # By default rows reach the disk every 15 s, and a service that is killed (scancel) takes them with it.
        "x_transaction_log_flush_interval": 1.0,
    }
    # Names with x_ may change with any release of wandb, which refuses those it does not know.
    return wandb.Settings.model_validate({key: wanted[key] for key in wanted if key in wandb.Settings.model_fields})


def _services() -> "list[psutil.Process]":
    """The service process of this process, if it has one. Only the one who started it may end it."""
    import psutil

    def is_service(child: psutil.Process) -> bool:
        try:
            return bool(child.name() == SERVICE)
        except psutil.Error:  # it has just ended
            return False

    return [child for child in psutil.Process().children() if is_service(child)]


def _end_service() -> None:
    """Waits until the service has written everything; forgets it when it is gone already."""
    import wandb

    try:
        wandb.teardown()
    except Exception:  # what is lost has been reported by the call before
        logging.getLogger("grpo_exp.track").debug("wandb.teardown failed", exc_info=True)


def _kill_services() -> None:
    import psutil

    for service in _services():
        try:
            service.kill()
            service.wait(KILL_S)
        except psutil.Error:
            continue
