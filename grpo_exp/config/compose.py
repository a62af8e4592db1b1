"""From a command line or option names to the typed configuration. This and ``messages`` are the only files that know Hydra.

Imports no torch. Errors of Hydra and OmegaConf become :class:`ConfigError`, one or two lines with what to do.
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError, ConfigErrors
from .messages import did_you_mean_option, explain, explain_interpolation, explain_value
from .schema import Config, PrecisionConfig
from .sites import SPELLINGS

PACKAGE = Path(__file__).resolve().parents[1]
CONF_DIR = next(folder for folder in (PACKAGE / "conf", PACKAGE.parent / "conf") if folder.is_dir())
# dictionaries that a command line may fill without a "+"
OPEN_KEYS = ("model.init_kwargs.", "model.init_kwargs=", "task.dataset_kwargs.", "task.dataset_kwargs=")
ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)

ConfigStore.instance().store(name="schema", node=Config, provider="grpo_exp")


@dataclass(frozen=True)
class Composed:
    """One job as Hydra composed it: the configuration and where it came from.

    ``start`` is the folder in which the command was given, ``factors`` are the job's overrides that vary in its sweep.
    """

    config: DictConfig
    choices: dict[str, str]
    overrides: list[str]
    start: Path
    factors: dict[str, str]


def run_app(
    argv: list[str], run_one: Callable[[Composed], int], find_problems: Callable[[Config], list[ConfigError]]
) -> int:
    """Run the command line as a Hydra application and return the exit code.

    Args:
        argv: without the program's name.
        run_one: called with the composed job of a single run; a sweep goes to the launcher instead.
        find_problems: what is wrong with a configuration, for a complete list where Hydra refuses an override.

    Raises:
        ConfigError: for whatever Hydra does not accept, and what ``run_one`` raises.
    """
    codes: list[int] = []
    errors: list[ConfigError] = []

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="config")
    def app(config: DictConfig) -> None:
        try:
            _refuse_launcher()
            codes.append(run_one(composed(config, _as_given(HydraConfig.get().overrides.task))))
        except ConfigError as error:
            if not is_single_run():
                raise
            errors.append(error)  # past Hydra, which would announce it in words of its own

    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors instead of printing them and exiting with 1
    sys.argv = ["grpo-exp", *normalise(argv)]
    try:
        app()
    except ERRORS as error:
        raise _every_problem(explain(error, argv), argv, find_problems) from None
    except ValueError as error:
        if isinstance(error, ConfigError) or not _is_raised_by_hydra(error):
            raise
        raise explain_value(error, argv) from None
    if errors:
        raise errors[0]
    return max(codes, default=0)


def _refuse_launcher() -> None:
    """Hydra asks a launcher only about sweeps: a single run would go on here without a word."""
    choice = HydraConfig.get().runtime.choices.get("hydra/launcher")
    if is_single_run() and choice == "slurm":
        raise ConfigError("hydra/launcher", choice, "", "launchers are for sweeps: add -m, also for one run")


def composed(config: DictConfig, overrides: Sequence[str], searched: Sequence[str] = ()) -> Composed:
    """Split what Hydra hands to a job into the configuration and Hydra's own part.

    Args:
        searched: the keys that another sweeper than ours varies; ours says it itself.
    """
    node = HydraConfig.get() if "hydra" not in config else config.hydra
    choices = {
        group: str(option)
        for group, option in node.runtime.choices.items()
        if not group.startswith("hydra/") and option is not None
    }
    values = OmegaConf.to_container(config, enum_to_str=True)
    assert isinstance(values, dict)
    values.pop("hydra", None)
    given = override_values(overrides)
    factors = {key: given[key] for key in node.sweeper.get("varied", searched) if key in given}
    return Composed(OmegaConf.create(values), choices, list(overrides), Path(node.runtime.cwd), factors)


def _as_given(overrides: Any) -> list[str]:
    """Hydra's list of overrides without resolving what they refer to."""
    given = OmegaConf.to_container(overrides)
    assert isinstance(given, list)
    return given


def compose(overrides: list[str]) -> Composed:
    """Compose a configuration without running anything, as a command line with these overrides would.

    Raises:
        ConfigError: for whatever Hydra does not accept.
    """
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            config = hydra.compose("config", overrides=normalise(overrides), return_hydra_config=True)
            config.hydra.runtime.cwd = os.getcwd()
            return composed(config, _as_given(config.hydra.overrides.task))
    except ERRORS as error:
        raise explain(error, overrides) from None


def compose_jobs(context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]]) -> list[Composed]:
    """The configuration of every job of a sweep. Composing takes a tenth of a second, so each is composed once.

    Raises:
        ConfigErrors: every problem of every job, each once.
    """
    jobs: list[Composed] = []
    given = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
    searched = [override.key_or_group for override in given if override.is_sweep_override()]
    problems = {str(error): error for error in _launcher_problems(context, job_overrides)}
    for overrides in job_overrides:
        try:
            job = context.config_loader.load_sweep_config(config, list(overrides))
        except ERRORS as error:
            problem = explain(error, list(overrides))
            problems[str(problem)] = problem
        else:
            jobs.append(composed(job, overrides, searched))
    if problems:
        raise ConfigErrors(list(problems.values()))
    return jobs


def _launcher_problems(context: HydraContext, job_overrides: Sequence[Sequence[str]]) -> Iterator[ConfigError]:
    """Hydra takes the launcher from what all jobs share: one that a swept file chooses would be ignored without a word."""
    folders = [Path(e.path.removeprefix("file://")) for e in context.config_loader.get_search_path().get_path()]
    swept = {(key, value) for levels in varied_keys(job_overrides) for key, value in levels.items()}
    for group, option in sorted(swept):
        files = [folder / group / f"{option}.yaml" for folder in folders]
        text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
        if re.search(r"^\s*-?\s*(override\s+)?/?hydra/launcher\s*:", text, re.M):
            fix = "it chooses a launcher, which a file that is swept cannot do: add hydra/launcher=NAME to the command"
            yield ConfigError(group, option, "", fix)


def to_typed(config: DictConfig | dict[str, Any]) -> Config:
    """The typed configuration, every interpolation resolved.

    Raises:
        ConfigErrors: for values that are missing, have the wrong type, or cannot be resolved.
    """
    given = OmegaConf.create(config) if isinstance(config, dict) else config
    try:
        typed = OmegaConf.merge(OmegaConf.structured(Config), given)
        problems = list(_unresolved(given, typed))
        if not problems:
            missing = sorted(OmegaConf.missing_keys(given) | OmegaConf.missing_keys(typed))
            problems = [ConfigError(key, "???", "", f"has no default: set {key}=…") for key in missing]
        if problems:
            raise ConfigErrors(problems)
        OmegaConf.resolve(typed)
        result = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        values = [f"{key}={value}" for key, value in _leaves(OmegaConf.to_container(given), "")]
        raise explain(error, values) from None
    assert isinstance(result, Config)
    return result


def _unresolved(given: DictConfig, typed: DictConfig | ListConfig) -> Iterator[ConfigError]:
    """What refers to something that is not there, or to something that is itself to be filled in."""
    for key, text in _leaves(OmegaConf.to_container(given), ""):
        if not isinstance(text, str) or "${" not in text:
            continue
        try:
            value = OmegaConf.select(typed, key, throw_on_missing=True)
        except OmegaConfBaseException as error:
            yield explain_interpolation(key, text, error)
        else:
            if "???" in text and value in (None, "???"):
                yield ConfigError(key, text, "", "leads to a value that is to be filled in")


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    match value:
        case dict():
            for key, item in value.items():
                yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
        case list():
            for index, item in enumerate(value):
                yield from _leaves(item, f"{prefix}[{index}]")
        case _:
            yield prefix, value


def _every_problem(
    first: ConfigError, argv: list[str], find_problems: Callable[[Config], list[ConfigError]]
) -> ConfigError:
    """The first problem together with those of the other overrides, as Hydra stops at the first."""
    problems, rest = [first], list(argv)
    while not any(argument.startswith("-") for argument in rest):
        guilty = [argument for argument in rest if argument.lstrip("+~").partition("=")[0] == problems[-1].key]
        if not guilty:
            break
        rest = [argument for argument in rest if argument not in guilty]
        try:
            problems += find_problems(to_typed(compose(rest).config))
        except ConfigErrors as errors:
            problems += errors.errors
        except ConfigError as error:
            problems.append(error)
            continue
        break
    return ConfigErrors(problems) if len(problems) > 1 else first


def _is_raised_by_hydra(error: BaseException) -> bool:
    """Whether the innermost frame is Hydra's: a plain ValueError of ours is a bug, and shows its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("hydra.")


def load_precision(option: str) -> PrecisionConfig:
    """A shipped option of the precision group, by its name or by any spelling of a dtype.

    Raises:
        ConfigError: listing the options.
    """
    name = precision_option(option)
    options = sorted(path.stem for path in (CONF_DIR / "precision").glob("*.yaml"))
    if name not in options:
        raise ConfigError("precision", option, options, did_you_mean_option(option, options))
    loaded = OmegaConf.load(CONF_DIR / "precision" / f"{name}.yaml")
    assert isinstance(loaded, DictConfig)
    typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PrecisionConfig), loaded.get("precision", loaded)))
    assert isinstance(typed, PrecisionConfig)
    return typed


def precision_option(text: str) -> str:
    """``Bfloat16`` or ``BF16`` is the option ``bf16``; other names stay as they are."""
    return SPELLINGS.get(text.strip().lower().removeprefix("torch."), text)


def normalise(argv: list[str]) -> list[str]:
    """Accept what users would expect Hydra to: dtype spellings for precision, new keys in open dictionaries, ``+experiment``.

    Overrides may stand before, between and after flags; argparse wants them together.
    """
    result = []
    for argument in sorted(argv, key=lambda argument: re.match(r"~|[^-][^=]*=", argument) is not None):
        if re.match(r"\+(experiment|debug)=", argument):
            argument = argument[1:]
        elif argument.startswith(OPEN_KEYS):
            argument = f"++{argument}"
        elif match := re.fullmatch(r"precision=([\w., ]+)", argument):
            argument = "precision=" + ",".join(precision_option(part) for part in match[1].split(","))
        result.append(argument)
    return result


def varied_keys(jobs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """For each job of a sweep, the overrides whose value is not the same in all of them: its factors."""
    parsed = [override_values(job) for job in jobs]
    every = dict.fromkeys(key for job in parsed for key in job)
    keys = [key for key in every if len({job.get(key) for job in parsed}) > 1]
    return [{key: job[key] for key in keys if key in job} for job in parsed]


def with_repeats(jobs: Sequence[Sequence[str]], again: str | None) -> list[list[str]]:
    """The jobs, and those of the arm ``again`` (``key=value,…``) a second time, with ``repeat=1``."""
    result = [list(job) for job in jobs]
    wanted = override_values(normalise(again.split(","))) if again else {}
    for job in jobs if wanted else ():
        given = override_values(job)
        if "repeat" not in given and all(given.get(key) == value for key, value in wanted.items()):
            result.append([*job, "repeat=1"])
    return result


def override_values(overrides: Sequence[str]) -> dict[str, str]:
    """Key or group → value of each override."""
    return {o.key_or_group: _value_text(o) for o in OverridesParser.create().parse_overrides(list(overrides))}


def _value_text(override: Override) -> str:
    """A string without the quotes and escapes that Hydra's grammar wants around it; anything else as it was written."""
    value = override.value()
    return value if isinstance(value, str) else str(override.get_value_element_as_str())


def is_single_run() -> bool:
    return bool(HydraConfig.get().mode is RunMode.RUN)
