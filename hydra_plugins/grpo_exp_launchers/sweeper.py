"""``hydra/sweeper=whole``: Hydra's basic sweeper, but all jobs at once and each composed once.

The basic one composes every job to see whether it can be, and the launcher composes it again; and it writes into the sweep's
folder before it knows that any job can run.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser


@dataclass
class WholeSweeperConf:
    """``params`` are the factors of a named sweep; those of the command line win. ``varied`` is filled in for the jobs."""

    _target_: str = "hydra_plugins.grpo_exp_launchers.sweeper.WholeSweeper"
    params: dict[str, Any] | None = field(default_factory=dict)
    varied: list[str] = field(default_factory=list)


ConfigStore.instance().store(group="hydra/sweeper", name="whole", node=WholeSweeperConf, provider="grpo_exp")


class WholeSweeper(BasicSweeper):
    """The cartesian product of the factors, in one batch."""

    def __init__(self, params: dict[str, Any] | None, varied: list[str]) -> None:
        super().__init__(max_batch_size=None, params=params)

    def sweep(self, arguments: list[str]) -> Any:
        from grpo_exp.config.compose import normalise, varied_keys, with_repeats

        from .freezing import FreezingLauncher

        assert self.config is not None
        assert self.hydra_context is not None
        assert self.launcher is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        factors = normalise([*self._parse_config(), *arguments])
        [jobs] = self.split_arguments(parser.parse_overrides(factors), max_batch_size=None)
        jobs = with_repeats(jobs, self.config.sweep.again)
        names = ",".join(f"'{key}'" for key in dict.fromkeys(key for job in varied_keys(jobs) for key in job))
        # with the overrides that every launcher gives to every job, so that each knows what it is named by
        self.config.hydra.overrides.hydra.append(f"hydra.sweeper.varied=[{names}]")
        if not isinstance(self.launcher, FreezingLauncher):  # which checks every job itself before it starts one
            self.validate_batch_is_legal(jobs)
        results = self.launcher.launch(jobs, initial_job_idx=0)
        for result in results:
            _ = result.return_value  # raises where a job failed
        return [results]
