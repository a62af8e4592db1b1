"""Files that ship inside the package. ``tiny`` is the 0.1 M-parameter model that ``scripts/build_tiny_model.py`` builds."""

from pathlib import Path


def path(name: str) -> Path:
    """The absolute path of a shipped file or folder; ``FileNotFoundError`` where there is none of that name."""
    found = Path(__file__).resolve().parent / name
    if not found.exists():
        raise FileNotFoundError(f"grpo_exp ships no asset named {name!r}")
    return found
