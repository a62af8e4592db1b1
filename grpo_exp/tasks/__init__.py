"""Tasks: what is asked and what is rewarded, one small file each. No module here imports torch.

``build`` makes the task of a configuration; ``validate`` says beforehand, without importing the user's code, what is
wrong with it.
"""

import math

from grpo_exp.config.schema import TaskConfig, TaskName
from grpo_exp.errors import ConfigError, ConfigErrors
from grpo_exp.tasks import gym, jsonl, prompts, reverse, shortest, sort
from grpo_exp.tasks.types import Accuracy, Completion, RewardFunction, RewardSpec, Row, Task, text

__all__ = ["Accuracy", "Completion", "RewardFunction", "RewardSpec", "Row", "Task", "build", "text", "validate"]


OF_JSONL = ("path", "eval_path", "reward")
OF_GYM = ("dataset", "dataset_kwargs", "system_prompt")


def build(config: TaskConfig) -> Task:
    """The task of this configuration. Raises :class:`ConfigError` for whatever makes it impossible."""
    found = validate(config)
    if found:
        raise found[0] if len(found) == 1 else ConfigErrors(found)
    match config.name:
        case TaskName.reverse:
            return reverse.build(config)
        case TaskName.sort:
            return sort.build(config)
        case TaskName.shortest:
            return shortest.build(config)
        case TaskName.jsonl:
            return jsonl.build(config)
        case TaskName.reasoning_gym:
            return gym.build(config)
        case TaskName.python:
            raise _only_in_python()


def _only_in_python() -> ConfigError:
    shipped = [name.name for name in TaskName if name is not TaskName.python]
    fix = "the data were given in Python: go on there, with train(resume_from_checkpoint=True)"
    return ConfigError("task.name", TaskName.python.name, shipped, fix)


def validate(config: TaskConfig) -> list[ConfigError]:
    """Every problem that shows without torch and without importing a reward function."""
    found = common_problems(config)
    match config.name:
        case TaskName.reverse | TaskName.shortest:
            return found + prompts.problems(config, reverse.ALPHABET) + ignored(config, *OF_JSONL, *OF_GYM)
        case TaskName.sort:
            return found + prompts.problems(config, sort.ALPHABET) + ignored(config, *OF_JSONL, *OF_GYM)
        case TaskName.jsonl:
            return found + jsonl.problems(config) + ignored(config, *OF_GYM)
        case TaskName.reasoning_gym:
            return found + gym.problems(config) + ignored(config, *OF_JSONL)
        case TaskName.python:
            return [*found, _only_in_python()]


def common_problems(config: TaskConfig) -> list[ConfigError]:
    """What is wrong whatever the task is, also with prompts and functions that were given in Python."""
    found: list[ConfigError] = []
    if config.num_eval < 0:
        found.append(ConfigError("task.num_eval", config.num_eval, "0 or more prompts"))
    if config.max_completion_tokens < 1:
        found.append(ConfigError("task.max_completion_tokens", config.max_completion_tokens, "1 or more"))
    if not 0 < config.reward_timeout_s < math.inf:
        found.append(ConfigError("task.reward_timeout_s", config.reward_timeout_s, "seconds, more than 0"))
    return found


def ignored(config: TaskConfig, *names: str) -> list[ConfigError]:
    """Settings on a task that would ignore them: an error, so that nobody trains on the wrong data."""
    given = {name: getattr(config, name) for name in names}
    allowed = f"null with task={config.name.value}"
    return [
        ConfigError(f"task.{name}", value, allowed, f"add task={'jsonl' if name in OF_JSONL else 'reasoning_gym'}")
        for name, value in given.items()
        if value not in (None, {})
    ]
