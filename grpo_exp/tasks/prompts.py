"""Random strings as prompts, shared by the tasks that need no data: distinct, split into train and eval, repeatable.

Only :class:`random.Random` is used, so that the same seed gives the same prompts on every machine.
"""

import random

from grpo_exp.config.schema import TaskConfig
from grpo_exp.errors import ConfigError

MAX_LENGTH = 64


def draw(config: TaskConfig, alphabet: str) -> tuple[list[str], list[str]]:
    """``num_train`` and ``num_eval`` strings of ``length`` characters; no string occurs twice, also not across the two.

    The evaluation strings are drawn first: they stay the same when ``num_train`` changes.
    """
    rng = random.Random(f"{config.seed}/{config.length}/{alphabet}")
    strings: dict[str, None] = {}
    while len(strings) < config.num_eval + config.num_train:
        strings["".join(rng.choice(alphabet) for _ in range(config.length))] = None
    drawn = list(strings)
    return drawn[config.num_eval :], drawn[: config.num_eval]


def problems(config: TaskConfig, alphabet: str) -> list[ConfigError]:
    """Why :func:`draw` could not be called with this configuration; empty when it can."""
    found: list[ConfigError] = []
    if not 1 <= config.length <= MAX_LENGTH:
        return [ConfigError("task.length", config.length, f"1 to {MAX_LENGTH} characters")]
    if config.num_train < 1:
        found.append(ConfigError("task.num_train", config.num_train, "1 or more prompts"))
    # Half of all strings at most: the draw repeats itself ever more often as the strings run out.
    available = len(alphabet) ** config.length // 2
    if config.num_train + max(config.num_eval, 0) > available:
        fix = f"task.length={config.length} has room for {available}; lower task.num_train or raise task.length"
        allowed = f"task.num_train + task.num_eval <= {available}"
        found.append(ConfigError("task.num_train", config.num_train, allowed, fix))
    return found
