"""``grpo-exp compare PATH…``: the summary of a sweep, or of any run folders, as a table for people or for programs; with
``--wandb ENTITY/PROJECT`` of runs that are in wandb.

Exit codes: 0, 1 if wandb does not answer, 2 for what the user can put right, 3 when ``--fail-if-confounded`` is given and
arms differ in more than the declared factors.
"""

import argparse
import io
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ..arguments import Parser
from ..errors import ConfigError, RunFailed
from .export import to_csv, to_json
from .load import ORIGIN, find_runs
from .render import to_markdown, to_terminal
from .tables import Summary, summarise

PLAIN_WIDTH = 100  # columns, where the output is no terminal


def main(argv: list[str]) -> int:
    """Run the command with the arguments after ``compare``; returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    with TemporaryDirectory(prefix="grpo-exp-") as folder:
        try:
            return _compare(arguments, Path(folder))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except RunFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1


def _compare(arguments: argparse.Namespace, folder: Path) -> int:
    """What runs in wandb have is read into a folder first."""
    if (arguments.wandb is None) == (not arguments.paths):
        raise ConfigError("PATH", " ".join(map(str, arguments.paths)), "run folders, or --wandb ENTITY/PROJECT")
    if arguments.group is not None and arguments.wandb is None:
        raise ConfigError("--group", arguments.group, "with --wandb ENTITY/PROJECT")
    if arguments.artifact is not None and arguments.html is None:
        raise ConfigError("--artifact", arguments.artifact, "with --html FILE")
    if arguments.wandb is not None:
        from ..track.wandb_files import download

        download(arguments.wandb, arguments.group, folder, ORIGIN)
    summary = summarise(find_runs(arguments.paths or [folder]), arguments.baseline, arguments.metric)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an old locale has no ±
    try:
        _print(summary, arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # "| head" has seen enough; without this, Python complains again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 3 if arguments.fail_if_confounded and summary.is_confounded else 0


def _print(summary: Summary, arguments: argparse.Namespace) -> None:
    if arguments.html is not None:
        _write_html(summary, arguments.html)
        if arguments.artifact is not None:
            from ..track.wandb_files import upload_report

            upload_report(arguments.html, arguments.artifact)
            print(f"logged in wandb: {arguments.artifact}")
        return
    if arguments.json:
        print(to_json(summary))
    elif arguments.csv:
        print(to_csv(summary), end="")
    elif arguments.md:
        print(to_markdown(summary), end="")
    else:
        to_terminal(summary, terminal())


def _write_html(summary: Summary, path: Path) -> None:
    from .html import to_html

    try:
        path.write_text(to_html(summary), encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError("--html", str(path), fix=f"it cannot be written ({error.strerror})") from None
    print(f"written: {path}")


def render(paths: Iterable[Path], console: Console, baseline: str | None = None, metric: str | None = None) -> Summary:
    """Print the comparison of some runs or sweeps, as at the end of a sweep.

    Raises:
        ConfigError: a path holds no run, no arm is the baseline, or no run has the metric.
    """
    summary = summarise(find_runs(paths), baseline, metric)
    to_terminal(summary, console)
    return summary


def terminal() -> Console:
    """Standard output. Highlighting is off: it would colour digits inside names."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_sized else PLAIN_WIDTH)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="grpo-exp compare",
        description="Compare runs: arms against a baseline, with intervals over seeds and a check for confounds.",
        epilog="Exit code 1: wandb does not answer. Exit code 2: nothing to compare, or a wrong argument. Exit code 3: see --fail-if-confounded.",
    )
    parser.add_argument(
        "paths", nargs="*", type=_path, metavar="PATH", help="a run folder, or a folder with runs in it"
    )
    parser.add_argument("--wandb", metavar="ENTITY/PROJECT", help="instead of folders: the runs of a project in wandb")
    parser.add_argument("--artifact", metavar="ENTITY/PROJECT", help="with --html: log the file in wandb as well")
    parser.add_argument("--group", metavar="SWEEP", help="with --wandb: the runs of one sweep alone")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="everything, with the raw values of each run")
    output.add_argument("--md", action="store_true", help="GitHub Markdown")
    output.add_argument(
        "--html", type=_path, metavar="FILE", help="one file for a browser, with curves; needs no network"
    )
    output.add_argument("--csv", action="store_true", help="one row per run")
    parser.add_argument(
        "--baseline", metavar="ARM", help="e.g. precision=fp32; by default what the sweep declares, else the first arm"
    )
    parser.add_argument(
        "--metric", metavar="KEY", help="what is compared; by default what the sweep declares, else eval/accuracy"
    )
    parser.add_argument(
        "--fail-if-confounded", action="store_true", help="exit code 3 if arms differ in more than the declared factors"
    )
    return parser


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty path")
    return Path(text)
