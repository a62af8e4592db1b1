"""The command line: ``grpo-exp [overrides]``, ``-m`` for sweeps, and a few commands. Imports no torch."""

import difflib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .distributed.follow import dismiss, follow
from .distributed.launched import launched
from .errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from .config.compose import Composed

COMMANDS = ("cancel", "compare", "fetch-model", "plan", "probe", "resume", "status", "sync")


def main() -> None:
    """Entry point of ``grpo-exp``."""
    try:
        code = follow() if launched().rank > 0 else dispatch(sys.argv[1:])
        sys.stdout.flush()
    except ConfigError as error:
        code = complain(error, 2)
    except RunFailed as error:
        code = complain(error, 1)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # "| head" has seen enough; without this, Python complains again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    if launched().num_ranks > 1 and launched().leads:
        dismiss(code)
    sys.exit(code)


def complain(error: Exception, code: int) -> int:
    for line in str(error).splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code


def dispatch(argv: list[str]) -> int:
    match argv:
        case ["compare", *rest]:
            from .report.compare import main as compare

            return compare(rest)
        case ["status", *rest]:
            from .launch.status import main as status

            return status(rest)
        case ["cancel", *rest]:
            from .launch.status import cancel

            return cancel(rest)
        case ["resume", *rest]:
            return resume(rest)
        case ["sync", *rest]:
            from .report.load import is_running, run_folders
            from .track.sync import main as sync

            return sync(rest, run_folders, is_running)
        case ["fetch-model", *rest]:
            from .fetch import main as fetch

            return fetch(rest)
        case ["plan", *rest]:
            from .plan.command import main as plan

            return plan(rest)
        case ["probe", *rest]:
            from .probe_grid.command import main as probe

            return probe(rest)
        case ["--version"]:
            from . import __version__

            print(f"grpo-exp {__version__}")
            return 0
        case [word, *_] if word.replace("-", "_").isidentifier() and not word.startswith("-"):
            near = difflib.get_close_matches(word, COMMANDS, n=1)
            fix = f"did you mean {near[0]}?" if near else "grpo-exp --help explains them"
            raise ConfigError("command", word, ["KEY=VALUE", *COMMANDS], fix)
        case _:
            from .checks import find_problems
            from .config.compose import run_app

            return run_app(argv, run_one, find_problems)


def run_one(job: "Composed") -> int:
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
