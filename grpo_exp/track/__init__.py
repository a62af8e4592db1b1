"""Trackers: where else than in the run folder the metrics of a run are shown.

    tracker = guarded(build(config.tracker, warn), warn)
    tracker.start(run); tracker.log(step, row); tracker.finish(exit_code)

Importing this package imports neither torch nor wandb.
"""

from collections.abc import Callable

import yaml

from grpo_exp.config.schema import TrackerConfig, TrackerName
from grpo_exp.folder import RunFolder
from grpo_exp.track.base import Details, NullTracker, Sample, TrackedRun, Tracker
from grpo_exp.track.guard import guarded, log_warning
from grpo_exp.track.wandb_options import validate

__all__ = ["Details", "NullTracker", "Sample", "TrackedRun", "Tracker", "build", "guarded", "start_tracker", "validate"]


def build(config: TrackerConfig, on_warning: Callable[[str], None] = log_warning) -> Tracker:
    """The tracker that the configuration names, not yet started.

    Args:
        config: checked by :func:`validate` before.
        on_warning: is told, in the thread of the tracker, what did not go as asked, e.g. that a run is kept offline.
    """
    match config.name:
        case TrackerName.none:
            return NullTracker()
        case TrackerName.wandb:
            from grpo_exp.track.wandb import WandbTracker

            return WandbTracker(config, on_warning)


def start_tracker(config: TrackerConfig, folder: RunFolder, on_warning: Callable[[str], None] = log_warning) -> Tracker:
    """The guarded tracker of a run folder that has been described, started."""
    tracker = guarded(build(config, on_warning), on_warning)
    manifest = folder.manifest()
    tracker.start(
        TrackedRun(
            run_dir=folder.path,
            name=folder.path.name,
            config=yaml.safe_load((folder.path / "config.yaml").read_text(encoding="utf-8")),
            sweep=manifest["sweep"]["name"],
            factors=manifest["sweep"]["factors"],
            choices=manifest["choices"],
            tags=list(config.tags),
        )
    )
    return tracker
