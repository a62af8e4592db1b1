"""The grid as cells, each with the configuration of a run that would have it. Imports no torch.

A cell that this machine, an engine or the precision rules cannot do keeps the reason; the others are measured.
"""

from dataclasses import dataclass, replace
from itertools import product

from ..checks import find_problems, machine_problems
from ..config.compose import compose, to_typed
from ..config.schema import Config, LossScaleMode, PrecisionConfig
from ..errors import ConfigError, ConfigErrors
from .settings import ProbeSettings


@dataclass(frozen=True)
class Generator:
    """One way to sample."""

    engine: str
    rollout: str
    head: str

    @property
    def label(self) -> str:
        return f"{self.engine} {with_head(self.rollout, self.head)}"


@dataclass(frozen=True)
class Trainer:
    """One way to score."""

    compute: str
    head: str
    micro_batch: int

    @property
    def label(self) -> str:
        return f"{with_head(self.compute, self.head)}, {self.micro_batch} at a time"


def with_head(body: str, head: str) -> str:
    return body if head == body else f"{body}, head {head}"


def generators(settings: ProbeSettings) -> list[Generator]:
    cells = product(settings.engine, settings.rollout, settings.rollout_head)
    return list(dict.fromkeys(Generator(engine, rollout, head or rollout) for engine, rollout, head in cells))


def trainers(settings: ProbeSettings) -> list[Trainer]:
    cells = product(settings.compute, settings.head, settings.micro_batch)
    return list(dict.fromkeys(Trainer(compute, head or compute, size) for compute, head, size in cells))


def base_config(overrides: list[str], settings: ProbeSettings) -> Config:
    """What is the same in all cells: model, task, device, threads.

    Raises:
        ConfigErrors: whatever is wrong with it, cells apart.
    """
    config = _composed("hf", overrides, settings)
    problems = [*find_problems(config), *machine_problems(config)]
    if problems:
        raise ConfigErrors(problems)
    return config


def _composed(engine: str, overrides: list[str], settings: ProbeSettings) -> Config:
    config = to_typed(compose(["precision=fp32", f"rollout={engine}", *overrides]).config)
    config.task.max_completion_tokens = settings.max_new_tokens
    return config


def generator_config(cell: Generator, overrides: list[str], settings: ProbeSettings) -> Config:
    """The configuration of a run whose workers sample like this.

    Raises:
        ConfigError: what the engine or this machine cannot do.
    """
    config = _composed(cell.engine, overrides, settings)
    precision = replace(config.precision, rollout=cell.rollout, rollout_head=cell.head)
    rollout = replace(config.rollout, num_workers=min(config.rollout.num_workers, 1))
    return _checked(replace(config, precision=precision, rollout=rollout))


def trainer_config(cell: Trainer, base: Config) -> Config:
    """The configuration of a run whose trainer computes like this. Raises ConfigError as above."""
    precision = replace(base.precision, compute=cell.compute, head=cell.head, rollout="fp32", rollout_head="fp32")
    return _checked(replace(base, precision=_scaled(precision, cell.compute)))


def _scaled(precision: PrecisionConfig, compute: str) -> PrecisionConfig:
    """fp16 compute over fp32 weights wants a loss scale; without a backward pass it does nothing."""
    needed = compute == "fp16" and precision.params == "fp32"
    mode = LossScaleMode.dynamic if needed else LossScaleMode.none
    return replace(precision, loss_scale=replace(precision.loss_scale, mode=mode))


def _checked(config: Config) -> Config:
    problems = [*find_problems(config), *machine_problems(config)]
    if problems:
        raise ConfigErrors(problems)
    return config


def reason(error: Exception) -> str:
    """Why a cell is refused or failed, in one line."""
    if isinstance(error, ConfigErrors):
        return "; ".join(str(one) for one in error.errors)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if isinstance(error, ConfigError) or len(lines) == 1 else f"{lines[0]}: {lines[-1]}"
