"""The command line: ``grpo-exp [overrides]``, ``-m`` for sweeps, and a few commands. Imports no torch."""

import sys
from pathlib import Path

from .errors import ConfigError

COMMANDS = {
    "compare": "what came of some runs, side by side",
    "resume": "go on from the last checkpoint of a run folder",
}


def main() -> None:
    """Entry point of ``grpo-exp``."""
    argv = sys.argv[1:]
    try:
        sys.exit(dispatch(argv))
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def dispatch(argv: list[str]) -> int:
    match argv:
        case ["compare", *rest]:
            from .report.compare import main as compare

            return compare(rest)
        case ["resume", *rest]:
            return resume(rest)
        case [word, *_] if word.isidentifier():
            known = "".join(f"\n  {name:8} {what}" for name, what in COMMANDS.items())
            raise ConfigError("command", word, f"KEY=VALUE overrides, or one of:{known}")
        case _:
            from .config.compose import run_app

            return run_app(argv, run_one)


def run_one(job: "Composed") -> int:  # type: ignore[name-defined]  # noqa: F821
    """A single run: make its folder, run it here."""
    from .launch.local import run_here

    return run_here(job)


def resume(argv: list[str]) -> int:
    """``grpo-exp resume RUN``."""
    from .run import execute

    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError("resume", " ".join(argv), "one run folder: grpo-exp resume RUN")
    path = Path(argv[0]).resolve()
    if not (path / "config.yaml").is_file():
        raise ConfigError("resume", argv[0], "a run folder (it has a config.yaml)")
    return execute(path, resume=True)
