"""Replays of one recording side by side: how far the log-probabilities, gradients and updates of two arms are apart.

Runs are paired where they replayed the same recording; what they traced of a step is compared token by token, the
gradients and updates by the cosine of their sketches. Where nothing was replayed, nothing heavy is imported.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .layout import Grid
from .load import RunRecord, section
from .numbers import plain
from .stats import mean

if TYPE_CHECKING:
    from ..recording import Arrays

COLUMNS = {
    "logprob_first": "|Δ log-prob|, step 1",
    "logprob_mean": "all steps",
    "logprob_max": "largest",
    "gradient_first": "cos gradients, step 1",
    "gradient_mean": "mean",
    "gradient_min": "lowest",
    "update_first": "cos updates, step 1",
    "update_mean": "mean",
    "norm_ratio": "update norm / baseline's",
}
"""Key in the JSON → heading. Log-probabilities in nats; all but the last of each are means over tokens or steps."""


@dataclass(frozen=True)
class ReplayGap:
    """``values``: see :data:`COLUMNS`, each the mean over the pairs of runs, None where nothing says."""

    arm: str
    baseline: str
    num_pairs: int
    num_steps: int  # that both runs of a pair traced, the fewest of any pair
    values: Mapping[str, float | None]


@dataclass
class _Sums:
    """Of one pair of runs, step after step."""

    logprob: list[tuple[float, int, float]] = field(default_factory=list)  # sum of |Δ|, tokens, largest
    gradient: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)

    def add(self, a: "Arrays", b: "Arrays") -> None:
        gap = abs(a["logprobs"].astype(float) - b["logprobs"])
        self.logprob.append((float(gap.sum()), len(gap), float(gap.max())))
        if "norms" in a and "norms" in b:  # neither skipped the step
            self.gradient.append(_cosine(a, b, "gradient"))
            self.update.append(_cosine(a, b, "update"))
            self.ratio.append(float(a["norms"][1]) / float(b["norms"][1]) if b["norms"][1] else math.nan)

    def values(self) -> dict[str, float]:
        sums, counts, largest = zip(*self.logprob, strict=True)
        found = {"logprob_first": sums[0] / counts[0], "logprob_mean": math.fsum(sums) / sum(counts)}
        found["logprob_max"] = max(largest)
        if self.gradient:
            found |= {"gradient_first": self.gradient[0], "gradient_mean": mean(self.gradient)}
            found |= {"gradient_min": min(self.gradient), "update_first": self.update[0]}
            found |= {"update_mean": mean(self.update), "norm_ratio": mean(self.ratio)}
        return found


def _cosine(a: "Arrays", b: "Arrays", name: str) -> float:
    x, y = a[name], b[name]
    size = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / size if size else math.nan


def replay_gaps(runs: Mapping[str, Sequence[RunRecord]], pairs: Mapping[str, str | None]) -> tuple[ReplayGap, ...]:
    """Every arm whose runs replayed what those of its baseline did, against that.

    Args:
        runs: arm → the runs that count.
        pairs: arm → its baseline arm.
    """
    gaps = []
    for arm, baseline in pairs.items():
        if baseline is None or baseline == arm:
            continue
        of_baseline = {_recording(run): run for run in runs[baseline] if _recording(run)}
        both = [(run, of_baseline[key]) for run in runs[arm] if (key := _recording(run)) in of_baseline]
        found = [pair for run, other in both if (pair := _compare(run, other))[0]]
        if found:
            steps = min(count for count, _ in found)
            gaps.append(ReplayGap(arm, baseline, len(found), steps, _means([values for _, values in found])))
    return tuple(gaps)


def _recording(run: RunRecord) -> str | None:
    rollout = section(run.config, "rollout")
    path = rollout.get("replay_from")
    return path if rollout.get("backend") == "replay" and isinstance(path, str) else None


def _compare(run: RunRecord, other: RunRecord) -> tuple[int, dict[str, float]]:
    """(steps that both traced, values)."""
    from ..recording import read_trace

    sums = _Sums()
    for step in range(1, _last_step(run, other) + 1):
        a, b = read_trace(run.path, step), read_trace(other.path, step)
        if a is not None and b is not None and len(a["logprobs"]) == len(b["logprobs"]):
            sums.add(a, b)
    return len(sums.logprob), sums.values() if sums.logprob else {}


def _last_step(*runs: RunRecord) -> int:
    return min(step if isinstance(step := run.status.get("step"), int) else 0 for run in runs)


def _means(found: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    means = {key: mean([values[key] for values in found]) if all(key in v for v in found) else None for key in COLUMNS}
    return {key: value if value is not None and math.isfinite(value) else None for key, value in means.items()}


def replay_table(gaps: Sequence[ReplayGap]) -> Iterable[Grid]:
    """The section of a comparison, if anything was replayed."""
    if not gaps:
        return
    rows = tuple(
        (gap.arm, str(gap.num_pairs), str(gap.num_steps), *(_cell(key, gap.values[key]) for key in COLUMNS))
        for gap in gaps
    )
    title = f"On the same rollouts, against {gaps[0].baseline}" if len({gap.baseline for gap in gaps}) == 1 else (
        "On the same rollouts, each arm against its baseline"
    )  # fmt: skip
    yield Grid(title, ("arm", "pairs", "steps", *COLUMNS.values()), rows)


def _cell(key: str, value: float | None) -> str:
    """Cosines near 1 with the digits that tell them apart."""
    is_cosine = key.startswith(("gradient", "update"))
    return f"{value:.6f}" if is_cosine and value is not None else plain(value)
