"""``hydra/launcher=local``: what ``grpo-exp -m`` uses. Thin and light, since every Hydra application imports it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore

from .freezing import FreezingLauncher

if TYPE_CHECKING:
    from pathlib import Path

    from grpo_exp.config.compose import Composed


@dataclass
class LocalLauncherConf:
    """One process per run, ``n_jobs`` at a time. ``retry=failed`` runs again what failed before."""

    _target_: str = "hydra_plugins.grpo_exp_launchers.local.LocalLauncher"
    n_jobs: int = 1
    retry: str = "none"


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConf, provider="grpo_exp")


class LocalLauncher(FreezingLauncher):
    """Hands the jobs to :func:`grpo_exp.launch.local.launch`."""

    def __init__(self, n_jobs: int, retry: str) -> None:
        self.n_jobs, self.retry = n_jobs, retry

    def launch_jobs(self, jobs: "list[Composed]") -> "list[Path]":
        from grpo_exp.launch.local import launch

        return launch(jobs, self.n_jobs, self.retry)
