"""The measures of a summary: which key of metrics.jsonl, and how the rows of a run become one value."""

from dataclasses import dataclass
from enum import Enum

from .load import RunRecord

DEFAULT_METRIC = "eval/accuracy"
DECOMPOSITION = (
    *(f"probe/{part}_abs_mean" for part in ("alpha", "beta", "beta_dtype", "beta_batch", "beta_engine")),
    "probe/phantom_clip",
)
"""What the mismatch is made of: in the runs that probed it."""


class Reduce(Enum):
    """How the rows of a run become one value."""

    first = "first row with the key"
    last = "last row with the key"
    mean = "mean over steps"
    highest = "highest"
    per_second = "total / wall_s at the last step"


@dataclass(frozen=True)
class Measure:
    """One number per run. ``key`` is the key in metrics.jsonl, ``name`` the one in every output."""

    name: str
    key: str
    reduce: Reduce

    def of(self, run: RunRecord) -> float | None:
        match self.reduce:
            case Reduce.first:
                return run.metrics.first(self.key)
            case Reduce.last:
                return run.metrics.last(self.key)
            case Reduce.mean:
                return run.metrics.mean(self.key)
            case Reduce.highest:
                return run.metrics.highest(self.key)
            case Reduce.per_second:
                return run.metrics.per_second(self.key)


def measures(metric: str) -> tuple[Measure, ...]:
    """The measures of the summary; ``metric`` is the one that is compared, at the end of a run."""
    chosen = [
        *(measure for key in (metric, DEFAULT_METRIC) for measure in (start_of(key), Measure(key, key, Reduce.last))),
        Measure("eval/accuracy_greedy", "eval/accuracy_greedy", Reduce.last),
        Measure("reward/mean", "reward/mean", Reduce.last),
        Measure("steps", "step", Reduce.last),
        Measure("steps_per_s", "step", Reduce.per_second),
        Measure("tokens_per_s", "tokens", Reduce.per_second),
        Measure("memory/peak_bytes", "memory/peak_bytes", Reduce.highest),
        Measure("mismatch/abs_mean", "mismatch/abs_mean", Reduce.mean),
        Measure("ratio/clip_frac", "ratio/clip_frac", Reduce.mean),
        Measure("fp16/skipped_total", "fp16/skipped_total", Reduce.last),
        *(Measure(key, key, Reduce.mean) for key in DECOMPOSITION),
    ]
    by_name: dict[str, Measure] = {}
    for measure in chosen:
        by_name.setdefault(measure.name, measure)
    return tuple(by_name.values())


def start_of(metric: str) -> Measure:
    return Measure(f"{metric} at start", metric, Reduce.first)
