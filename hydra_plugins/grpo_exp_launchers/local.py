"""``hydra/launcher=local``: what ``grpo-exp -m`` uses. Thin and light, since every Hydra application imports it."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Freezes every job at submission and hands the folders to :func:`grpo_exp.launch.local.launch`."""

    def __init__(self, n_jobs: int, retry: str) -> None:
        self.n_jobs, self.retry = n_jobs, retry

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        from grpo_exp.config.compose import compose_jobs
        from grpo_exp.launch.local import launch

        jobs = compose_jobs(self.hydra_context, self.config, job_overrides)
        return [_completed(str(path)) for path in launch(jobs, self.n_jobs, self.retry)]


def _completed(value: str) -> JobReturn:
    result = JobReturn(status=JobStatus.COMPLETED)
    result.return_value = value
    return result
