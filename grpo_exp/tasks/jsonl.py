"""The user's own data: a file with one JSON object per line, and a reward function named by its import path.

Every row of the file is used. For evaluation, the first ``task.num_eval`` rows of ``task.eval_path`` are taken; without
such a file the last ``num_eval`` rows are held out, but only where at least as many rows remain for training. A smaller
file is all trained on and nothing is evaluated.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_exp.config.schema import TaskConfig
from grpo_exp.errors import ConfigError
from grpo_exp.tasks import import_path
from grpo_exp.tasks.types import Completion, Row, Task, text

DEFAULT_ANSWER_FIELD = TaskConfig().answer_field


@dataclass(frozen=True)
class ExactMatch:
    """Judges a completion right if its text is the row's answer, white space at both ends aside."""

    field: str

    def __call__(self, completions: list[Completion], **columns: Any) -> list[bool]:
        pairs = zip(completions, columns[self.field], strict=True)
        return [text(completion).strip() == str(answer).strip() for completion, answer in pairs]


def build(config: TaskConfig) -> Task:
    """Read the files. Raises :class:`ConfigError` for the first thing that is wrong in them, with its line number."""
    train = read(config.path, "task.path", config)
    held_out: list[Row] = []
    if config.eval_path is not None:
        held_out = read(config.eval_path, "task.eval_path", config)[: config.num_eval]
    elif config.num_eval and len(train) >= 2 * config.num_eval:
        train, held_out = train[: -config.num_eval], train[-config.num_eval :]
    if config.reward is None:
        raise no_reward()
    answered = all(config.answer_field in row for row in train + held_out)
    accuracy = ExactMatch(config.answer_field) if answered else None
    return Task(config.name.value, train, held_out, [config.reward], accuracy)


def problems(config: TaskConfig) -> list[ConfigError]:
    """What is wrong with the files and with the name of the reward function, which is not imported."""
    found = data_problems("task.path", config.path, config)
    if config.eval_path is not None:
        found += data_problems("task.eval_path", config.eval_path, config)
    if config.reward is None:
        return [*found, no_reward()]
    problem = import_path.problem(config.reward)
    if problem:
        found.append(ConfigError("task.reward", config.reward, import_path.ALLOWED, problem))
    return found


def data_problems(key: str, path: str | None, config: TaskConfig) -> list[ConfigError]:
    """The first thing that is wrong with a file or its rows."""
    found = file_problems(key, path)
    if found or path is None:
        return found
    known = Path(path).stat()
    problem = _problem_of_rows(path, key, config.prompt_field, config.answer_field, known.st_mtime_ns, known.st_size)
    return [] if problem is None else [problem]


@lru_cache(maxsize=16)
def _problem_of_rows(
    path: str, key: str, prompt_field: str, answer_field: str, modified: int, size: int
) -> ConfigError | None:
    """Kept, as the jobs of a sweep share a file."""
    try:
        read(path, key, TaskConfig(prompt_field=prompt_field, answer_field=answer_field))
    except ConfigError as error:
        return error
    return None


def file_problems(key: str, path: str | None) -> list[ConfigError]:
    allowed = "a file with one JSON object per line"
    if not path:
        return [ConfigError(key, path, allowed, f"add {key}=FILE")]
    if not Path(path).is_file():
        fix = "that is a folder" if Path(path).is_dir() else f"there is no such file in {Path.cwd()}"
        return [ConfigError(key, path, allowed, fix)]
    if Path(path).stat().st_size == 0:
        return [ConfigError(key, path, allowed, "the file is empty")]
    return []


def no_reward() -> ConfigError:
    fix = "add task.reward=your_module:your_function"
    return ConfigError("task.reward", None, import_path.ALLOWED, fix)


def read(path: str | None, key: str, config: TaskConfig) -> list[Row]:
    """All rows of a file; the prompt is under ``"prompt"`` whatever the file calls it, other columns keep their names."""
    found = file_problems(key, path)
    if found or path is None:
        raise found[0]
    rows: list[Row] = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(key, path, "a text file in UTF-8", str(error)) from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(parse(line, f"{path}, line {number}", key, config.prompt_field))
    if not rows:
        raise ConfigError(key, path, "a file with one JSON object per line", "the file has only blank lines")
    check_answers(rows, path, config)
    return rows


def parse(line: str, where: str, key: str, prompt_field: str) -> Row:
    """One row. ``where`` is the place of the line in words."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(key, where, "one JSON object per line", f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(key, where, "one JSON object per line", f"this is a {type(record).__name__}")
    if prompt_field not in record:
        fix = f"this row has {', '.join(record) or 'none'}; add task.prompt_field=NAME"
        raise ConfigError("task.prompt_field", prompt_field, "a field of every row", f"{where}: {fix}")
    prompt = record.pop(prompt_field)
    if not is_prompt(prompt):
        fix = 'mend the prompt: "text" or [{"role": "user", "content": "text"}]'
        raise ConfigError(key, where, "a prompt that is a non-empty string or a list of chat messages", fix)
    return {"prompt": prompt, **{name: value for name, value in record.items() if name != "prompt"}}


def is_prompt(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    return isinstance(value, str) and value != ""


def check_answers(rows: list[Row], path: str, config: TaskConfig) -> None:
    """Answers are optional, but all or none: a half-answered file would give a wrong accuracy."""
    without = [number for number, row in enumerate(rows, start=1) if config.answer_field not in row]
    if not without or (len(without) == len(rows) and config.answer_field == DEFAULT_ANSWER_FIELD):
        return
    fix = f"row {without[0]} of {path} has none; {len(without)} of {len(rows)} rows are without"
    raise ConfigError("task.answer_field", config.answer_field, "a field of every row, or of none", fix)
