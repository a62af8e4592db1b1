"""Errors of Hydra and OmegaConf in the form that users see: key, value, what is allowed, what to do.

Their own texts speak of nodes and structs, so only what they are about is taken from them; what a key may hold is read
from the schema, and a name that is not known is compared with those that are.
"""

import difflib
import re
import types
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationValidationError, OmegaConfBaseException
from yaml import Mark, MarkedYAMLError

from ..errors import ConfigError
from .schema import Config
from .sites import ALLOWED, FOLLOWS, MATMUL_MODES, SPELLINGS

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true, false",
    str: "text",
    list: "a list [a,b]",
    dict: "a mapping {key: value}",
}


class Explained(ConfigError):
    """A problem that is not about one key and its value: a text of its own."""

    def __init__(self, text: str) -> None:
        ValueError.__init__(self, text)
        self.key = self.value = self.allowed = self.fix = ""
        self.text = text

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text,)


def explain(error: Exception, argv: list[str]) -> ConfigError:
    """The error in the form that users see."""
    match error:
        case MissingConfigException(missing_cfg_file=str() as file, options=list() as options) if "/" in file:
            group, _, option = file.rpartition("/")
            return ConfigError(group, option, options, did_you_mean_option(option, options))
        case OverrideParseException(override=str() as override):
            return _unreadable(override)
        case MarkedYAMLError(problem_mark=Mark() as mark):
            return Explained(f"{mark.name}, line {mark.line + 1}: no YAML: {error.problem}")
    text = str(error).split("Config search path")[0]
    if match := re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", text):
        return ConfigError(match[1], match[2], "one value", "several values are a sweep: add -m")
    if match := re.match(r"In '([^']+)': (\w+) raised while composing config:\s*(.*?)\s+full_key: (\S+)", text, re.S):
        problem = no_such_key(match[4]) if match[2] in ("ConfigKeyError", "ConfigAttributeError") else match[3]
        return Explained(f"{match[1]}.yaml: {match[4]}: {problem}")
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _about_key(str(cause.full_key), cause, argv)
    if match := re.search(r"(?:In '([^']+)': )?Could not (?:override|delete from config\.) '([^']+)'", text):
        if match[1]:
            return Explained(f"{match[1]}.yaml: {match[2]}: {no_such_key(match[2])}")
        return ConfigError(match[2], given(argv, match[2]), keys_beside(match[2]), no_such_key(match[2]))
    return Explained(" ".join(text.split("See https://")[0].split())[:400])


def explain_value(error: ValueError, argv: list[str]) -> ConfigError:
    """Where Hydra takes a value for a bug: a config group that is set to something that is no name."""
    for argument in argv:
        key, _, value = argument.partition("=")
        if not key or (key in get_type_hints(Config) and key not in leaves()):
            return ConfigError(
                key or "override", value if key else argument, "the name of an option" if key else "KEY=VALUE"
            )
    return Explained(str(error))


def explain_interpolation(key: str, raw: str, error: Exception) -> ConfigError:
    """A value that refers to something that is not there, or that is of another type."""
    if match := re.search(r"Environment variable '([^']+)' not found", str(error)):
        return ConfigError(key, raw, "", f"set the environment variable {match[1]}")
    if isinstance(error, InterpolationValidationError):
        return ConfigError(key, raw, allowed(key), str(error).splitlines()[0].rpartition("': ")[2])
    return ConfigError(key, raw, "", str(error).splitlines()[0])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suggestion, or nothing where nothing is near."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def did_you_mean_option(word: str, options: list[str]) -> str:
    """The same for the options of a group; spellings of a dtype lead to the option of that dtype."""
    known = [*options, *SPELLINGS]
    begun = [name for name in known if word and name.startswith(word.lower())]
    near = begun or difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.7)
    found = [name for name in (SPELLINGS.get(name, name) for name in near) if name in options]
    return f"did you mean {found[0]}?" if found else ""


def no_such_key(key: str) -> str:
    """What to do about a key that is not in the schema."""
    parent, _, leaf = key.rpartition(".")
    elsewhere = [known for known in leaves() if known.rpartition(".")[2] == leaf]
    beside = {name: f"{parent}.{name}" if parent else name for name in keys_beside(key).split(", ")}
    near = difflib.get_close_matches(leaf, beside, n=1, cutoff=0.6)
    anywhere = difflib.get_close_matches(key, leaves(), n=1, cutoff=0.8)
    found = [*elsewhere, *(beside[name] for name in near), *anywhere]
    return f"no such key; did you mean {found[0]}?" if found else "no such key"


def given(argv: list[str], key: str) -> str:
    """What the command line says for a key."""
    return next((a.partition("=")[2] for a in argv if a.lstrip("+~").partition("=")[0] == key), "")


def keys_beside(key: str) -> str:
    """The names that would have been known where this key was looked up."""
    owner: Any = Config
    for part in key.split(".")[:-1]:
        owner = get_type_hints(owner).get(part) if is_dataclass(owner) else None
    return ", ".join(get_type_hints(owner)) if is_dataclass(owner) else ""


def allowed(key: str, owner: Any = None) -> str:
    """What the schema, or else the class that holds the key, lets it be, in words; nothing where neither knows it."""
    group, _, name = key.partition(".")
    if group == "precision" and name in FOLLOWS:
        return f"{ALLOWED}, null" if FOLLOWS[name] else ALLOWED
    if key == "precision.matmul":
        return ", ".join(MATMUL_MODES)
    hint = leaves().get(key)
    if hint is None and is_dataclass(owner):
        hint = get_type_hints(owner).get(key.rpartition(".")[2])
    if is_dataclass(hint):
        return f"keys of their own: {keys_beside(f'{key}.')}"
    return "" if hint is None else _in_words(hint)


@cache
def leaves() -> dict[str, Any]:
    """Every key of the schema with its type."""
    return dict(_leaves(Config, ""))


def _leaves(owner: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    for name, hint in get_type_hints(owner).items():
        if is_dataclass(hint):
            yield from _leaves(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return ", ".join("null" if part is type(None) else _in_words(part) for part in get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return ", ".join(hint.__members__)
    return WORDS.get(get_origin(hint) or hint, "")


def _about_key(key: str, cause: OmegaConfBaseException, argv: list[str]) -> ConfigError:
    owner = cause.object_type
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        asked = next((name for name in _keys(argv) if name == key or name.startswith(f"{key}.")), key)
        names = keys_beside(key) or _names(owner)
        return ConfigError(asked, given(argv, asked), names, no_such_key(key))
    if "does not support deletion" in str(cause):
        return Explained(f"~{key}: a setting cannot be deleted")
    hint, value = allowed(key, owner), given(argv, key)
    if hint:
        return ConfigError(key, None if value == "null" else value, hint, did_you_mean(value, hint.split(", ")))
    return ConfigError(key, value, "", str(cause).splitlines()[0])


def _names(owner: Any) -> str:
    return ", ".join(f.name for f in fields(owner) if not f.name.startswith("_")) if is_dataclass(owner) else ""


def _keys(argv: list[str]) -> list[str]:
    return [argument.lstrip("+~").partition("=")[0] for argument in argv]


def _unreadable(override: str) -> ConfigError:
    key, equals, value = override.partition("=")
    if not equals or not key:
        return ConfigError("override", override, "KEY=VALUE")
    return ConfigError(key, value, "", f"""cannot be read; quote special characters twice: '{key}="{value}"'""")
