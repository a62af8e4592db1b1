"""``hydra/launcher=planning``: composes the jobs of a sweep and launches nothing. For ``grpo-exp plan``."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

from .freezing import FreezingLauncher


@dataclass
class PlanningLauncherConf:
    """There is nothing to set."""

    _target_: str = "hydra_plugins.grpo_exp_launchers.planning.PlanningLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="planning", node=PlanningLauncherConf, provider="grpo_exp")


class PlanningLauncher(FreezingLauncher):
    """Leaves the jobs in ``grpo_exp.plan.collected``."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        from grpo_exp.config.compose import compose_jobs
        from grpo_exp.plan import collected

        collected.extend(compose_jobs(self.hydra_context, self.config, job_overrides))
        return []
