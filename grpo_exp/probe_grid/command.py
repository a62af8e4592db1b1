"""``grpo-exp probe [KEY=VALUE…]``: mismatch of every cell of a grid, without training. Imports no torch until it measures.

Exit codes: 0; 1 if a cell failed that should have been possible; 2 for what the user can put right, also where no cell is
possible at all.
"""

import json
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..report.compare import terminal
from ..run import set_environment
from . import store
from .cells import base_config
from .figure import svg
from .settings import Arguments, parse
from .table import to_terminal


def main(argv: list[str]) -> int:
    """Run the command with the arguments after ``probe``; returns the exit code.

    Raises:
        ConfigErrors: for a grid, a model or prompts that cannot be had.
    """
    try:
        arguments = parse(argv)
    except SystemExit as end:
        return int(end.code or 0)
    config = base_config(arguments.overrides, arguments.settings)
    set_environment(config)
    folder = store.new_folder(arguments.out, config.model.name_or_path)
    try:
        report = _measure(arguments, config, folder)
    finally:
        if not any(folder.iterdir()):  # it ended before anything was known
            folder.rmdir()
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        to_terminal(report, terminal())
        print(f"{folder}: {store.REPORT}, {store.TOKENS} and {store.FIGURE}")
    return exit_code(report)


def _measure(arguments: Arguments, config: Config, folder: Path) -> dict[str, Any]:
    """The report, compared with the earlier probe if there is one, and on disk."""
    from transformers.utils import logging

    from .against import check, compare
    from .measure import Measurement

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    grid = Measurement(arguments, config, folder)
    if arguments.against is not None:
        check(arguments.against, grid.report, grid.arrays)
    grid.run()
    if arguments.against is not None:
        grid.report["against"] = compare(arguments.against, grid.report, grid.arrays)
        store.write(folder, grid.report, grid.arrays)
    (folder / store.FIGURE).write_text(svg(grid.report), encoding="utf-8")
    return grid.report


def exit_code(report: dict[str, Any]) -> int:
    entries = report["generators"] + report["cells"]
    if any(entry["failed"] for entry in entries):
        return 1
    return 0 if any(cell["statistics"] for cell in report["cells"]) else 2
