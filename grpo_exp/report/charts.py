"""Figures as SVG text: curves per seed with the mean of each arm, final points with paired lines, cost against quality.

Colours are classes of the page, so that one figure serves light and dark; every arm also has its own dash and its name
at the side, so that no reader depends on colour. Coordinates are rounded and curves thinned to a budget of points, which
keeps the file small and its bytes the same everywhere.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from .stats import mean

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, SIDE = 760, 260, 62, 12, 40, 190
MAX_POINTS = 3000  # of one figure
MEAN_POINTS = 200  # of a mean of runs whose points lie at different places
STYLES = 8

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class ArmCurves:
    """``curves`` of single runs, and ``index``, which picks colour and dash."""

    name: str
    index: int
    curves: Sequence[Points]


def style(index: int) -> str:
    """Eight colours and eight dashes; beyond eight arms the pairs differ."""
    return f"s{index % STYLES} d{(index + index // STYLES) % STYLES}"


@dataclass(frozen=True)
class Axes:
    """A linear map of the data into the frame."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, xs: Sequence[float], ys: Sequence[float]) -> "Axes":
        (x0, x1), (y0, y1) = _padded(xs, 0.0), _padded(ys, 0.05)
        return cls(x0, x1, y0, y1)

    def at(self, x: float, y: float) -> tuple[str, str]:
        across = LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - SIDE - LEFT)
        down = HEIGHT - BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - BOTTOM - TOP)
        return short(across), short(down)

    def frame(self, x_label: str, y_label: str) -> str:
        parts = [f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - SIDE}"/>']
        for step in range(5):
            y = self.y0 + (self.y1 - self.y0) * step / 4
            parts.append(f'<text x="{LEFT - 6}" y="{self.at(self.x0, y)[1]}" text-anchor="end">{tick(y)}</text>')
        if x_label:
            for step in range(5):
                x = self.x0 + (self.x1 - self.x0) * step / 4
                across = self.at(x, self.y0)[0]
                parts.append(f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick(x)}</text>')
            middle = (LEFT + WIDTH - SIDE) / 2
            parts.append(f'<text x="{middle:g}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
        parts.append(f'<text x="{LEFT + 6}" y="{TOP + 6}">{escape(y_label)}</text>')
        return "".join(parts)


def _padded(values: Sequence[float], share: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low - share * (high - low), high + share * (high - low)


def short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def tick(value: float) -> str:
    """At most eight characters, for which there is room left of the frame: 65.5k, 1.2M, 0.0123, 4.2e-05."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / min(size, 1e3 if unit == 'k' else size):.3g}{unit}"
    if abs(value) >= 100:
        return f"{value:.0f}" if abs(value) < 1e4 else f"{value:.1e}"
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}" if abs(value) > 1e-99 else "0"


def svg(body: str, title: str, height: int = HEIGHT) -> str:
    name = escape(title)
    return f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-label="{name}">{body}</svg>'


def curves(
    arms: Sequence[ArmCurves], title: str, x_label: str, y_label: str, max_points: int = MAX_POINTS
) -> str | None:
    """Thin lines per run and a thick mean per arm; None where there is nothing to draw.

    The mean is drawn where every run of the arm has a value, so that a run that ends early never moves it.

    Args:
        max_points: of all lines together, about.
    """
    everything = [point for arm in arms for curve in arm.curves for point in curve]
    if not everything:
        return None
    axes = Axes.around([x for x, _ in everything], [y for _, y in everything])
    num_lines = sum(len(arm.curves) for arm in arms) + len(arms)
    budget = max(6, max_points // num_lines)
    parts = [axes.frame(x_label, y_label)]
    for arm in arms:
        thin = "".join(_path(curve, axes, budget) for curve in arm.curves)
        parts.append(f'<path class="thin {style(arm.index)}" d="{thin}"/>' if thin and len(arm.curves) > 1 else "")
    for arm in arms:
        centre = mean_curve(arm.curves)
        if centre:
            parts.append(f'<path class="bold {style(arm.index)}" d="{_path(centre, axes, budget)}"/>')
    return svg("".join(parts) + legend([(arm.name, arm.index) for arm in arms if arm.curves]), title)


def mean_curve(found: Sequence[Points]) -> Points:
    """The mean of some curves where all have a value.

    That is at the places they share. Where they share few (tokens, seconds: each run has its own) it is over the range
    that all of them cover, each run taken along the line between two of its points.
    """
    if not found:
        return []
    by_x: dict[float, list[float]] = {}
    for curve in found:
        for x, y in dict(curve).items():
            by_x.setdefault(x, []).append(y)
    shared = [(x, mean(ys)) for x, ys in sorted(by_x.items()) if len(ys) == len(found)]
    # the place before the first step is always shared, and a count of tokens may be by chance
    are_aligned = 2 * len(shared) >= min(len(dict(curve)) for curve in found)
    return shared if are_aligned else _mean_between(found, sorted(by_x)) or shared


def _mean_between(found: Sequence[Points], places: Sequence[float]) -> Points:
    ordered = [sorted(dict(curve).items()) for curve in found]
    low, high = max(curve[0][0] for curve in ordered), min(curve[-1][0] for curve in ordered)
    inner = [(x, 0.0) for x in places if low <= x <= high]
    return [(x, mean([_between(curve, x) for curve in ordered])) for x, _ in thinned(inner, MEAN_POINTS)]


def _between(curve: Points, x: float) -> float:
    """A curve in order of x, on the line between its points on either side of a place within it."""
    place = bisect_left(curve, x, key=lambda point: point[0])
    x1, y1 = curve[place]
    if x1 == x:
        return y1
    x0, y0 = curve[place - 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _path(points: Points, axes: Axes, budget: int) -> str:
    """From point to point by the way between the two, each rounded as :func:`short` does: a third shorter than places."""
    (x0, y0), *rest = (_in_tenths(*axes.at(x, y)) for x, y in thinned(points, budget))
    start = f"M{x0 / 10:g} {y0 / 10:g}"
    if not rest:
        return f"{start}h3"
    steps = []
    for x, y in rest:
        steps.append(f"{_tenths(x - x0)}{_tenths(y - y0)}")
        x0, y0 = x, y
    return f"{start}l{''.join(steps).strip()}"


def _in_tenths(across: str, down: str) -> tuple[int, int]:
    return round(10 * float(across)), round(10 * float(down))


def _tenths(value: int) -> str:
    """With the sign or the space that keeps it from the number before."""
    text = f"{abs(value) / 10:g}".removeprefix("0") or "0"
    return f"{'-' if value < 0 else ' '}{text}"


def thinned(points: Points, budget: int) -> Points:
    """At most about ``budget`` points at even distances in the row, with the first and the last."""
    if len(points) <= budget:
        return points
    stride = math.ceil((len(points) - 1) / (budget - 1))
    return [*points[:-1:stride], points[-1]]


def legend(names: Sequence[tuple[str, int]]) -> str:
    """At the right; beyond fifteen arms the rest is counted, as the tables have them."""
    parts, x = [], WIDTH - SIDE + 12
    for place, (name, index) in enumerate(names[:15]):
        y = TOP + 6 + 15 * place
        shown = name if len(name) <= 22 else name[:21] + "…"
        parts.append(
            f'<path class="bold {style(index)}" d="M{x} {y - 4}h28"/><text x="{x + 34}" y="{y}">{escape(shown)}</text>'
        )
    if len(names) > 15:
        parts.append(f'<text x="{x}" y="{TOP + 6 + 225}">and {len(names) - 15} more arms</text>')
    return "".join(parts)


def final_points(arms: Sequence[tuple[str, Mapping[str, float]]], title: str, y_label: str) -> str | None:
    """A column of points per arm, one per seed; a seed is joined from each arm to the next that has it."""
    values = [value for _, found in arms for value in found.values()]
    if not values:
        return None
    axes = Axes.around([-0.5, len(arms) - 0.5], values)
    parts = [axes.frame("", y_label)]
    for place, ((_, left), (_, right)) in enumerate(pairwise(arms)):
        for seed in [seed for seed in left if seed in right][:200]:
            (x1, y1), (x2, y2) = axes.at(place, left[seed]), axes.at(place + 1, right[seed])
            parts.append(f'<path class="pair" d="M{x1} {y1}L{x2} {y2}"/>')
    for place, (name, found) in enumerate(arms):
        for seed, value in list(found.items())[:200]:
            x, y = axes.at(place, value)
            parts.append(
                f'<circle class="dot s{place % STYLES}" cx="{x}" cy="{y}" r="4"><title>{escape(name)}, seed {escape(seed)}: {value:.4g}</title></circle>'
            )
        if len(arms) <= 12:
            x = axes.at(place, axes.y0)[0]
            label = name.rpartition("=")[2][:12]
            parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(label)}</text>')
    return svg("".join(parts) + legend([(name, place) for place, (name, _) in enumerate(arms)]), title)


def scatter(arms: Sequence[tuple[str, Points]], title: str, x_label: str, y_label: str) -> str | None:
    """One point per run."""
    everything = [point for _, points in arms for point in points]
    if not everything:
        return None
    xs, ys = [x for x, _ in everything], [y for _, y in everything]
    axes = Axes.around([min(xs) * 0.95, max(xs) * 1.05], ys)
    parts = [axes.frame(x_label, y_label)]
    for place, (name, points) in enumerate(arms):
        for point in points[:200]:
            x, y = axes.at(*point)
            parts.append(
                f'<circle class="dot s{place % STYLES}" cx="{x}" cy="{y}" r="4"><title>{escape(name)}</title></circle>'
            )
    return svg("".join(parts) + legend([(name, place) for place, (name, _) in enumerate(arms)]), title)
