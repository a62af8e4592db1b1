"""A summary as one HTML file: no network, no framework, the same bytes for the same runs, readable on paper.

The words and tables are those of the terminal (render.py), with what only a page has room for: the state of every run,
the environment of every arm, curves, final points. Every name comes from outside and is escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files

from .arms import natural
from .charts import MAX_POINTS, ArmCurves, curves, final_points, scatter
from .layout import Grid, Lines
from .load import ABSENT, RunRecord, as_text, flatten
from .metrics import number
from .render import clean, sections
from .stability import share_not_collapsed
from .tables import Summary

HEADER_KEYS = ("versions.", "git.", "hardware.")
AXES = {"step": "step", "samples": "completions trained", "tokens": "tokens trained", "wall_s": "seconds of training"}
OVER_AXES = {
    "reward/mean": "Mean reward",
    "mismatch/abs_mean": "Mismatch: mean of |trainer − generator| in nats per token",
}
OVER_STEP = {
    "probe/alpha_abs_mean": "Decomposition: |alpha|, the policy that moved on",
    "probe/beta_abs_mean": "Decomposition: |beta|, trainer against generator on the same weights",
    "probe/beta_dtype_abs_mean": "Decomposition: the part of beta that is dtype",
    "probe/beta_batch_abs_mean": "Decomposition: the part of beta that is batching",
    "probe/beta_engine_abs_mean": "Decomposition: the part of beta that is the engine",
    "fp16/scale": "Loss scale",
    "fp16/skipped_total": "Skipped steps",
    "grad/norm": "Gradient norm",
}
COST = {
    "wall_s": ("seconds of training", "training time"),
    "tokens_per_s": ("trained tokens per second", "speed"),
    "memory/peak_bytes": ("MiB", "peak memory of the trainer"),
}
BANDS = tuple(f"mismatch/prob_{band}" for band in ("0_1", "1_10", "10_50", "50_90", "90_100"))
MAX_BYTES = 390_000  # of the whole page; figures that would not fit are left out
CLOSED_POINTS = MAX_POINTS // 3  # of a figure that opens on a press


def to_html(summary: Summary) -> str:
    """The whole page."""
    name = next((text for run in _runs(summary) if (text := flatten(run.config).get("sweep.name"))), None)
    title = f"Comparison: {as_text(name)}" if name else "Comparison"
    body = [f"<h1>{_text(title)}</h1>", _question(summary), *_words(summary), _grid(summary), _environment(summary)]
    css, js = (files("grpo_exp.report").joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    body.append(_tables(summary))
    body.append(_figures(summary, MAX_BYTES - len("".join((*body, css, js)).encode())))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n<link rel="icon" href="data:,">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src 'unsafe-inline';"
        "script-src 'unsafe-inline';img-src data:\">\n"
        f"<style>\n{css}</style>\n</head>\n<body>\n<main>\n{''.join(body)}</main>\n<script>\n{js}</script>\n</body>\n</html>\n"
    )


def _runs(summary: Summary) -> list[RunRecord]:
    return [values.run for values in summary.runs]


def _text(text: str) -> str:
    return escape(clean(text))


def _question(summary: Summary) -> str:
    asked = summary.rules.question
    rules = f"Metric {summary.metric}: {summary.rules.in_words()}."
    return (f"<p><strong>{_text(asked)}</strong></p>" if asked else "") + f'<p class="dim">{_text(rules)}</p>\n'


def _words(summary: Summary) -> Iterable[str]:
    if summary.verdicts:
        yield f'<section class="verdict"><h2>Verdict</h2>{_list(summary.verdicts)}'
        yield f'<p class="dim">Over seeds; Holm over {len(summary.verdicts)} comparisons with the baseline.</p></section>\n'


def _list(lines: Iterable[str]) -> str:
    items = (f"<li{' class=sub' if line.startswith('  ') else ''}>{_text(line.strip())}</li>" for line in lines)
    return f"<ul>{''.join(items)}</ul>"


def _grid(summary: Summary) -> str:
    """Arms × seeds, with the state of every run."""
    seeds = sorted({run.seed for arm in summary.arms for run in arm.arm.runs}, key=natural)
    rows = []
    for arm in summary.arms:
        states: dict[str, list[str]] = {}
        for run in arm.arm.runs:
            step = run.status.get("step")
            states.setdefault(run.seed, []).append(run.state.value + ("" if run.is_done else f", step {step}"))
        rows.append((arm.arm.name, *("; ".join(states.get(seed, [ABSENT])) for seed in seeds)))
    table = _table("State of every run, arms × seeds", ("arm", *(f"seed {seed}" for seed in seeds)), rows)
    return f"<section><h2>Design</h2>{table}</section>\n" if rows else ""


def _environment(summary: Summary) -> str:
    """Versions, commit and hardware per arm. A row whose values are not the same everywhere is marked."""
    values: dict[str, dict[str, set[str]]] = {}
    for arm in summary.arms:
        for run in arm.arm.runs:
            for key, value in flatten(run.manifest).items():
                if key.startswith(HEADER_KEYS) and key != "hardware.host":
                    size = number(value) if key == "hardware.memory_bytes" else None
                    shown = as_text(value) if size is None else f"{size / 2**30:.0f} GiB"
                    values.setdefault(key, {}).setdefault(arm.arm.name, set()).add(shown)
    rows, alarms = [], set()
    for key in sorted(values):
        distinct = set().union(*values[key].values())
        if len(distinct) == 1:
            rows.append((key, next(iter(distinct)), "all runs"))
            continue
        by_text: dict[str, list[str]] = {}
        for name, found in values[key].items():
            by_text.setdefault(" | ".join(sorted(found)), []).append(name)
        for text, names in by_text.items():
            alarms.add(len(rows))
            rows.append((f"differs: {key}", text, "; ".join(names)))
    table = _table("Versions, commit and hardware", ("key", "value", "where"), rows, alarms=alarms)
    return f"<section><h2>Environment</h2>{table}</section>\n" if rows else ""


def _tables(summary: Summary) -> str:
    parts = []
    for part in sections(summary):
        match part:
            case Grid():
                content = _table(part.title, part.header, part.rows, part.num_labels)
                parts.append(f"<section><h2>{_text(part.title)}</h2>{content}</section>\n")
            case Lines():
                mark = ' class="alarmed"' if part.is_alarm else ""
                title = f"<h2{' class=alarm' if part.is_alarm else ''}>{_text(part.title)}</h2>"
                if part.title != "Verdict":
                    parts.append(f"<section{mark}>{title}{_list(part.lines)}</section>\n")
    return "".join(parts)


def _table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    num_labels: int = 1,
    alarms: frozenset[int] | set[int] = frozenset(),
) -> str:
    """A sortable table; a wide one scrolls by itself, also by keyboard."""
    head = "".join(
        f'<th scope="col"><button type="button">{_text(title)}</button></th>' if title else "<td></td>"
        for title in header
    )
    lines = []
    for place, row in enumerate(rows):
        cells = [f'<th scope="row">{_text(row[0])}</th>', *(_cell(cell) for cell in row[1:])]
        lines.append(f"<tr{' class=alarm' if place in alarms else ''}>{''.join(cells)}</tr>\n")
    name = _text(caption)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}"><table>'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    """A number is sorted by its value: ``data-v`` has it without the thousands and the interval."""
    first = text.split(" ")[0].replace(",", "").replace("−", "-")
    try:
        value = float(first)
    except ValueError:
        return f'<td data-v="">{_text(text)}</td>' if text == ABSENT else f"<td>{_text(text)}</td>"
    return f'<td class="n" data-v="{value:g}">{_text(text)}</td>'


def _figures(summary: Summary, max_bytes: int) -> str:
    metric, parts, size = summary.metric, [], 0
    for figure in _each_figure(summary, metric):
        if figure is None:
            continue
        size += len(figure.encode())
        if size > max_bytes:
            parts.append("<p>Further figures are left out: the file would be too large.</p>")
            break
        parts.append(figure)
    return f"<section><h2>Figures</h2>{''.join(parts)}</section>\n" if parts else ""


def _each_figure(summary: Summary, metric: str) -> Iterable[str | None]:
    finals = [(arm.arm.name, _by_seed(summary, arm.arm.name, metric)) for arm in summary.arms]
    yield _figure(final_points(finals, f"{metric} at the end", metric), "Final values; lines join the runs of a seed")
    yield from _over_axes(summary, metric, metric, "runs thin, means thick")
    for key, caption in OVER_AXES.items():
        if key != metric:
            yield from _over_axes(summary, key, caption, key)
    for key, caption in OVER_STEP.items():
        if key != metric:
            yield _figure(_over(summary, key, "step", "step"), f"{caption} ({key})")
    kept = [
        ArmCurves(
            arm.arm.name, place, [curve] if (curve := share_not_collapsed(arm.arm.runs, metric, summary.rules)) else []
        )
        for place, arm in enumerate(summary.arms)
    ]
    yield _figure(
        curves(kept, "Share of runs not collapsed", "step", "share"), "Share of runs not collapsed, over step"
    )
    for arm in summary.arms[:8]:
        bands = [
            ArmCurves(band.removeprefix("mismatch/"), place, _series(arm.arm.done or arm.arm.runs, band, "step"))
            for place, band in enumerate(BANDS)
        ]
        title = f"Mismatch by probability band: {arm.arm.name}"
        yield _figure(curves(bands, title, "step", "nats", CLOSED_POINTS), title, False)
    for measure, (label, caption) in COST.items():
        yield _figure(scatter(_cost(summary, measure), f"{metric} against {caption}", label, metric),
                      f"Cost against quality: {metric} against {caption}", measure == "wall_s")  # fmt: skip


def _cost(summary: Summary, measure: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """Cost and metric of every done run, by arm."""
    found = []
    for arm in summary.arms:
        pairs = [
            (
                run.metrics.last("wall_s") if measure == "wall_s" else values.values.get(measure),
                values.values.get(metric),
            )
            for values in summary.runs
            if (run := values.run).is_done and values.arm == arm.arm.name
            for metric in (summary.metric,)
        ]
        points = [(x, y) for x, y in pairs if x is not None and y is not None]
        scale = 2**20 if measure == "memory/peak_bytes" else 1
        found.append((arm.arm.name, [(x / scale, y) for x, y in points]))
    return found


def _by_seed(summary: Summary, arm: str, metric: str) -> Mapping[str, float]:
    found = {}
    for values in summary.runs:
        value = values.values.get(metric)
        if values.arm == arm and value is not None and summary.rules.counts(values.run):
            found[values.run.seed] = value
    return found


def _over_axes(summary: Summary, key: str, caption: str, note: str) -> Iterable[str | None]:
    """Open over step; closed, and with fewer points, over the other axes."""
    for axis, label in AXES.items():
        is_open = axis == "step"
        drawing = _over(summary, key, axis, label, MAX_POINTS if is_open else CLOSED_POINTS)
        yield _figure(drawing, f"{caption}, over {label} ({note})", is_open)


def _over(summary: Summary, key: str, axis: str, label: str, max_points: int = MAX_POINTS) -> str | None:
    arms = [
        ArmCurves(arm.arm.name, place, _series(arm.arm.done or arm.arm.runs, key, axis))
        for place, arm in enumerate(summary.arms)
    ]
    return curves(arms, f"{key} over {label}", label, key, max_points)


def _series(runs: Iterable[RunRecord], key: str, axis: str) -> list[list[tuple[float, float]]]:
    """One curve per run that has any; a gap (null) is left out of it."""
    found = []
    for run in runs:
        pairs = [(number(row.get(axis)), number(row[key])) for row in run.metrics.rows if key in row]
        curve = [(x, y) for x, y in pairs if x is not None and y is not None]
        if curve:
            found.append(curve)
    return found


def _figure(drawing: str | None, caption: str, is_open: bool = True) -> str | None:
    if drawing is None:
        return None
    if is_open:
        return f"<figure>{drawing}<figcaption>{_text(caption)}</figcaption></figure>\n"
    return f"<details><summary>{_text(caption)}</summary><figure>{drawing}</figure></details>\n"
