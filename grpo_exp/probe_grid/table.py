"""The report of a probe for people: tables of what was measured, and what was not with the reason."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ..report.layout import Grid, Lines
from ..report.render import print_part
from .cells import with_head

Statistics = dict[str, dict[str, float | None]]

RATIOS = {  # statistic → title, with interval
    "abs_mean": ("mean |d|", True),
    "sd": ("sd", False),
    "abs_p95": ("p95 |d|", False),
    "abs_max": ("max |d|", False),
    "outside": ("out %", False),
    "k1": ("k1", False),
    "k3": ("k3", False),
}
SEQUENCES = {
    "sequence_abs": ("mean |sum d|", True),
    "drift_slope": ("drift per 1000", True),
    "relative_trainer": ("trainer %", True),
    "relative_rollout": ("generator %", True),
}
PERCENT = {"outside", "relative_trainer", "relative_rollout"}


def to_terminal(report: dict[str, Any], console: Console) -> None:
    for part in sections(report):
        print_part(part, console)


def sections(report: dict[str, Any]) -> list[Grid | Lines]:
    parts: list[Grid | Lines] = [_about(report)]
    measured = [cell for cell in report["cells"] if cell["statistics"]]
    if measured:
        parts += [
            _grid("Log-ratios d = trainer - generator of the sampled tokens, nats", measured, RATIOS),
            _grid("Per sequence, and errors relative to the trainer in fp32", measured, SEQUENCES),
        ]
    if report["batch_floor"]:
        parts.append(_floor(report["batch_floor"]))
    if report.get("against"):
        parts += _against(report["against"])
    if missing := _missing(report):
        parts.append(Lines("Not measured", tuple(missing), is_alarm=True))
    return parts


def _about(report: dict[str, Any]) -> Lines:
    grid, model = report["grid"], report["model"]
    source = "" if model["source"] == "as named" else f", {model['source']}"
    sampled = [one for one in report["generators"] if one.get("num_tokens")]
    lines = [
        f"model {model['name']}{source}",
        f"{grid['num_prompts']} prompts ({grid['prompts_from']}), {grid['num_completions']} × at most"
        f" {grid['max_new_tokens']} tokens each, temperature {report['temperature']:g}, seed {report['seed']}",
        *(
            f"{one['label']}: {one['num_tokens']:,} tokens sampled in {one['seconds']:.0f} s"
            f" ({one['num_tokens'] / one['seconds']:.0f} a second)"
            for one in sampled
        ),
        "± is half of the 95% t-interval over sequences",
    ]
    return Lines(f"Probe on {report['device']}", tuple(lines))


def _grid(title: str, cells: Sequence[dict[str, Any]], columns: dict[str, tuple[str, bool]]) -> Grid:
    present = {key: entry for key, entry in columns.items() if any(key in cell["statistics"] for cell in cells)}
    names = labels(cells)
    rows = (
        (*label, *(_cell(cell["statistics"], key, wide) for key, (_, wide) in present.items()))
        for label, cell in zip(names[1:], cells, strict=True)
    )
    return Grid(title, (*names[0], *(name for name, _ in present.values())), tuple(rows), len(names[0]))


def labels(cells: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """What cells are called, after a header; the size of micro-batches where there are several."""
    several = len({cell["micro_batch"] for cell in cells}) > 1
    rows = [("generator", "trainer", "batch")]
    rows += [(c["generator"], with_head(c["compute"], c["head"]), str(c["micro_batch"])) for c in cells]
    return [row if several else row[:2] for row in rows]


def _cell(statistics: Statistics, key: str, with_interval: bool) -> str:
    found = statistics.get(key)
    if found is None or found["value"] is None:
        return "–"
    scale = 100.0 if key in PERCENT else 1.0
    value, half = found["value"] * scale, found["half_width"]
    if with_interval and half is not None:
        return f"{number(value)} ± {number(half * scale, 2)}"
    return number(value, 2)


def number(value: float, digits: int = 3) -> str:
    """Significant digits, without an exponent where that is short."""
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def _floor(entries: Sequence[dict[str, Any]]) -> Grid:
    header = ("generator", "trainer", "batch", "mean |difference|", "sd", "max")
    rows = (
        (
            entry["generator"],
            with_head(entry["compute"], entry["head"]),
            f"{entry['micro_batch']} - {entry['against']}",
            _cell(entry["statistics"], "abs_mean", True),
            _cell(entry["statistics"], "sd", False),
            _cell(entry["statistics"], "abs_max", False),
        )
        for entry in entries
    )
    return Grid("Noise floor: the same trainer with another micro-batch size, nats", header, tuple(rows), num_labels=3)


def _against(against: dict[str, Any]) -> list[Grid | Lines]:
    lines = Lines("Against an earlier probe", (against["folder"], f"made {against['created']}", *against["differs"]))
    generators = Grid(
        "Generators: log-probabilities of the tokens that both probes sampled, up to where they part, nats",
        ("generator", "same tokens", "mean |change|", "max"),
        tuple(
            (one["label"], f"{100 * one['shared']:.1f} %", number(one["abs_mean"]), number(one["abs_max"]))
            for one in against["generators"]
        ),
    )
    cells = Grid(
        "Trainers: the same of these tokens; mean |d| of all tokens before and now, and the difference paired by sequence, nats",
        ("generator", "trainer", "mean |change|", "max", "mean |d| before", "now", "now - before"),
        tuple(
            (
                one["generator"],
                one["trainer"],
                number(one["abs_mean"]),
                number(one["abs_max"]),
                number(one["before"]),
                number(one["now"]),
                _difference(one),
            )
            for one in against["cells"]
        ),
        num_labels=2,
    )
    return [lines, generators, cells]


def _difference(one: dict[str, Any]) -> str:
    half = one["difference_half_width"]
    return number(one["difference"]) + ("" if half is None else f" ± {number(half, 2)}")


def _missing(report: dict[str, Any]) -> list[str]:
    lines = []
    for one in report["generators"]:
        if text := one["refused"] or one["failed"]:
            lines.append(f"{one['label']}: {text}")
    cells = {(cell["trainer"], text) for cell in report["cells"] if (text := cell["refused"] or cell["failed"])}
    return lines + [f"trainer {trainer}: {text}" for trainer, text in sorted(cells)]
