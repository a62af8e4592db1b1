"""A summary as text: sections of titled tables and lines, built once and shown on a terminal or as Markdown.

Every name comes from outside, so it is shown as text and never as markup: control characters are replaced, Markdown is
escaped. Nothing is cut off; where a terminal is narrow, cells fold.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .aggregate import aggregate_part
from .confounds import Confound
from .layout import Grid, Lines
from .load import ABSENT, RunState
from .measures import DECOMPOSITION, DEFAULT_METRIC, start_of
from .numbers import decimals_for, in_bytes, plain
from .replays import replay_table
from .stability import stability_table
from .stats import Estimate
from .tables import SITES, ArmSummary, Comparison, RunValues, Summary

MAX_CONFOUNDS = 20


def sections(summary: Summary) -> list[Grid | Lines]:
    """The comparison in reading order, without what is empty."""
    parts: list[Grid | Lines] = [_overview(summary)]
    if summary.verdicts:
        parts.append(Lines("Verdict", summary.verdicts))
    if summary.repeats:
        lines = tuple(repeat.in_words(summary.metric, summary.level) for repeat in summary.repeats)
        parts.append(Lines("Run-to-run noise (A/A)", lines))
    if summary.arms:
        parts += [
            _outcome(summary),
            *_differences(summary),
            *aggregate_part(summary.aggregates, summary.metric, summary.level),
            _errors(summary),
            stability_table(summary.arms),
            _cost(summary),
            _precision(summary),
            *_decomposition(summary),
            *replay_table(summary.replays),
            _confounds(summary),
        ]
    if summary.not_counted:
        parts.append(_not_counted(summary.not_counted))
    if summary.notes:
        parts.append(Lines("Notes", summary.notes))
    return parts


def _overview(summary: Summary) -> Lines:
    states = Counter(values.run.state for values in summary.runs)
    counted = ", ".join(f"{states[state]} {state.value}" for state in RunState if states[state])
    lines = [f"{_count(len(summary.runs), 'run')}: {counted}"]
    if summary.arms:
        varied = ", ".join(summary.design.factors) or "none"
        origin = "" if summary.design.is_declared else " (no sweep declares factors: the Hydra choices that differ)"
        seeds = sorted({values.run.seed for values in summary.runs if values.arm}, key=lambda seed: (len(seed), seed))
        shown = ", ".join(seeds) if len(seeds) <= 10 else f"{seeds[0]} … {seeds[-1]} ({len(seeds)})"
        lines += [
            f"{_count(len(summary.arms), 'arm')}; factors: {varied}{origin}; seeds: {shown}",
            f"values are means over the seeds of the done runs ± half of the {summary.level:.0%} t-interval",
        ]
    return Lines("Comparison", tuple(lines))


def _outcome(summary: Summary) -> Grid:
    keys = list(dict.fromkeys((summary.metric, DEFAULT_METRIC, "eval/accuracy_greedy", "reward/mean")))
    moving = {summary.metric, DEFAULT_METRIC}
    header = ["arm", "done / runs"]
    header += [f"{key}, start → end" if key in moving else key for key in keys]
    rows = []
    for arm in summary.arms:
        cells = [arm.arm.name, f"{len(arm.arm.done)} / {len(arm.arm.runs)}"]
        for key in keys:
            end = _estimate(arm.estimates[key], arm)
            start = arm.estimates[start_of(key).name].mean if key in moving else None
            cells.append(f"{plain(start)} → {end}" if start is not None else end)
        rows.append(tuple(cells))
    return Grid("At the end of training (the last row with the key)", tuple(header), tuple(rows))


def _differences(summary: Summary) -> Iterable[Grid]:
    if summary.comparisons:
        rows = tuple(_difference(item) for item in summary.comparisons)
        title = f"{summary.metric} at the end, minus the baseline {summary.baseline} ({summary.baseline_origin})"
        yield Grid(title, ("arm", "difference", f"{summary.level:.0%} interval", "n", ""), rows)


def _difference(item: Comparison) -> tuple[str, ...]:
    if item.difference is None:
        return item.arm, ABSENT, ABSENT, ABSENT, "its baseline was not run"
    found = item.difference
    if found.mean is None:
        return item.arm, ABSENT, ABSENT, str(found.n), "nothing to compare"
    if found.interval is not None:
        decimals = decimals_for(abs(found.mean), found.interval.half_width)
        low, high = found.interval.low, found.interval.high
        interval = f"{plain(low, decimals, '+')} to {plain(high, decimals, '+')}"
        return item.arm, plain(found.mean, decimals, "+"), interval, str(found.n), found.kind.value
    remark = f"{found.kind.value}, too few for an interval"
    return item.arm, plain(found.mean, None, "+"), ABSENT, str(found.n), remark


def _errors(summary: Summary) -> Grid:
    """Two errors that must not be mixed: that of the seeds shrinks with more of them, that of the questions does not."""
    rows = []
    for arm in summary.arms:
        count, found = arm.collapses, arm.estimates[summary.metric]
        share = count.interval
        rows.append(
            (
                arm.arm.name,
                f"{count.collapsed} / {count.ended}",
                ABSENT if share is None else f"{share.low:.0%} to {share.high:.0%}",
                ABSENT if found.error is None else plain(found.error),
                ABSENT if arm.question_error is None else plain(arm.question_error),
            )
        )
    header = ("arm", "collapsed / ended", f"{summary.level:.0%} interval", "seed error", "question error")
    return Grid(f"Collapsed runs, and standard errors of {summary.metric}", header, tuple(rows))


def _cost(summary: Summary) -> Grid:
    rows = []
    for arm in summary.arms:
        peak = arm.estimates["memory/peak_bytes"].mean
        rows.append(
            (
                arm.arm.name,
                _estimate(arm.estimates["steps"], arm, 0),
                _estimate(arm.estimates["steps_per_s"], arm),
                _estimate(arm.estimates["tokens_per_s"], arm),
                ABSENT if peak is None else in_bytes(peak),
            )
        )
    return Grid("Speed and memory", ("arm", "steps", "steps/s", "trained tokens/s", "peak memory"), tuple(rows))


def _precision(summary: Summary) -> Grid:
    keys = {"mismatch/abs_mean": None, "ratio/clip_frac": None, "fp16/skipped_total": 1}  # decimals
    rows = []
    for arm in summary.arms:
        values = (plain(arm.estimates[key].mean, decimals) for key, decimals in keys.items())
        rows.append((arm.arm.name, *(arm.sites[site] for site in SITES), *values))
    title = "Precision: declared dtypes, and means over the steps (skipped_total: over the runs)"
    return Grid(title, ("arm", *SITES, *keys), tuple(rows))


def _decomposition(summary: Summary) -> Iterable[Grid]:
    """Where the mismatch comes from, if any run has asked."""
    probed = [arm for arm in summary.arms if any(arm.estimates[key].mean is not None for key in DECOMPOSITION)]
    if probed:
        rows = tuple((arm.arm.name, *(plain(arm.estimates[key].mean) for key in DECOMPOSITION)) for arm in probed)
        title = "The mismatch taken apart: mean sizes over the probes, in nats per token (phantom_clip: a share)"
        header = (key.partition("/")[2].removesuffix("_abs_mean") for key in DECOMPOSITION)
        yield Grid(title, ("arm", *header), rows)


def _confounds(summary: Summary) -> Lines:
    factors = ", ".join(summary.design.factors) or "nothing"
    found = [item for item in summary.confounds if item.confounds]
    harmless = [item for item in summary.confounds if not item.confounds]
    lines = [*_listed(found), *_listed(harmless)]
    if not found:
        verdict = f"ok: between arms nothing differs but {factors} and what follows from it"
        lines.insert(0, verdict if len(summary.arms) > 1 else "one arm only: nothing to compare it with")
        return Lines("Confound check", tuple(lines))
    title = f"Confound check: {_count(len(found), 'difference')} between arms that {factors} does not explain"
    return Lines(title, tuple(lines), is_alarm=True)


def _listed(found: Sequence[Confound]) -> Iterable[str]:
    for item in found[:MAX_CONFOUNDS]:
        yield from _confound(item)
    if len(found) > MAX_CONFOUNDS:
        yield f"… and {len(found) - MAX_CONFOUNDS} more (--json has all of them)"


def _confound(item: Confound) -> Iterable[str]:
    """One line for the key, then the arms that share its values."""
    by_values: dict[tuple[str, ...], list[str]] = {}
    for arm, values in item.values.items():
        by_values.setdefault(values, []).append(arm)
    yield f"{item.key} ({item.source.value}, {item.spread.value})"
    for values, arms in by_values.items():
        yield f"  {' | '.join(_shortened(value) for value in values)}: {'; '.join(arms)}"


def _not_counted(runs: Sequence[RunValues]) -> Lines:
    lines = []
    for values in runs:
        run = values.run
        where = f" ({values.arm}, seed {run.seed})" if values.arm else " (in no arm)"
        step, last = run.status.get("step"), run.status.get("max_steps")
        progress = "" if step is None else f", step {step}" + (f" of {last}" if last is not None else "")
        lines.append(f"{run.state.value}: {run.name}{where}{progress}")
        if run.reason:
            lines.append(f"  {_shortened(' '.join(run.reason.split()), 300)}")
        lines.append(f"  {run.origin}")
    title = f"{_count(len(runs), 'run')} not counted in any mean (an arm's total includes its own)"
    return Lines(title, tuple(lines), is_alarm=any(v.run.state in _BAD for v in runs))


_BAD = {RunState.failed, RunState.crashed, RunState.broken}


def _estimate(found: Estimate, arm: ArmSummary, decimals: int | None = None) -> str:
    """``mean ± half width``, with n where the measure is missing in some of the runs that count."""
    if found.mean is None:
        return ABSENT
    missing = "" if found.n == arm.num_seeds else f" (n={found.n})"
    if found.interval is None:
        return plain(found.mean, decimals) + missing
    half = found.interval.half_width
    if decimals == 0 and half == 0:
        return plain(found.mean, decimals) + missing
    decimals = decimals_for(abs(found.mean), half) if decimals is None else decimals
    return f"{plain(found.mean, decimals)} ± {plain(half, decimals)}{missing}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _shortened(text: str, width: int = 80) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def clean(text: str) -> str:
    """Without characters that would move the cursor or break a line."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def to_terminal(summary: Summary, console: Console) -> None:
    """Print the comparison. Colours and bold vanish by themselves where the console is no terminal."""
    for part in sections(summary):
        print_part(part, console)


def print_part(part: Grid | Lines, console: Console) -> None:
    alarm = isinstance(part, Lines) and part.is_alarm
    console.print(Text(clean(part.title), style="bold red" if alarm else "bold"))
    match part:
        case Grid():
            console.print(_table(part))
        case Lines():
            for line in part.lines:
                console.print(Text("  " + clean(line)), soft_wrap=True)
    console.print()


def _table(grid: Grid) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="")
    for index, title in enumerate(grid.header):
        words = index < grid.num_labels or not title
        widest = max((len(row[index]) for row in grid.rows), default=0)
        title = clean(title)
        if " " not in title and len(title) > widest + 5:  # a metric key over narrow numbers takes two lines
            title = re.sub(r"(?<=\w)/(?=\w)", "/\n", title)
        table.add_column(Text(title), justify="left" if words else "right", overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    return table


def to_markdown(summary: Summary) -> str:
    """GitHub-flavoured Markdown."""
    blocks = []
    for index, part in enumerate(sections(summary)):
        blocks.append(f"{'##' if index == 0 else '###'} {escape(part.title)}")
        match part:
            case Grid():
                rules = ["---" if column == 0 or not title else "---:" for column, title in enumerate(part.header)]
                rows = [[escape(cell) for cell in row] for row in part.rows]
                rows = [[escape(title) for title in part.header], rules, *rows]
                blocks.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
            case Lines():
                blocks.append("\n".join(_bullet(line) for line in part.lines))
    return "\n\n".join(blocks) + "\n"


def _bullet(line: str) -> str:
    """A list item; an indented line is one level deeper. What would start a block inside the item is escaped."""
    text = re.sub(r"^(#{0,5}|\d*)([#+.)-])(?=\s|$)", r"\1\\\2", escape(line.strip()))
    return ("  - " if line.startswith("  ") else "- ") + text


def escape(text: str) -> str:
    """Plain text for a Markdown cell or line: no HTML, no table cell, no emphasis, no link."""
    text = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|~])", r"\\\1", text)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
