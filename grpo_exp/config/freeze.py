"""Freezing a configuration: plain values, nothing left to resolve, and a hash that is the identity of a run.

What a run starts from is this and nothing else; editing a config file afterwards changes no run that was submitted.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, ConfigErrors
from .replays import find_recording
from .schema import Config
from .sites import FOLLOWS, parse_dtype

IGNORED = ("runs_dir", "sweep", "tracker")
"""What does not change what a run computes, so two configurations that differ only here are the same run."""

MAX_NAME = 96


@dataclass(frozen=True)
class Frozen:
    """A configuration as plain data, and its hash."""

    values: dict[str, Any]
    hash: str

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)


def freeze(config: Config) -> Frozen:
    """Plain values of a typed configuration; relative paths become absolute ones, each dtype gets its one name.

    Raises:
        ConfigErrors: if a value is still a placeholder.
        ConfigError: if a recording is to be replayed that is not there.
    """
    values = _plain(config)
    _name_dtypes(values["precision"], FOLLOWS, "precision")
    _name_dtypes(values["model"]["init_kwargs"], ("dtype", "torch_dtype"), "model.init_kwargs")
    unresolved = [
        ConfigError(key, value, "", "is still a placeholder") for key, value in _flat(values) if _is_open(value)
    ]
    if unresolved:
        raise ConfigErrors(unresolved)
    for key in ("path", "eval_path"):
        if values["task"][key] is not None:
            values["task"][key] = str(Path(values["task"][key]).expanduser().resolve())
    file, colon, function = str(values["task"]["reward"] or "").rpartition(":")
    if colon and file.endswith(".py"):
        values["task"]["reward"] = f"{Path(file).expanduser().resolve()}:{function}"
    for key in ("name_or_path", "tokenizer"):
        name = values["model"][key]
        if name is not None and (name.startswith((".", "~")) or Path(name).is_dir()):
            values["model"][key] = str(Path(name).expanduser().resolve())
    if config.rollout.replay_from is not None:  # a folder of runs may get more of them
        values["rollout"]["replay_from"] = str(find_recording(config.rollout.replay_from, config.seed))
    values["runs_dir"] = str(Path(values["runs_dir"]).expanduser().resolve())
    return Frozen(values, config_hash(values))


def config_hash(values: dict[str, Any]) -> str:
    """Eight hex digits over everything that matters."""
    kept = {key: value for key, value in values.items() if key not in IGNORED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]


def run_name(factors: dict[str, str], digest: str) -> str:
    """A folder name from the varied factors and the hash: ``[A-Za-z0-9._-]``, at most :data:`MAX_NAME` characters."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in factors.items()]
    words = re.sub(r"[^A-Za-z0-9._-]+", "-", "_".join(parts)).strip("-.") or "run"
    return f"{words[: MAX_NAME - len(digest) - 1]}_{digest}"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _name_dtypes(values: dict[str, Any], keys: Iterable[str], prefix: str) -> None:
    """``Bfloat16`` and ``BF16`` are one dtype, so they are one run too."""
    for key in keys:
        if values.get(key) is not None:
            values[key] = parse_dtype(values[key], f"{prefix}.{key}")


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _flat(item, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, value)]


def _is_open(value: Any) -> bool:
    return isinstance(value, str) and (value == "???" or "${" in value)
