"""What a task is: prompts to train and to evaluate on, functions that reward a completion, and one that judges it.

The functions follow the signature that TRL uses: ``fn(prompts, completions, completion_ids, **columns)``, where every
argument is a list with one entry per completion and ``columns`` are the other fields of the prompt's row, repeated.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
"""One prompt: ``"prompt"`` is a string or a list of chat messages; every other key is a column for the functions."""

Completion = str | list[dict[str, Any]]
"""A string where the prompt is one, else the chat messages of the answer."""

RewardFunction = Callable[..., Sequence[Any] | Awaitable[Sequence[Any]]]
"""Returns one number per completion; None where it has no opinion."""

RewardSpec = RewardFunction | str
"""A function, or its import path ``package.module:function`` or ``path/to/file.py:function``."""

Accuracy = Callable[..., list[bool]]


@dataclass(frozen=True)
class Task:
    """Prompts and judges. ``accuracy`` is None for a task without right and wrong answers."""

    name: str
    train: list[Row]
    eval: list[Row]
    reward_funcs: list[RewardSpec]
    accuracy: Accuracy | None = None


def text(completion: Completion) -> str:
    """The text of a completion, whichever of the two forms it has."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)
