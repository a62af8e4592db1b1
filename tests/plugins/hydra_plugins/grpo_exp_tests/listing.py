"""Says which jobs a sweep has, and runs none."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher


@dataclass
class Conf:
    _target_: str = "hydra_plugins.grpo_exp_tests.listing.ListingLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="listing", node=Conf)


class ListingLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        pass

    def launch(self, job_overrides, initial_job_idx):
        for overrides in job_overrides:
            print(*overrides)
        return []
