"""From runs to the numbers of the summary: a value per run and measure, an estimate per arm, a difference per pair.

Only runs in state ``done`` enter a mean; the others stay in the totals and in the list of what was not counted. Two
runs with the same arm and seed are averaged first, so that ``n`` is always the number of seeds.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import ConfigError
from .aggregate import Aggregate, aggregate
from .arms import Arm, Design, design, find_baselines
from .confounds import Confound, find_confounds
from .inference import question_error
from .load import ABSENT, RunRecord, RunState, as_text, section
from .measures import DEFAULT_METRIC, Measure, measures
from .repeats import Repeat, find_repeats, repeats
from .replays import ReplayGap, replay_gaps
from .stats import Difference, Estimate, difference, estimate, mean
from .verdict import Count, Evidence, Rules, Sides, collapses, declared_rules, evidence, in_words

SITES = ("params", "compute", "rollout", "head")


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
    collapses: Count
    question_error: float | None  # of the metric, where it is an accuracy over known questions


@dataclass(frozen=True)
class Comparison:
    """The metric of one arm minus that of its baseline arm; both None where that arm was not run."""

    arm: str
    baseline: str | None
    difference: Difference | None
    evidence: Evidence


@dataclass(frozen=True, eq=False)
class Summary:
    """Everything that a comparison says; the renderers add nothing to it."""

    design: Design
    metric: str
    baseline: str | None
    baseline_origin: str
    level: float
    rules: Rules
    measures: tuple[Measure, ...]
    runs: tuple[RunValues, ...]
    arms: tuple[ArmSummary, ...]
    comparisons: tuple[Comparison, ...]
    confounds: tuple[Confound, ...]
    notes: tuple[str, ...]
    replays: tuple[ReplayGap, ...] = ()
    repeats: tuple[Repeat, ...] = ()
    aggregates: tuple[Aggregate, ...] = ()

    @cached_property
    def not_counted(self) -> tuple[RunValues, ...]:
        return tuple(values for values in self.runs if not values.run.is_done)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """One sentence per comparison."""
        return tuple(
            in_words(f"{item.arm} − {item.baseline or ABSENT}", item.difference, item.evidence, self.rules, self.level)
            for item in self.comparisons
        )

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
    rules = declared_rules((run for arm in plan.arms for run in arm.runs), notes)
    metric = _chosen_metric(runs, metric, notes)
    chosen = measures(metric)
    values = [
        *(RunValues(run, arm.name, _values(run, chosen, metric, rules)) for arm in plan.arms for run in arm.runs),
        *(RunValues(run, None, {m.name: None for m in chosen}) for run in plan.broken),
    ]
    by_arm = {arm.name: [v for v in values if v.arm == arm.name and rules.counts(v.run)] for arm in plan.arms}
    by_seed = {arm: _by_seed(found, metric) for arm, found in by_arm.items()}
    name, origin, pairs = _chosen_baselines(plan, baseline, notes)
    twins = find_repeats(plan.arms)
    pairs = {arm.name: arm if arm.name in twins else pairs[arm.name] for arm in plan.arms}
    notes += _gaps(values, chosen, metric)
    failed = [item.run.name for item in values if item.run.state is RunState.failed and rules.counts(item.run)]
    if failed:
        notes.append(f"by the declared rule {rules.failures.value}: {_names(failed)}; other measures leave them out")
    return Summary(
        design=plan,
        metric=metric,
        baseline=name,
        baseline_origin=origin,
        level=level,
        rules=rules,
        measures=chosen,
        runs=tuple(values),
        arms=tuple(_arm_summary(arm, by_arm[arm.name], chosen, metric, rules, level) for arm in plan.arms),
        comparisons=_comparisons(plan, pairs, by_arm, metric, rules, level),
        confounds=tuple(find_confounds(plan.arms, plan.factors)),
        notes=tuple(notes),
        replays=replay_gaps(
            {arm: [item.run for item in found if item.run.is_done] for arm, found in by_arm.items()},
            {arm: None if other is None else other.name for arm, other in pairs.items()},
        ),
        repeats=repeats(twins, by_seed, level),
        aggregates=aggregate(plan.arms, pairs, by_seed, level),
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


def _values(run: RunRecord, chosen: Iterable[Measure], metric: str, rules: Rules) -> dict[str, float | None]:
    return {m.name: rules.value(run, metric) if m.name == metric else m.of(run) for m in chosen}


def _arm_summary(
    arm: Arm, counted: Sequence[RunValues], chosen: Iterable[Measure], metric: str, rules: Rules, level: float
) -> ArmSummary:
    done = [values for values in counted if values.run.is_done]
    by_name = {m.name: _by_seed(counted if m.name == metric else done, m.name) for m in chosen}
    sites = {}
    for site in SITES:
        names = {as_text(section(run.manifest, "precision", "declared").get(site, ABSENT)) for run in arm.runs}
        sites[site] = "/".join(sorted(names))
    return ArmSummary(
        arm=arm,
        estimates={name: estimate(list(values.values()), level) for name, values in by_name.items()},
        sites=sites,
        num_seeds=len({values.run.seed for values in done}),
        collapses=collapses(arm.runs, metric, rules, level),
        question_error=_question_error(arm, list(by_name[metric].values()), metric),
    )


def _question_error(arm: Arm, shares: Sequence[float], metric: str) -> float | None:
    counts = {section(run.config, "task").get("num_eval") for run in arm.runs}
    (count,) = counts if len(counts) == 1 else (None,)
    is_accuracy = metric.startswith("eval/accuracy") and isinstance(count, int)
    return question_error(shares, count) if is_accuracy and isinstance(count, int) else None


def _by_seed(done: Iterable[RunValues], name: str) -> dict[str, float]:
    """Seed → value, without the runs that have none; averaged where a seed was run twice."""
    found: dict[str, list[float]] = {}
    for values in done:
        value = values.values[name]
        if value is not None:
            found.setdefault(values.run.seed, []).append(value)
    return {seed: mean(several) for seed, several in found.items()}


def _comparisons(
    plan: Design,
    pairs: Mapping[str, Arm | None],
    by_arm: Mapping[str, Sequence[RunValues]],
    metric: str,
    rules: Rules,
    level: float,
) -> tuple[Comparison, ...]:
    sides: dict[str, Sides | None] = {}
    for arm in plan.arms:
        other = pairs[arm.name]
        if other is None:
            sides[arm.name] = None
        elif other is not arm:
            a, b = _by_seed(by_arm[arm.name], metric), _by_seed(by_arm[other.name], metric)
            sides[arm.name] = difference(a, b, level), a, b
    tests = evidence(list(sides.values()), rules.margin, level)
    return tuple(
        Comparison(name, other.name if (other := pairs[name]) else None, side[0] if side else None, found)
        for (name, side), found in zip(sides.items(), tests, strict=True)
    )


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
