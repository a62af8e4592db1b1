"""What the launchers of grpo_exp have in common: each job is composed once and handed over as a whole."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from pathlib import Path

    from grpo_exp.config.compose import Composed


class FreezingLauncher(Launcher):
    """Freezes every job at submission, so that an edit made later changes none."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        from grpo_exp.config.compose import compose_jobs

        jobs = compose_jobs(self.hydra_context, self.config, job_overrides)
        return [_completed(str(path)) for path in self.launch_jobs(jobs)]

    def launch_jobs(self, jobs: "list[Composed]") -> "list[Path]":
        """Run or submit what is not done yet; returns the run folders."""
        raise NotImplementedError


def _completed(value: str) -> JobReturn:
    result = JobReturn(status=JobStatus.COMPLETED)
    result.return_value = value
    return result
