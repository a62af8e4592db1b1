"""What the overview of a run shows in wandb: how it ended, its best values, and the dtypes that were in effect."""

import json
import math
from collections.abc import Iterable
from pathlib import Path

from grpo_exp import jsonl
from grpo_exp.jsonl import Json

SUMMARIZED = ("eval/accuracy", "eval/accuracy_greedy", "eval/reward", "reward/mean")
"""Metrics of which higher is better."""


def summary(run_dir: Path) -> dict[str, Json]:
    """``final/KEY`` and ``best/KEY`` of these metrics, and ``observed/SITE``: the dtype of each precision site as seen last."""
    found: dict[str, Json] = {}
    rows = jsonl.read(run_dir / "metrics.jsonl")
    for key in SUMMARIZED:
        values = [value for row in rows if isinstance(value := row.get(key), int | float) and math.isfinite(value)]
        if values:
            found |= {f"final/{key}": values[-1], f"best/{key}": max(values)}
    return found | {f"observed/{site}": dtype for site, dtype in observed(run_dir)}


def observed(run_dir: Path) -> Iterable[tuple[str, str]]:
    """Site and dtype from manifest.json; nothing where the run ended before there was anything to see."""
    try:
        stages = json.loads((run_dir / "manifest.json").read_text())["precision"]["observed"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    seen: dict[str, str] = {}
    for stage in stages.values():  # in the order of the run
        seen |= stage
    return sorted(seen.items())
