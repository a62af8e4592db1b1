"""Call reward functions on one group and turn what they return into one float per completion.

Used inside the trainer for the shipped tasks and inside the reward process for everything else. Only the standard
library is imported: the reward process is to start fast and to hold no torch unless the user's function needs it.
"""

import asyncio
import inspect
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from grpo_exp.tasks.messages import Group, RewardResult

PROMPT_CHARACTERS = 500
"""Of a prompt that is quoted in an error."""

_ARGUMENTS = {"prompt", "prompts", "completions", "completion_ids"}


class BadReward(Exception):
    """A reward function returned something else than one number or None per completion."""


def evaluate(
    functions: Sequence[Callable[..., Any]], group: Group, runner: asyncio.Runner | None = None
) -> RewardResult:
    """The sum of all functions on a group; a function that raises or misbehaves makes a result with an error.

    A None counts as nothing in the sum; where every function says None the reward is NaN. Async functions need a
    ``runner``; those of one group run at the same time.
    """
    returned: list[Any] = []
    try:
        for function in functions:
            try:
                returned.append(function(**arguments(group)))
            except (Exception, SystemExit) as error:
                return failure(group, function, error)
        if runner is not None:
            returned = runner.run(settle(returned))
    finally:
        for value in returned:
            if inspect.iscoroutine(value):
                value.close()  # a later function failed: this one is never awaited
    columns: list[list[float | None]] = []
    for function, values in zip(functions, returned, strict=True):
        if isinstance(values, Exception):
            return failure(group, function, values)
        try:
            columns.append(numbers(values, len(group.completions)))
        except BadReward as error:
            return failure(group, function, error)
    return total(group.serial, columns)


def arguments(group: Group) -> dict[str, Any]:
    """The keyword arguments of TRL's reward functions: every list has one entry per completion."""
    count = len(group.completions)
    columns = {name: [value] * count for name, value in group.row.items() if name not in _ARGUMENTS}
    given = {"completions": list(group.completions), "completion_ids": [list(ids) for ids in group.completion_ids]}
    return {"prompts": [group.row.get("prompt")] * count, **given, **columns}


async def settle(returned: list[Any]) -> list[Any]:
    """Replace what can be awaited by its value, or by the exception it raised."""
    waiting = [index for index, value in enumerate(returned) if inspect.isawaitable(value)]
    settled = await asyncio.gather(*(returned[index] for index in waiting), return_exceptions=True)
    values = dict(zip(waiting, settled, strict=True))
    return [values.get(index, value) for index, value in enumerate(returned)]


def numbers(values: Any, count: int) -> list[float | None]:
    """Python floats from a list, array or tensor of floats, bools, numpy or torch scalars and None."""
    try:
        if isinstance(values, str | bytes | dict):
            raise TypeError
        listed = list(values)
    except TypeError:
        raise BadReward(f"returned {short(values)}, not a list with one number per completion") from None
    if len(listed) != count:
        raise BadReward(f"returned {len(listed)} values for {count} completions")
    return [number(value, index) for index, value in enumerate(listed)]


def number(value: Any, index: int) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a torch tensor of several elements
        raise BadReward(f"returned {short(value)} for completion {index}, not a number or None") from None


def total(serial: int, columns: list[list[float | None]]) -> RewardResult:
    """Sum over functions: [functions][completions] to [completions]."""
    rewards: list[float] = []
    num_invalid = 0
    for values in zip(*columns, strict=True):
        given = [value for value in values if value is not None]
        reward = sum(given) if given else math.nan
        num_invalid += bool(given) and not math.isfinite(reward)
        rewards.append(reward if math.isfinite(reward) else math.nan)
    return RewardResult(serial, rewards, num_invalid)


def failure(group: Group, function: object, error: BaseException) -> RewardResult:
    """The result of a group whose function raised ``error``."""
    # Of a wrong return value our own frames say nothing to the reader.
    lines = traceback.format_exception(error) if not isinstance(error, BadReward) else [str(error)]
    return failed(group, f"reward function {name_of(function)!r} failed", "".join(lines))


def failed(group: Group, what: str, details: str = "") -> RewardResult:
    """A result without rewards; ``what`` is the beginning of a sentence that goes on with the prompt."""
    message = f"{what} on group {group.serial}, prompt {short(group.row.get('prompt'), PROMPT_CHARACTERS)}\n{details}"
    return RewardResult(group.serial, [math.nan] * len(group.completions), error=message.rstrip())


def name_of(function: object) -> str:
    """What to call a function or an import path in a message."""
    if isinstance(function, str):
        return function
    inner = getattr(function, "func", function)  # functools.partial
    return getattr(inner, "__qualname__", None) or type(inner).__name__


def short(value: object, limit: int = 80) -> str:
    shown = repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}… ({len(shown)} characters)"
