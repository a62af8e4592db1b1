"""A summary for programs: strict JSON with everything in it, and CSV with one row per run."""

import csv
import io
import json

from .aggregate import Aggregate
from .inference import Refusal
from .load import ABSENT
from .metrics import Json
from .stats import Difference, Estimate, Interval
from .tables import SITES, Comparison, RunValues, Summary


def to_json(summary: Summary) -> str:
    """Strict JSON (no NaN): arms, differences, confounds, and the raw values of every run."""
    content: Json = {
        "metric": summary.metric,
        "level": summary.level,
        "rules": {
            "question": summary.rules.question,
            "window": summary.rules.window,
            "margin": summary.rules.margin,
            "failures": summary.rules.failures.name,
            "collapse": summary.rules.collapse,
        },
        "verdicts": list(summary.verdicts),
        "baseline": summary.baseline,
        "baseline_origin": summary.baseline_origin,
        "factors": list(summary.design.factors),
        "factors_declared": summary.design.is_declared,
        "measures": {m.name: {"key": m.key, "value": m.reduce.value} for m in summary.measures},
        "arms": [
            {
                "name": arm.arm.name,
                "levels": dict(arm.arm.levels),
                "num_done": len(arm.arm.done),
                "num_runs": len(arm.arm.runs),
                "precision": dict(arm.sites),
                "num_ended": arm.collapses.ended,
                "num_collapsed": arm.collapses.collapsed,
                "collapse_interval": _interval(arm.collapses.interval),
                "question_error": arm.question_error,
                "estimates": {name: _estimate(found) for name, found in arm.estimates.items()},
            }
            for arm in summary.arms
        ],
        "differences": [_comparison(item) for item in summary.comparisons],
        "repeats": [
            {
                "arm": repeat.arm,
                "of": repeat.of,
                "n": repeat.num_shared,
                "mean": repeat.difference.mean,
                "interval": _interval(repeat.difference.interval),
                "largest": repeat.largest,
            }
            for repeat in summary.repeats
        ],
        "aggregates": [_aggregate(item) for item in summary.aggregates],
        "confounded": summary.is_confounded,
        "confounds": [
            {
                "key": item.key,
                "source": item.source.value,
                "spread": item.spread.name,
                "confounds": item.confounds,
                "values": {arm: list(values) for arm, values in item.values.items()},
            }
            for item in summary.confounds
        ],
        "replays": [
            {
                "arm": gap.arm,
                "baseline": gap.baseline,
                "num_pairs": gap.num_pairs,
                "num_steps": gap.num_steps,
                "values": dict(gap.values),
            }
            for gap in summary.replays
        ],
        "runs": [_run(values) for values in summary.runs],
        "notes": list(summary.notes),
    }
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)


def _interval(interval: Interval | None) -> Json:
    return None if interval is None else [interval.low, interval.high]


def _estimate(found: Estimate) -> Json:
    return {"n": found.n, "mean": found.mean, "interval": _interval(found.interval)}


def _comparison(item: Comparison) -> Json:
    found: Difference | None = item.difference
    numbers: dict[str, Json] = {"kind": None, "n": 0, "mean": None, "interval": None}
    if found is not None:
        numbers = {"kind": found.kind.name, "n": found.n, "mean": found.mean, "interval": _interval(found.interval)}
    tests: dict[str, Json] = {
        "p": item.evidence.p,
        "p_holm": item.evidence.holm,
        "p_equivalence": item.evidence.equivalence,
        "detectable": item.evidence.detectable,
        "correlation": item.evidence.correlation,
    }
    return {"arm": item.arm, "baseline": item.baseline, **numbers, **tests}


def _aggregate(item: Aggregate) -> Json:
    names: dict[str, Json] = {"arm": item.arm, "baseline": item.baseline, "num_cells": item.num_cells}
    if isinstance(item.found, Refusal):
        return names | {"refused": item.found.value}
    return names | {
        "iqm": item.found.iqm,
        "iqm_interval": _interval(item.found.iqm_interval),
        "improvement": item.found.improvement,
        "improvement_interval": _interval(item.found.improvement_interval),
    }


def _seed(values: RunValues) -> str | None:
    return None if values.run.seed == ABSENT else values.run.seed


def _run(values: RunValues) -> Json:
    run = values.run
    return {
        "name": run.name,
        "path": run.origin,
        "arm": values.arm,
        "seed": _seed(values),
        "state": run.state.value,
        "reason": run.reason,
        "values": dict(values.values),
    }


def to_csv(summary: Summary) -> str:
    """One row per run: name, state, factors, seed, precision sites, measures. An empty cell is a missing value."""
    levels = {arm.arm.name: arm.arm.levels for arm in summary.arms}
    sites = {arm.arm.name: arm.sites for arm in summary.arms}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    measures = [measure.name for measure in summary.measures]
    factors = summary.design.factors
    writer.writerow(["name", "state", "arm", *factors, "seed", *SITES, *measures, "reason", "path"])
    for values in summary.runs:
        arm = values.arm or ""
        writer.writerow(
            [
                values.run.name,
                values.run.state.value,
                arm,
                *(levels.get(arm, {}).get(factor, "") for factor in factors),
                _seed(values),
                *(sites.get(arm, {}).get(site, "") for site in SITES),
                *(values.values[name] for name in measures),
                values.run.reason,
                values.run.origin,
            ]
        )
    return out.getvalue()
