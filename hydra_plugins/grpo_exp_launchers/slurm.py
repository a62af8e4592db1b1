"""``hydra/launcher=slurm``: the runs of a sweep as an array of a Slurm cluster. Thin, as ``local`` is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore

from grpo_exp.launch.sbatch import SlurmOptions

from .freezing import FreezingLauncher

if TYPE_CHECKING:
    from pathlib import Path

    from grpo_exp.config.compose import Composed


@dataclass
class SlurmLauncherConf(SlurmOptions):
    """The options, and what Hydra makes of them."""

    _target_: str = "hydra_plugins.grpo_exp_launchers.slurm.SlurmLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="slurm", node=SlurmLauncherConf, provider="grpo_exp")


class SlurmLauncher(FreezingLauncher):
    """Hands the jobs to :func:`grpo_exp.launch.slurm.launch`."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def launch_jobs(self, jobs: "list[Composed]") -> "list[Path]":
        from grpo_exp.launch.slurm import launch

        lists: dict[str, Any] = {key: list(self.options[key]) for key in ("setup", "extra")}  # Hydra's are its own
        return launch(jobs, SlurmOptions(**{**self.options, **lists}))
