"""What a sweep declared before it ran (``Rules``), and what its comparisons show by these rules, in numbers and words.

A verdict never says more than its interval: "no difference" is said only where a margin was declared and the test of
equivalence holds, and what the design could have found is said beside it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .inference import POWER, equivalence, holm, minimum_detectable, p_value, pairing_correlation, wilson
from .load import RunRecord, RunState, as_text, read_run, section
from .measures import DEFAULT_METRIC
from .metrics import number
from .stats import Difference, DifferenceKind, Interval


class Failures(Enum):
    """What a failed run counts for: the names are those of ``sweep.failures``."""

    leave_out = "a failed run is listed and in no mean"
    start = "a failed run counts with its value before training"
    last = "a failed run counts with its last value"


@dataclass(frozen=True)
class Rules:
    """As declared by the sweep; runs without a declaration get these defaults."""

    window: int = 1
    margin: float | None = None
    failures: Failures = Failures.leave_out
    collapse: float | None = None
    question: str | None = None

    def counts(self, run: RunRecord) -> bool:
        """Whether a run is part of a mean of the metric."""
        return run.is_done or (run.state is RunState.failed and self.failures is not Failures.leave_out)

    def value(self, run: RunRecord, metric: str) -> float | None:
        """The value of one run; None where it has none."""
        if run.state is RunState.failed and self.failures is Failures.start:
            return run.metrics.first(metric)
        return run.metrics.last(metric, self.window)

    def is_collapsed(self, run: RunRecord, metric: str) -> bool:
        """Failed, without a number at the end, or with less than ``collapse`` of its best gain left."""
        if run.state is RunState.failed:
            return True
        start, best, end = (
            run.metrics.first(metric),
            run.metrics.highest(metric),
            run.metrics.last(metric, self.window),
        )
        if end is None:
            return True
        if self.collapse is None or start is None or best is None or best <= start:
            return False
        return end - start < self.collapse * (best - start)

    def in_words(self) -> str:
        window = "the last row with it" if self.window == 1 else f"the mean of the last {self.window} rows with it"
        collapse = "" if self.collapse is None else f"; collapsed: less than {self.collapse:.0%} of its best gain left"
        margin = "; no margin declared" if self.margin is None else f"; margin ± {self.margin:g}"
        return f"{window}; {self.failures.value}{collapse}{margin}"


def declared_rules(runs: Iterable[RunRecord], notes: list[str]) -> Rules:
    """The rules in the frozen configs; the first where they disagree, with a note."""
    found: list[Rules] = []
    for run in runs:
        rules = _rules(section(run.config, "sweep"))
        if rules not in found:
            found.append(rules)
    if len(found) > 1:
        notes.append(f"the runs declare different rules: “{found[0].in_words()}” is taken")
    return found[0] if found else Rules()


def value_of(path: Path) -> float | None:
    """What the run of a folder is compared by, by its own rules; None where it has no such value (yet)."""
    run = read_run(path)
    sweep = section(run.config, "sweep")
    rules = _rules(sweep)
    return rules.value(run, as_text(sweep.get("metric") or DEFAULT_METRIC)) if rules.counts(run) else None


def _rules(sweep: Mapping[str, object]) -> Rules:
    window, margin, collapse = (_number(sweep.get(key)) for key in ("window", "margin", "collapse"))
    failures = sweep.get("failures")
    return Rules(
        window=int(window) if window is not None and window >= 1 else 1,
        margin=margin if margin is not None and margin > 0 else None,
        failures=Failures[str(failures)] if failures in Failures.__members__ else Failures.leave_out,
        collapse=collapse,
        question=as_text(sweep["question"]) if sweep.get("question") else None,
    )


def _number(value: object) -> float | None:
    return number(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Count:
    """Collapsed runs of an arm, of those that ended (done or failed), with the Wilson interval of the share."""

    collapsed: int
    ended: int
    interval: Interval | None


def collapses(runs: Iterable[RunRecord], metric: str, rules: Rules, level: float) -> Count:
    ended = [run for run in runs if run.state in (RunState.done, RunState.failed)]
    collapsed = sum(rules.is_collapsed(run, metric) for run in ended)
    return Count(collapsed, len(ended), wilson(collapsed, len(ended), level))


@dataclass(frozen=True)
class Evidence:
    """The tests of one comparison. ``holm``: its p-value adjusted for all comparisons with a baseline."""

    p: float | None
    holm: float | None
    equivalence: float | None
    detectable: float | None
    correlation: float | None


Sides = tuple[Difference, Mapping[str, float], Mapping[str, float]]  # a - b, and both by seed


def evidence(sides: Sequence[Sides | None], margin: float | None, level: float) -> list[Evidence]:
    """One per comparison; None stands for an arm whose baseline was not run."""
    ps = [None if side is None else p_value(side[0]) for side in sides]
    known = [p for p in ps if p is not None]
    adjusted = iter(holm(known))
    found = []
    for side, p in zip(sides, ps, strict=True):
        if side is None:
            found.append(Evidence(None, None, None, None, None))
            continue
        difference, a, b = side
        paired = difference.kind is DifferenceKind.paired
        found.append(
            Evidence(
                p=p,
                holm=None if p is None else next(adjusted),
                equivalence=None if margin is None else equivalence(difference, margin),
                detectable=minimum_detectable(difference, level),
                correlation=pairing_correlation(a, b) if paired else None,
            )
        )
    return found


def in_words(name: str, found: Difference | None, tests: Evidence, rules: Rules, level: float) -> str:
    """One comparison as a sentence. ``name``: “a − b”."""
    if found is None or found.mean is None:
        return f"{name}: nothing to compare yet"
    pairs = f"{found.n} paired seeds" if found.kind is DifferenceKind.paired else f"unpaired, {found.n} seeds or more"
    if found.interval is None or found.error is None:
        return (
            f"{name} = {found.mean:+.3g} ({pairs.replace('1 paired seeds', '1 paired seed')}): too few for an interval"
        )
    low, high = found.interval.low, found.interval.high
    text = f"{name} = {found.mean:+.3g}, {level:.0%} interval {low:+.3g} to {high:+.3g}, {pairs}"
    if tests.detectable is not None:
        text += f"; this design detects {tests.detectable:.3g} or more with {POWER:.0%} power"
    if tests.correlation is not None:
        text += f"; correlation over seeds {tests.correlation:.2f}"
    return f"{text}: {_conclusion(tests, rules, level)}"


def _conclusion(tests: Evidence, rules: Rules, level: float) -> str:
    differs = tests.holm is not None and tests.holm < 1 - level
    same = tests.equivalence is not None and tests.equivalence < 1 - level
    match differs, same:
        case True, True:
            return f"a difference (Holm p = {tests.holm:.2g}), smaller than the margin of {rules.margin:g}"
        case True, False:
            return f"a difference (Holm p = {tests.holm:.2g})"
        case False, True:
            return f"equivalent within ± {rules.margin:g} (TOST p = {tests.equivalence:.2g})"
        case _ if tests.p is not None and tests.p < 1 - level:
            return f"not shown: p = {tests.p:.2g} alone, {tests.holm:.2g} by Holm over all comparisons"
        case _:
            return "undecided: neither a difference nor its absence is shown"
