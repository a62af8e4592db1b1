"""What the text and the page of a comparison are made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_labels: int = 1  # columns of words, before those of numbers


@dataclass(frozen=True)
class Lines:
    """A titled list. ``is_alarm``: the reader must not miss it."""

    title: str
    lines: tuple[str, ...]
    is_alarm: bool = False
