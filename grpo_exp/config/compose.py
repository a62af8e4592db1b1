"""The only file that knows Hydra: from a command line or option names to the typed configuration.

Imports no torch. Errors of Hydra and OmegaConf become :class:`ConfigError`, one or two lines with what to do.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError, ConfigErrors
from .schema import Config, PrecisionConfig, default_config
from .sites import SPELLINGS

PACKAGE = Path(__file__).resolve().parents[1]
CONF_DIR = next(folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir())
OPEN_KEYS = ("model.init_kwargs.",)  # dictionaries to which a command line may add keys without a "+"

ConfigStore.instance().store(name="schema", node=Config, provider="grpo_exp")


@dataclass(frozen=True)
class Composed:
    """One job as Hydra composed it: the configuration and where it came from."""

    config: DictConfig
    choices: dict[str, str]
    overrides: list[str]


def run_app(argv: list[str], run_one: Callable[[Composed], int]) -> int:
    """Run the command line as a Hydra application and return the exit code.

    Args:
        argv: without the program's name.
        run_one: called with the composed job of a single run; a sweep goes to the launcher instead.
    """
    codes: list[int] = []

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    def app(config: DictConfig) -> None:
        codes.append(run_one(composed(config, HydraConfig.get().overrides.task)))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and exiting with 1
    sys.argv = ["grpo-exp", *normalise(argv)]
    try:
        app()
    except (HydraException, OmegaConfBaseException) as error:
        raise translate(error, argv) from None
    return max(codes, default=0)


def composed(config: DictConfig, overrides: list[str]) -> Composed:
    """Split what Hydra hands to a job into the configuration and Hydra's own part."""
    node = HydraConfig.get() if "hydra" not in config else config.hydra
    choices = {
        group: str(option)
        for group, option in node.runtime.choices.items()
        if not group.startswith("hydra/") and option is not None
    }
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    return Composed(plain, choices, list(overrides))


def compose(overrides: list[str]) -> Composed:
    """Compose a configuration without running anything, as a command line with these overrides would.

    Raises:
        ConfigError: for whatever Hydra does not accept.
    """
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            config = hydra.compose("config", overrides=normalise(overrides), return_hydra_config=True)
            return composed(config, list(config.hydra.overrides.task))
    except (HydraException, OmegaConfBaseException) as error:
        raise translate(error, overrides) from None


def to_typed(config: DictConfig | dict[str, Any]) -> Config:
    """The typed configuration, every interpolation resolved.

    Raises:
        ConfigErrors: for values that are missing, have the wrong type, or cannot be resolved.
    """
    try:
        typed = OmegaConf.merge(OmegaConf.structured(Config), config)
        missing = sorted(OmegaConf.missing_keys(typed))
        if missing:
            raise ConfigErrors([ConfigError(key, "???", "", f"has no default: set {key}=…") for key in missing])
        OmegaConf.resolve(typed)
        result = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        raise translate(error, []) from None
    assert isinstance(result, Config)
    return result


def load_precision(option: str) -> PrecisionConfig:
    """A shipped option of the precision group, by its name or by any spelling of a dtype.

    Raises:
        ConfigError: listing the options.
    """
    name = precision_option(option)
    options = sorted(path.stem for path in (CONF_DIR / "precision").glob("*.yaml"))
    if name not in options:
        raise ConfigError("precision", option, options)
    loaded = OmegaConf.load(CONF_DIR / "precision" / f"{name}.yaml")
    assert isinstance(loaded, DictConfig)
    typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PrecisionConfig), loaded.get("precision", loaded)))
    assert isinstance(typed, PrecisionConfig)
    return typed


def precision_option(text: str) -> str:
    """``torch.bfloat16`` or ``BF16`` is the option ``bf16``; other names stay as they are."""
    return SPELLINGS.get(text.strip().lower().removeprefix("torch."), text)


def normalise(argv: list[str]) -> list[str]:
    """Accept what users would expect Hydra to: dtype spellings for precision, new keys in open dictionaries, ``+experiment``."""
    result = []
    for argument in argv:
        if re.match(r"\+(experiment|debug)=", argument):
            argument = argument[1:]
        elif argument.startswith(OPEN_KEYS):
            argument = f"++{argument}"
        elif match := re.fullmatch(r"precision=([\w., ]+)", argument):
            argument = "precision=" + ",".join(precision_option(part) for part in match[1].split(","))
        result.append(argument)
    return result


def varied_keys(jobs: list[list[str]]) -> list[dict[str, str]]:
    """For each job of a sweep, the overrides whose value is not the same in all of them: its factors."""
    parsed = [
        {o.key_or_group: str(o.get_value_element_as_str()) for o in OverridesParser.create().parse_overrides(job)}
        for job in jobs
    ]
    keys = [key for key in parsed[0] if len({job.get(key) for job in parsed}) > 1] if parsed else []
    return [{key: job[key] for key in keys if key in job} for job in parsed]


def is_single_run() -> bool:
    return bool(HydraConfig.get().mode is RunMode.RUN)


def translate(error: Exception, argv: list[str]) -> ConfigError:
    """One of Hydra's or OmegaConf's errors in the form that users see."""
    text = str(error) if error.__cause__ is None else f"{error}\n{error.__cause__}"
    if match := re.search(r"Could not find '([\w/]+)/([^']*)'\s+Available options in '[^']*':\s*(.*)", text, re.S):
        options = [line.strip() for line in match[3].splitlines() if re.fullmatch(r"\s*[\w.-]+", line)]
        return ConfigError(match[1], match[2], options)
    if match := re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", text):
        return ConfigError(match[1], match[2], "one value", "several values are a sweep: add -m")
    if match := re.search(r"Could not override '([^']+)'", text):
        return ConfigError(match[1], _given(argv, match[1]), _known_keys(match[1]), "no such key")
    key = next((m[1] for m in re.finditer(r"(?:full_key: |Error merging override )([\w.]+)", text)), "")
    if match := re.search(r"Environment variable '([^']+)' not found", text):
        return ConfigError(key or "environment", f"${{oc.env:{match[1]}}}", "", f"set the environment variable {match[1]}")
    if not key:
        return _Plain(" ".join(text.split("See https://")[0].split())[:400])
    if match := re.search(r"expected one of \[([^\]]*)\]", text):
        return ConfigError(key, _given(argv, key), match[1])
    details = [line.strip() for line in text.splitlines() if line.strip() and "Error merging" not in line]
    return ConfigError(key, _given(argv, key), "", details[0] if details else type(error).__name__)


def _given(argv: list[str], key: str) -> str:
    return next((a.partition("=")[2] for a in argv if a.lstrip("+~").startswith(f"{key}=")), "")


def _known_keys(key: str) -> str:
    parent = key.rpartition(".")[0]
    node = OmegaConf.structured(default_config())
    found = OmegaConf.select(node, parent) if parent else node
    return ", ".join(str(k) for k in found) if isinstance(found, DictConfig) else ""


class _Plain(ConfigError):
    """An error of Hydra that names no key: its own words."""

    def __init__(self, text: str) -> None:
        ValueError.__init__(self, text)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),)
