"""Numbers as text: as many digits as their size and their neighbours ask for."""

from .load import ABSENT


def decimals_for(*sizes: float) -> int | None:
    """Decimals for numbers shown side by side; None asks for significant digits instead."""
    size = max(sizes)
    if size == 0 or 0.01 <= size < 10:
        return 3
    if size < 0.01:
        return None
    return 2 if size < 100 else 1 if size < 1000 else 0


def plain(value: float | None, decimals: int | None = None, sign: str = "") -> str:
    if value is None:
        return ABSENT
    if decimals is None:
        decimals = decimals_for(abs(value))
    if decimals is None:
        return format(value, f"{sign}.3g")
    text = format(value, f"{sign},.{decimals}f")
    return text.replace("-", "+" if sign else "", 1) if not text.strip("-0.,") else text


def in_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
