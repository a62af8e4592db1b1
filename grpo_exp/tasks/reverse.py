"""Write six letters backwards: ``fadchb>`` is to be answered by ``bhcdaf``. The default task, learnt within minutes."""

from typing import Any

from grpo_exp.config.schema import TaskConfig
from grpo_exp.tasks.prompts import draw
from grpo_exp.tasks.types import Completion, Row, Task, text

ALPHABET = "abcdefghij"
SEPARATOR = ">"


def build(config: TaskConfig) -> Task:
    train, held_out = draw(config, ALPHABET)
    return Task(config.name.value, [row(s) for s in train], [row(s) for s in held_out], [reward], accuracy)


def row(letters: str) -> Row:
    return {"prompt": letters + SEPARATOR, "answer": letters[::-1]}


def reward(completions: list[Completion], answer: list[str], **columns: Any) -> list[float]:
    """Half for the whole answer, half for the share of positions that are right: dense enough to start from 5 %."""
    return [score(text(completion), right) for completion, right in zip(completions, answer, strict=True)]


def score(given: str, right: str) -> float:
    share = sum(a == b for a, b in zip(given, right, strict=False)) / len(right)
    return 0.5 * (given == right) + 0.5 * share


def accuracy(completions: list[Completion], answer: list[str], **columns: Any) -> list[bool]:
    return [text(completion) == right for completion, right in zip(completions, answer, strict=True)]
