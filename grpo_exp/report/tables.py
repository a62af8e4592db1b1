"""From runs to the numbers of the summary: a value per run and measure, an estimate per arm, a difference per pair.

Only runs in state ``done`` enter a mean; the others stay in the totals and in the list of what was not counted. Two
runs with the same arm and seed are averaged first, so that ``n`` is always the number of seeds.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from ..errors import ConfigError
from .arms import Arm, Design, design, find_baselines
from .confounds import Confound, find_confounds
from .load import ABSENT, RunRecord, as_text, section
from .stats import Difference, Estimate, difference, estimate, mean

SITES = ("params", "compute", "rollout", "head")
DEFAULT_METRIC = "eval/accuracy"


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
    ]
    by_name: dict[str, Measure] = {}
    for measure in chosen:
        by_name.setdefault(measure.name, measure)
    return tuple(by_name.values())


def start_of(metric: str) -> Measure:
    return Measure(f"{metric} at start", metric, Reduce.first)


@dataclass(frozen=True, eq=False)
class RunValues:
    """The raw values of one run. ``arm`` is None for a broken run."""

    run: RunRecord
    arm: str | None
    values: Mapping[str, float | None]


@dataclass(frozen=True, eq=False)
class ArmSummary:
    """Estimates over the seeds of the done runs, by name of measure, and the declared dtype of the main sites."""

    arm: Arm
    estimates: Mapping[str, Estimate]
    sites: Mapping[str, str]
    num_seeds: int


@dataclass(frozen=True)
class Comparison:
    """The metric of one arm minus that of its baseline arm; both None where that arm was not run."""

    arm: str
    baseline: str | None
    difference: Difference | None


@dataclass(frozen=True, eq=False)
class Summary:
    """Everything that a comparison says; the renderers add nothing to it."""

    design: Design
    metric: str
    baseline: str | None
    baseline_origin: str
    level: float
    measures: tuple[Measure, ...]
    runs: tuple[RunValues, ...]
    arms: tuple[ArmSummary, ...]
    comparisons: tuple[Comparison, ...]
    confounds: tuple[Confound, ...]
    notes: tuple[str, ...]

    @cached_property
    def not_counted(self) -> tuple[RunValues, ...]:
        return tuple(values for values in self.runs if not values.run.is_done)

    @property
    def is_confounded(self) -> bool:
        return any(confound.confounds for confound in self.confounds)


def summarise(
    runs: Sequence[RunRecord], baseline: str | None = None, metric: str | None = None, level: float = 0.95
) -> Summary:
    """Compare runs.

    Args:
        baseline: an arm, or some of its levels; by default what the sweep declares, else the first arm.
        metric: the key that is compared; by default what the sweep declares, else eval/accuracy.

    Raises:
        ConfigError: no arm is the baseline, or no run has the metric.
    """
    notes: list[str] = []
    plan = design(runs)
    metric = _chosen_metric(runs, metric, notes)
    chosen = measures(metric)
    values = [
        *(RunValues(run, arm.name, {m.name: m.of(run) for m in chosen}) for arm in plan.arms for run in arm.runs),
        *(RunValues(run, None, {m.name: None for m in chosen}) for run in plan.broken),
    ]
    by_arm = {arm.name: [v for v in values if v.arm == arm.name and v.run.is_done] for arm in plan.arms}
    name, origin, pairs = _chosen_baselines(plan, baseline, notes)
    notes += _gaps(values, chosen, metric)
    return Summary(
        design=plan,
        metric=metric,
        baseline=name,
        baseline_origin=origin,
        level=level,
        measures=chosen,
        runs=tuple(values),
        arms=tuple(_arm_summary(arm, by_arm[arm.name], chosen, level) for arm in plan.arms),
        comparisons=tuple(_comparisons(plan, pairs, by_arm, metric, level)),
        confounds=tuple(find_confounds(plan.arms, plan.factors)),
        notes=tuple(notes),
    )


def _chosen_metric(runs: Sequence[RunRecord], metric: str | None, notes: list[str]) -> str:
    if metric is not None:
        known = frozenset().union(*(run.metrics.keys for run in runs))
        if known and metric not in known:
            near = difflib.get_close_matches(metric, known, n=3, cutoff=0.5)
            raise ConfigError("metric", metric, near or sorted(known))
        return metric
    declared = [as_text(key) for run in runs if (key := section(run.config, "sweep").get("metric"))]
    return _agreed(declared, "metrics", notes) or DEFAULT_METRIC


def _agreed(declared: Sequence[str], what: str, notes: list[str]) -> str | None:
    """The first of what the sweeps declare, with a note where they disagree."""
    distinct = list(dict.fromkeys(declared))
    if len(distinct) > 1:
        notes.append(f"the sweeps declare different {what} ({', '.join(distinct)}): {distinct[0]} is taken")
    return distinct[0] if distinct else None


def _chosen_baselines(
    plan: Design, baseline: str | None, notes: list[str]
) -> tuple[str | None, str, Mapping[str, Arm | None]]:
    """(what was asked for, who asked, baseline arm of each arm)."""
    if not plan.arms:
        if baseline is not None:
            raise ConfigError("baseline", baseline, fix="there is no arm to compare with")
        return None, "", {}
    if baseline is not None:
        return baseline, "as asked", find_baselines(plan.arms, baseline)
    runs = [run for arm in plan.arms for run in arm.runs]
    all_declared = [as_text(text) for run in runs if (text := section(run.manifest, "sweep").get("baseline"))]
    declared = _agreed(all_declared, "baselines", notes)
    first = plan.arms[0].name
    if declared is not None:
        try:
            return declared, "declared by the sweep", find_baselines(plan.arms, declared)
        except ConfigError:
            notes.append(f"no run of the declared baseline {declared}: compared with {first}")
    return first, "the first arm, as none is declared", find_baselines(plan.arms, first)


def _arm_summary(arm: Arm, done: Sequence[RunValues], chosen: Iterable[Measure], level: float) -> ArmSummary:
    estimates = {measure.name: estimate(list(_by_seed(done, measure.name).values()), level) for measure in chosen}
    sites = {}
    for site in SITES:
        names = {as_text(section(run.manifest, "precision", "declared").get(site, ABSENT)) for run in arm.runs}
        sites[site] = "/".join(sorted(names))
    return ArmSummary(arm, estimates, sites, len({values.run.seed for values in done}))


def _by_seed(done: Iterable[RunValues], name: str) -> dict[str, float]:
    """Seed → value, without the runs that have none; averaged where a seed was run twice."""
    found: dict[str, list[float]] = {}
    for values in done:
        value = values.values[name]
        if value is not None:
            found.setdefault(values.run.seed, []).append(value)
    return {seed: mean(several) for seed, several in found.items()}


def _comparisons(
    plan: Design, pairs: Mapping[str, Arm | None], by_arm: Mapping[str, Sequence[RunValues]], metric: str, level: float
) -> Iterable[Comparison]:
    for arm in plan.arms:
        other = pairs[arm.name]
        if other is None:
            yield Comparison(arm.name, None, None)
        elif other is not arm:
            a, b = _by_seed(by_arm[arm.name], metric), _by_seed(by_arm[other.name], metric)
            yield Comparison(arm.name, other.name, difference(a, b, level))


def _gaps(values: Sequence[RunValues], chosen: Iterable[Measure], metric: str) -> Iterable[str]:
    """What a reader of the means must know about the done runs."""
    done = [item for item in values if item.run.is_done]
    for measure in chosen:
        empty = [item.run for item in done if item.values[measure.name] is None]
        lost = [run.name for run in empty if measure.key in run.metrics.keys]
        if lost:
            yield f"{measure.name}: not a number in {_names(lost)}; left out of the mean"
        absent = [run.name for run in empty if measure.key not in run.metrics.keys]
        if absent and measure.name == metric:
            yield f"{metric}: missing in {_names(absent)}; left out of the mean"
    repeats: dict[tuple[str | None, str], list[str]] = {}
    for item in done:
        repeats.setdefault((item.arm, item.run.seed), []).append(item.run.name)
    for (arm, seed), names in repeats.items():
        if len(names) > 1:
            yield f"{arm} has {len(names)} runs of seed {seed} ({_names(names)}): averaged, and counted once"
    steps = {step for item in done if (step := item.values["steps"]) is not None}
    if len(steps) > 1:
        yield f"the runs end at different steps, from {min(steps):.0f} to {max(steps):.0f}"
    for item in values:
        for problem in item.run.metrics.problems if item.run.is_done else ():
            yield f"{item.run.name}: {problem}"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
