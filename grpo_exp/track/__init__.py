"""Trackers: where else than in the run folder the metrics of a run are shown.

    tracker = guarded(build(config.tracker, warn), warn)
    tracker.start(run); tracker.log(step, row); tracker.finish(exit_code)

Importing this package imports neither torch nor wandb.
"""

from collections.abc import Callable

from grpo_exp.config.schema import TrackerConfig, TrackerName
from grpo_exp.track.base import NullTracker, TrackedRun, Tracker
from grpo_exp.track.guard import guarded, log_warning
from grpo_exp.track.wandb_options import validate

__all__ = ["NullTracker", "TrackedRun", "Tracker", "build", "guarded", "validate"]


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
