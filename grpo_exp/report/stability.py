"""How steadily the runs of an arm train: loss scale, skipped steps, gradients, and the runs that have not collapsed."""

from collections.abc import Sequence

from .layout import Grid
from .load import ABSENT, RunRecord
from .metrics import Metrics, number
from .numbers import plain
from .tables import ArmSummary
from .verdict import Rules

WATCHED = ("loss/policy", "grad/norm", "reward/mean")  # a null in one of these is a number that was not finite


def first_not_finite(metrics: Metrics) -> float | None:
    """The first step at which a watched metric is no finite number; None where every one is."""
    for row in metrics.rows:
        if any(key in row and number(row[key]) is None for key in WATCHED):
            return number(row.get("step"))
    return None


def share_not_collapsed(runs: Sequence[RunRecord], metric: str, rules: Rules) -> list[tuple[float, float]]:
    """(step, share of the runs that have, of their best gain so far, as much left as ``sweep.collapse`` asks for).

    A run that failed counts as collapsed from its last row on; without a declared share, only such runs do.
    """
    found: dict[float, list[bool]] = {}
    steps = sorted({step for run in runs for step, value in run.metrics.series(metric) if step is not None})
    for run in runs:
        start = best = last = None
        values = {step: value for step, value in run.metrics.series(metric) if step is not None}
        end = max(values, default=-1.0)
        for step in steps:
            if step in values:
                last = values[step]
                start = last if start is None else start
                best = last if best is None or (last is not None and last > best) else best
            if step > end and run.state.value != "failed":
                break
            gained = None if start is None or best is None or last is None else (last - start, best - start)
            kept = gained is not None and (rules.collapse is None or gained[0] >= rules.collapse * gained[1])
            found.setdefault(step, []).append(kept and not (step > end))
    return [(step, sum(kept) / len(kept)) for step, kept in sorted(found.items())]


def stability_table(arms: Sequence[ArmSummary]) -> Grid:
    """One row per arm, over all of its runs that have rows, whatever became of them."""
    rows = []
    for summary in arms:
        runs = [run for run in summary.arm.runs if run.metrics.rows]
        scales = [value for run in runs for value in run.metrics.column("fp16/scale") if value is not None]
        skipped = [value for run in runs if (value := run.metrics.last("fp16/skipped_total")) is not None]
        norms = [value for run in runs if (value := run.metrics.highest("grad/norm")) is not None]
        breaks = [step for run in runs if (step := first_not_finite(run.metrics)) is not None]
        rows.append(
            (
                summary.arm.name,
                f"{min(scales):g}" if scales and max(scales) != 1 else ABSENT,
                f"{sum(skipped):.0f}" if skipped else ABSENT,
                plain(max(norms)) if norms else ABSENT,
                f"step {min(breaks):.0f} ({len(breaks)} / {len(runs)})" if breaks else "none",
                f"{summary.collapses.ended - summary.collapses.collapsed} / {summary.collapses.ended}",
            )
        )
    header = ("arm", "lowest scale", "skipped", "max grad/norm", "first not finite", "not collapsed")
    return Grid(
        "Stability of all runs with rows: loss scale, skipped steps, first step that is not finite (runs with one)",
        header,
        tuple(rows),
    )
