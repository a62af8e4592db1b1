"""``hydra/launcher=local``: what ``grpo-exp -m`` uses. Thin and light, since every Hydra application imports it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class LocalLauncherConf:
    """One process per run, ``n_jobs`` at a time. ``retry=failed`` runs again what failed before."""

    _target_: str = "hydra_plugins.grpo_exp_launchers.local.LocalLauncher"
    n_jobs: int = 1
    retry: str = "none"


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConf, provider="grpo_exp")


class LocalLauncher(Launcher):
    """Freezes every job at submission and hands the folders to :func:`grpo_exp.launch.local.run_sweep`."""

    def __init__(self, n_jobs: int, retry: str) -> None:
        self.n_jobs, self.retry = n_jobs, retry

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        from grpo_exp.launch.submit import launch_local

        results = launch_local(self.hydra_context, self.config, job_overrides, self.n_jobs, self.retry)
        return [_job_return(path) for path in results]


def _job_return(path: Any) -> JobReturn:
    result = JobReturn(status=JobStatus.COMPLETED)
    result.return_value = str(path)
    return result
