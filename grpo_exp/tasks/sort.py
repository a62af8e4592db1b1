"""Sort six digits: ``503917:`` is to be answered by ``013579``. Harder than ``reverse``, for longer runs."""

from grpo_exp.config.schema import TaskConfig
from grpo_exp.tasks.prompts import draw
from grpo_exp.tasks.reverse import accuracy, reward
from grpo_exp.tasks.types import Row, Task

ALPHABET = "0123456789"
SEPARATOR = ":"


def build(config: TaskConfig) -> Task:
    train, held_out = draw(config, ALPHABET)
    return Task(config.name.value, [row(s) for s in train], [row(s) for s in held_out], [reward], accuracy)


def row(digits: str) -> Row:
    return {"prompt": digits + SEPARATOR, "answer": "".join(sorted(digits))}
