"""``task=reasoning_gym``: any of the generators of the package reasoning-gym, each with a scorer of its own.

A question is a chat message; what is scored is the answer that ``task.answer_from`` finds in the completion. Training and
evaluation have no question in common. The package is an extra, and is imported only where this task is chosen.
"""

import difflib
import importlib.util
import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterator
from dataclasses import fields
from functools import cache, lru_cache, partial
from typing import Any

from grpo_exp.config.schema import AnswerFrom, TaskConfig
from grpo_exp.errors import ConfigError
from grpo_exp.tasks.types import Completion, Row, Task, text

PACKAGE = "reasoning_gym"
INSTALL = "pip install 'grpo-exp[reasoning-gym]'"
OURS = ("seed", "size")  # parameters of every dataset that follow from the task's own settings
PATIENCE = 20  # draws per question that is wanted, before a dataset counts as too small
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?")
TAG = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.S)


def build(config: TaskConfig) -> Task:
    """Draw the questions. Raises :class:`ConfigError` where the dataset cannot make any, or too few."""
    name, kwargs = str(config.dataset), dict(config.dataset_kwargs)
    held_out = draw_held_out(config)
    train = draw_train(config, held_out)
    # not a function of this package by itself: scorers parse what a model wrote, so they run where they can be ended
    reward = partial(score, dataset=name, kwargs=kwargs, answer_from=config.answer_from)
    messages = [] if config.system_prompt is None else [{"role": "system", "content": system_prompt(config)}]
    rows = [[row(entry, messages) for entry in entries] for entries in (train, held_out)]
    has_answers = all(isinstance(entry.get("answer"), str) for entry in train + held_out)
    accuracy = partial(exact, answer_from=config.answer_from) if has_answers else None
    return Task(config.name.value, rows[0], rows[1], [reward], accuracy)


def draw_held_out(config: TaskConfig, limit_s: float = math.inf) -> list[Row]:
    """Entries to evaluate on, no question twice. They stay the same when ``num_train`` changes.

    Raises:
        ConfigError: if the dataset has too few, as far as can be seen in ``limit_s``.
    """
    found: dict[str, Row] = {}
    end = time.monotonic() + limit_s
    for entry in _entries(config, 0, PATIENCE * config.num_eval):
        if len(found) == config.num_eval or time.monotonic() > end:
            return list(found.values())
        found.setdefault(entry["question"], entry)
    if len(found) < config.num_eval:
        raise _too_few(config, len(found))
    return list(found.values())


def draw_train(config: TaskConfig, held_out: list[Row]) -> list[Row]:
    """Entries to train on: any but those held out, also twice the same where a dataset is small."""
    excluded = {entry["question"] for entry in held_out}
    drawn = _entries(config, PATIENCE * config.num_eval, PATIENCE * (config.num_eval + config.num_train))
    found = list(itertools.islice((entry for entry in drawn if entry["question"] not in excluded), config.num_train))
    if len(found) < config.num_train:
        raise _too_few(config, len(held_out))
    return found


def _entries(config: TaskConfig, start: int, stop: int) -> Iterator[Row]:
    size = PATIENCE * (config.num_eval + config.num_train)
    try:
        dataset = load(str(config.dataset), dict(config.dataset_kwargs), base_seed(config), size)
        for index in range(start, stop):
            yield dataset[index]
    except Exception as error:
        reason = f"it cannot make a question: {type(error).__name__}: {error}"
        raise ConfigError("task.dataset", config.dataset, "", reason) from error


def _too_few(config: TaskConfig, found: int) -> ConfigError:
    fix = f"{config.dataset} has too few questions with these parameters: lower it, or widen task.dataset_kwargs"
    return ConfigError("task.num_eval", config.num_eval, f"{found // 2} or fewer", fix)


def base_seed(config: TaskConfig) -> int:
    """A dataset draws item i from ``seed + i``, so neighbouring seeds would give the same items, shifted."""
    return random.Random(f"{config.dataset}/{config.seed}").randrange(2**31)


@cache
def datasets() -> dict[str, Any]:
    """Name → (class, class of its parameters). Takes some seconds the first time."""
    from reasoning_gym.factory import DATASETS

    return dict(DATASETS)


def load(name: str, kwargs: dict[str, Any], seed: int = 0, size: int = 1) -> Any:
    dataset, parameters = datasets()[name]
    return dataset(config=parameters(**kwargs, seed=seed, size=size))


def row(entry: Row, messages: list[dict[str, str]]) -> Row:
    prompt = [*messages, {"role": "user", "content": entry["question"]}]
    return {"prompt": prompt, "answer": entry.get("answer"), "entry": entry}


def find_answer(completion: Completion, answer_from: AnswerFrom) -> str | None:
    """The answer that a completion gives, None where there is none."""
    written = text(completion).strip()
    match answer_from:
        case AnswerFrom.text:
            return written
        case AnswerFrom.tag:
            return None if not (found := TAG.findall(written)) else str(found[-1]).strip()
        case AnswerFrom.number:
            return None if not (found := NUMBER.findall(written)) else str(found[-1])


@lru_cache(maxsize=1)
def _judge(dataset: str, kwargs: str) -> Any:
    return load(dataset, json.loads(kwargs)).score_answer


def score(
    completions: list[Completion],
    entry: list[Row],
    dataset: str,
    kwargs: dict[str, Any],
    answer_from: AnswerFrom,
    **columns: Any,
) -> list[float]:
    """The dataset's own score of each answer, 0 to 1; 0 where there is no answer."""
    judge = _judge(dataset, json.dumps(kwargs))
    found = [find_answer(completion, answer_from) for completion in completions]
    return [0.0 if given is None else float(judge(given, one)) for given, one in zip(found, entry, strict=True)]


def exact(completions: list[Completion], answer: list[str], answer_from: AnswerFrom, **columns: Any) -> list[bool]:
    """Whether each answer is the dataset's own, letter by letter."""
    return [find_answer(c, answer_from) == right.strip() for c, right in zip(completions, answer, strict=True)]


def system_prompt(config: TaskConfig) -> str:
    """The text itself, or that of reasoning-gym which has this name: default, simple, direct, …"""
    from reasoning_gym.utils import SYSTEM_PROMPTS

    return str(SYSTEM_PROMPTS.get(config.system_prompt, config.system_prompt))


def problems(config: TaskConfig) -> list[ConfigError]:
    """What is wrong with the settings, as far as can be seen in a second or two."""
    if importlib.util.find_spec(PACKAGE) is None:
        return [ConfigError("task.name", config.name.value, "", f"the package reasoning-gym is missing: {INSTALL}")]
    found = [] if config.num_train >= 1 else [ConfigError("task.num_train", config.num_train, "1 or more prompts")]
    if config.dataset is None:
        return [
            *found,
            ConfigError("task.dataset", None, "the name of a dataset of reasoning-gym", "or task=chain_sum"),
        ]
    if config.dataset not in datasets():
        return [*found, _no_such_dataset(config.dataset)]
    found += _parameter_problems(config.dataset, dict(config.dataset_kwargs))
    if not found and config.num_eval >= 0:
        try:
            draw_held_out(config, limit_s=1.0)
        except ConfigError as error:
            return [error]
    return found


def _no_such_dataset(name: str) -> ConfigError:
    near = difflib.get_close_matches(name, datasets(), n=1)
    fix = f"did you mean {near[0]}?" if near else f"there are {len(datasets())} of them"
    shown = ", ".join(difflib.get_close_matches(name, datasets(), n=5, cutoff=0.0))
    return ConfigError("task.dataset", name, f"a dataset of reasoning-gym, such as {shown}", fix)


def _parameter_problems(name: str, kwargs: dict[str, Any]) -> list[ConfigError]:
    _, parameters = datasets()[name]
    known = [field.name for field in fields(parameters) if field.name not in OURS]
    found = []
    for key, value in kwargs.items():
        if key in OURS:
            fix = "task.seed, task.num_train and task.num_eval set it"
            found.append(ConfigError(f"task.dataset_kwargs.{key}", value, known, fix))
        elif key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"no parameter of {name}"
            found.append(ConfigError(f"task.dataset_kwargs.{key}", value, known, fix))
    if found:
        return found
    try:
        made = parameters(**kwargs, seed=0, size=1)
        if hasattr(made, "validate"):
            made.validate()
    except Exception as error:  # an assertion, or whatever a value of another type leads to
        return [ConfigError("task.dataset_kwargs", kwargs, "", f"{name} refuses that: {error}")]
    return []
