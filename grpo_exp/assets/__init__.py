"""Files that ship inside the package. ``tiny`` is the 0.1 M-parameter model that ``scripts/build_tiny_model.py`` builds."""

from pathlib import Path


def path(name: str) -> Path:
    """The absolute path of a shipped file or folder; ``FileNotFoundError`` where there is none of that name."""
    found = Path(__file__).resolve().parent / name
    if not found.exists():
        raise FileNotFoundError(f"grpo_exp ships no asset named {name!r}")
    return found


PREFIX = "asset:"


def locate(name_or_path: str) -> str:
    """``asset:NAME`` as a path of this installation; anything else as it is.

    Configurations name shipped models with the prefix, so that a frozen configuration is the same on every machine.
    """
    return str(path(name_or_path.removeprefix(PREFIX))) if name_or_path.startswith(PREFIX) else name_or_path
