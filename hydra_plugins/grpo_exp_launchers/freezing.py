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
        from pathlib import Path

        from grpo_exp.config.compose import compose_jobs
        from grpo_exp.report.verdict import value_of

        jobs = compose_jobs(self.hydra_context, self.config, job_overrides)
        paths = self.launch_jobs(jobs)
        if "varied" not in self.config.hydra.sweeper:  # not ours: another may write its results there, as Optuna's does
            Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        # a search (Optuna's sweeper) goes by this; equal jobs are one run
        values = {path: value_of(path) for path in paths} if len(paths) == len(jobs) else {}
        return [_completed(values.get(path)) for path in paths]

    def launch_jobs(self, jobs: "list[Composed]") -> "list[Path]":
        """Run or submit what is not done yet; returns the run folders."""
        raise NotImplementedError


def _completed(value: float | None) -> JobReturn:
    result = JobReturn(status=JobStatus.COMPLETED)
    result.return_value = value
    return result
