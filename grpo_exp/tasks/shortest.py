"""Say as little as possible: the reward is minus the number of tokens.

Nothing about the answer matters, so the best policy ends at once. It is reached by a policy gradient that is right and
missed by one that clips where it should not ("phantom clips"): a task that tells a broken ratio from a working one.
"""

from typing import Any

from grpo_exp.config.schema import TaskConfig
from grpo_exp.tasks import reverse
from grpo_exp.tasks.prompts import draw
from grpo_exp.tasks.types import Task


def build(config: TaskConfig) -> Task:
    train, held_out = draw(config, reverse.ALPHABET)
    rows = [[{"prompt": letters + reverse.SEPARATOR} for letters in part] for part in (train, held_out)]
    return Task(config.name.value, rows[0], rows[1], [reward])


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Minus the number of tokens of each completion, the end token included."""
    return [-float(len(ids)) for ids in completion_ids]
