"""What a probe measures: the ``probe.*`` settings of its command line, and the options beside them. Imports no torch."""

import argparse
import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..arguments import Parser
from ..config.compose import CONF_DIR
from ..config.messages import allowed
from ..config.schema import ProbeConfig
from ..config.sites import NAMES, parse_dtype
from ..errors import ConfigError, ConfigErrors

PREFIX = "probe."


class Prompts(Enum):
    """Which prompts are completed."""

    auto = "auto"  # questions for a model with a chat template, those of the task for any other
    questions = "questions"  # 32 short questions that ship with the package
    task = "task"  # the held-out prompts of the task, or those it trains on where there are too few


@dataclass
class ProbeSettings:
    """The grid: every generator (engine × rollout × rollout_head) with every trainer (compute × head × micro_batch)."""

    engine: list[str] = field(default_factory=lambda: ["hf"])  # options of the config group rollout
    rollout: list[str] = field(default_factory=lambda: list(NAMES))
    rollout_head: list[str | None] = field(default_factory=lambda: [None])  # null follows rollout
    compute: list[str] = field(default_factory=lambda: list(NAMES))
    head: list[str | None] = field(default_factory=lambda: [None])  # null follows compute
    micro_batch: list[int] = field(default_factory=lambda: [8])  # completions in one forward pass of the trainer
    num_prompts: int = 32
    num_completions: int = 1  # of each prompt
    max_new_tokens: int = 128
    prompts_from: Prompts = Prompts.auto


@dataclass(frozen=True)
class Arguments:
    """A parsed command line. ``overrides`` are those of the run configuration, ``given`` all of them as they were given."""

    settings: ProbeSettings
    overrides: list[str]
    given: list[str]
    out: Path | None
    against: Path | None
    json: bool


TAKEN = {
    "precision": "probe.rollout, probe.compute and probe.head name the dtypes",
    "precision.compute": "name it in probe.compute",
    "precision.head": "name it in probe.head",
    "precision.rollout": "name it in probe.rollout",
    "precision.rollout_head": "name it in probe.rollout_head",
    "precision.wire": "weights travel in the rollout dtype",
    "rollout": "probe.engine names engines",
    "rollout.backend": "probe.engine names engines",
}
"""Settings of a run that vary inside the grid."""


def parser() -> argparse.ArgumentParser:
    defaults = ProbeSettings()
    listed = "\n".join(f"  {PREFIX}{entry.name}={_shown(getattr(defaults, entry.name))}" for entry in fields(defaults))
    result = Parser(
        prog="grpo-exp probe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Sample completions with every generator asked for, score them with every trainer, and say how far\n"
        "their log-probabilities are apart. Nothing is trained.",
        epilog=f"the grid, with its defaults:\n{listed}\n\nEvery other KEY=VALUE is that of a run: model=…, trainer.device=…",
    )
    result.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    result.add_argument("--out", type=Path, metavar="DIR", help="a new folder for what is measured (probes/MODEL_TIME)")
    result.add_argument("--against", type=Path, metavar="DIR", help="compare with an earlier probe, cell by cell")
    result.add_argument("--json", action="store_true", help="print everything as JSON")
    return result


def _shown(value: Any) -> str:
    match value:
        case Enum():
            return value.name
        case list():
            return f"[{','.join('null' if item is None else str(item) for item in value)}]"
        case _:
            return str(value)


def parse(argv: list[str]) -> Arguments:
    """Raises ConfigErrors for all that is wrong with the grid, and SystemExit for wrong options."""
    known = parser().parse_intermixed_args(argv)
    given = list(known.overrides)
    if known.against is not None:
        given = _like_before(known.against, given)
    of_probe = [one for one in given if one.startswith(PREFIX)]
    overrides = [one for one in given if not one.startswith(PREFIX)]
    problems = [ConfigError(key, value, "", TAKEN[key]) for key, value in values_of(overrides).items() if key in TAKEN]
    settings, more = parse_settings(of_probe)
    if problems + more:
        raise ConfigErrors(problems + more)
    return Arguments(settings, overrides, given, known.out, known.against, known.json)


def values_of(overrides: list[str]) -> dict[str, str]:
    """Key → value; what Hydra cannot read is left for composing to complain of."""
    return {one.lstrip("+~").partition("=")[0]: one.partition("=")[2] for one in overrides}


def _like_before(folder: Path, given: list[str]) -> list[str]:
    """The command line of an earlier probe, with what is given now in place of what was given then."""
    from .store import read_report

    before = [str(one) for one in read_report(folder)["overrides"]]
    keys = values_of(given).keys()
    return [one for one in before if not values_of([one]).keys() & keys] + given


def parse_settings(overrides: list[str]) -> tuple[ProbeSettings, list[ConfigError]]:
    """The grid and what is wrong with it. A list may be written without its brackets."""
    settings, problems = ProbeSettings(), []
    types = {entry.name: entry for entry in fields(ProbeSettings)}
    for override in overrides:
        key, _, text = override.partition("=")
        name = key.removeprefix(PREFIX)
        if name not in types:
            problems.append(_unknown(key, text, types))
            continue
        try:
            value = yaml.safe_load(text)
            if isinstance(getattr(settings, name), list) and not isinstance(value, list):
                value = [yaml.safe_load(part) for part in text.split(",")]
            typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ProbeSettings), {name: value}))
            setattr(settings, name, getattr(typed, name))
        except (yaml.YAMLError, OmegaConfBaseException):
            problems.append(ConfigError(key, text, allowed(name, ProbeSettings)))
    return settings, problems + _value_problems(settings)


def _unknown(key: str, text: str, known: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(key.removeprefix(PREFIX), known, n=1)
    fix = f"did you mean {PREFIX}{near[0]}?" if near else ""
    if key.removeprefix(PREFIX) in {entry.name for entry in fields(ProbeConfig)}:
        fix = "that is a setting of the probe inside a run"
    return ConfigError(key, text, known, fix)


def _value_problems(settings: ProbeSettings) -> list[ConfigError]:
    problems: list[ConfigError] = []
    for name in ("rollout", "rollout_head", "compute", "head"):
        key, values = PREFIX + name, getattr(settings, name)
        try:
            parsed = [None if value is None else parse_dtype(value, key) for value in values]
        except ConfigError as error:
            problems.append(error)
            continue
        setattr(settings, name, list(dict.fromkeys(parsed)))
        if not values or "auto" in parsed or (None in parsed and "head" not in name):
            follows = " and null" if "head" in name else ""
            problems.append(ConfigError(key, _shown(values), f"a list of {', '.join(NAMES)}{follows}"))
    options = sorted({path.stem for path in (CONF_DIR / "rollout").glob("*.yaml")} - {"replay"})
    for engine in settings.engine or [""]:
        if engine not in options:
            problems.append(ConfigError("probe.engine", engine, options))
    for name in ("num_prompts", "num_completions", "max_new_tokens"):
        if getattr(settings, name) < 1:
            problems.append(ConfigError(PREFIX + name, getattr(settings, name), "1 or more"))
    if not settings.micro_batch or min(settings.micro_batch) < 1:
        problems.append(ConfigError("probe.micro_batch", _shown(settings.micro_batch), "a list of numbers from 1 on"))
    return problems
