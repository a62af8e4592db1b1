"""Small runs of the whole loop in this process, and what they leave behind."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo_exp import AsyncGRPOConfig, AsyncGRPOTrainer, jsonl
from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.schema import Config
from grpo_exp.tasks import Row, build

LOCKSTEP = "rollout=lockstep"
TIMES = ("time", "wall_s", "probe/share")


@cache
def composed(groups: tuple[str, ...]) -> DictConfig:
    return compose(["debug=smoke", "precision=fp32", *groups]).config


def small_config(*overrides: str) -> Config:
    """The configuration of ``grpo-exp debug=smoke precision=fp32 OVERRIDES``, with option names before single keys."""
    keys = [override for override in overrides if "." in override.partition("=")[0]]
    groups = tuple(override for override in overrides if override not in keys)
    return to_typed(OmegaConf.merge(composed(groups), OmegaConf.from_dotlist(keys)))


def small_trainer(
    path: Path, *overrides: str, train: Sequence[Row] | None = None, **arguments: Any
) -> AsyncGRPOTrainer:
    """A trainer as the command line builds it; ``train`` replaces the prompts of the task."""
    config = small_config(*overrides)
    task = build(config.task)
    given: dict[str, Any] = {"reward_funcs": task.reward_funcs, "eval_dataset": task.eval, "accuracy": task.accuracy}
    return AsyncGRPOTrainer(
        config.model.name_or_path,
        args=AsyncGRPOConfig.from_config(config, str(path)),
        train_dataset=task.train if train is None else train,
        **given | arguments,
    )


def metrics(path: Path) -> list[dict[str, Any]]:
    return jsonl.read(path / "metrics.jsonl")


def events(path: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in jsonl.read(path / "events.jsonl") if row["event"] == name]


def status(path: Path) -> dict[str, Any]:
    return jsonl.read_json(path / "status.json")


def trained_prompts(path: Path) -> list[int]:
    """Rows of the data set in the order in which steps trained them."""
    return [prompt for row in jsonl.read(path / "trained.jsonl") for prompt in row["prompts"]]


def repeatable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock and the machine."""
    return [
        {key: value for key, value in row.items() if key not in TIMES and not key.startswith(("perf/", "memory/"))}
        for row in rows
    ]


def check_groups(path: Path) -> None:
    """Every group that was started has exactly one end."""
    groups = status(path)["groups"]
    assert groups["started"] == sum(count for name, count in groups.items() if name != "started"), groups
