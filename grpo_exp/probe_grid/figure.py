"""The figure of a probe: mean |d| of every cell with its interval, on a logarithmic axis. Plain SVG, nothing else needed."""

import math
from collections.abc import Callable
from html import escape
from typing import Any

from .table import labels

COLOURS = {"fp32": "#1b7837", "bf16": "#c2410c", "fp16": "#2563eb"}  # of the trainer
ROW, PLOT, TOP, BOTTOM, MARGIN = 26, 560, 70, 60, 30
LETTER = 7.3  # width, at most on average
SMALLEST = 1e-9  # what is smaller is drawn at the left edge


def svg(report: dict[str, Any]) -> str:
    """An SVG document; a cell that was not measured has no row."""
    cells = [cell for cell in report["cells"] if cell["statistics"]]
    names = [" → ".join(label) for label in labels(cells)[1:]]
    low, high = _decades(cells)
    left = MARGIN + LETTER * max(map(len, names), default=0)
    width, bottom = left + PLOT + MARGIN, TOP + ROW * len(cells)

    def x(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return left + min(1.0, share) * PLOT

    title = "How far trainer and generator are apart on the same weights"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {bottom + BOTTOM}"'
        ' font-family="system-ui, sans-serif" font-size="13" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width:.0f}" height="{bottom + BOTTOM}" fill="white"/>',
        f'<text x="16" y="28" font-size="16" font-weight="600">{title}</text>',
        f'<text x="16" y="48" fill="#555">{escape(_subtitle(report))}</text>',
    ]
    for power in range(low, high + 1):
        at = f"{x(10.0**power):.1f}"
        parts.append(f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{at}" y="{bottom + 20}" text-anchor="middle">1e{power}</text>')
    for index, (name, cell) in enumerate(zip(names, cells, strict=True)):
        parts += _row(escape(name), cell, left, TOP + ROW * index + ROW / 2, x)
    middle = left + PLOT / 2
    parts.append(f'<text x="{middle:.0f}" y="{bottom + 44}" text-anchor="middle">mean |d| per token, nats</text>')
    return "\n".join([*parts, "</svg>", ""])


def _row(name: str, cell: dict[str, Any], left: float, y: float, x: Callable[[float], float]) -> list[str]:
    found = cell["statistics"]["abs_mean"]
    value, half = found["value"], found["half_width"] or 0.0
    colour = COLOURS.get(cell["compute"], "#555")
    return [
        f'<text x="{left - 12:.0f}" y="{y + 4:.1f}" text-anchor="end">{name}</text>',
        f'<line x1="{x(value - half):.1f}" x2="{x(value + half):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"'
        ' stroke-width="2"/>',
        f'<circle cx="{x(value):.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{name}: {value:.3g}</title></circle>',
    ]


def _decades(cells: list[dict[str, Any]]) -> tuple[int, int]:
    """The powers of ten that the axis spans."""
    values = [max(SMALLEST, cell["statistics"]["abs_mean"]["value"]) for cell in cells] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _subtitle(report: dict[str, Any]) -> str:
    grid = report["grid"]
    return (
        f"{report['model']['name']}, {grid['num_prompts'] * grid['num_completions']} completions of at most"
        f" {grid['max_new_tokens']} tokens, temperature {report['temperature']:g}"
    )
