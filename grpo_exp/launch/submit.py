"""What the Hydra launchers do with the jobs of a sweep: compose each once, then run them."""

from collections.abc import Sequence
from pathlib import Path

from hydra.types import HydraContext
from omegaconf import DictConfig

from ..config.compose import Composed, composed
from ..errors import ConfigError
from .local import run_sweep

RETRY = ("none", "failed")


def launch_local(
    context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]], num_parallel: int, retry: str
) -> list[Path]:
    """Run a sweep on this machine; returns its run folders.

    Raises:
        ConfigErrors: if any job cannot be run.
        SystemExit: 1 if a run did not end well.
    """
    if retry not in RETRY:
        raise ConfigError("hydra.launcher.retry", retry, RETRY)
    if num_parallel < 1:
        raise ConfigError("hydra.launcher.n_jobs", num_parallel, "1 or more")
    jobs = compose_jobs(context, config, job_overrides)
    ended = run_sweep(jobs, num_parallel, retry == "failed")
    if any(code for _, code in ended):
        raise SystemExit(1)
    return [planned.path for planned, _ in ended]


def compose_jobs(context: HydraContext, config: DictConfig, job_overrides: Sequence[Sequence[str]]) -> list[Composed]:
    """The configuration of every job. Composing takes a tenth of a second, so each is composed once."""
    loader = context.config_loader
    return [composed(loader.load_sweep_config(config, list(overrides)), list(overrides)) for overrides in job_overrides]
