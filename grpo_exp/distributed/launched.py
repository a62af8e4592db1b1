"""How many ranks a launcher started, as its environment says: torchrun, accelerate launch. Imports no torch."""

import os
from dataclasses import dataclass

from ..config.schema import Config, Strategy
from ..errors import ConfigError

COMMAND = "torchrun --nproc-per-node 2 -m grpo_exp …"


@dataclass(frozen=True)
class Launched:
    """This process among those that were started together."""

    rank: int
    num_ranks: int
    local_rank: int  # on its machine
    by_launcher: bool  # also one rank alone can be started by a launcher

    @property
    def leads(self) -> bool:
        return self.rank == 0


def launched() -> Launched:
    count = os.environ.get("WORLD_SIZE")
    rank = int(os.environ.get("RANK", "0"))
    return Launched(rank, int(count or "1"), int(os.environ.get("LOCAL_RANK", rank)), count is not None)


def launch_problems(config: Config) -> list[ConfigError]:
    """What was started does not fit ``distributed.strategy``."""
    found, strategy = launched(), config.distributed.strategy
    if strategy is Strategy.single and found.num_ranks > 1:
        fix = f"this is one of {found.num_ranks} ranks: start it without a distributed launcher, or add distributed=ddp"
        return [ConfigError("distributed.strategy", strategy.name, "ddp", fix)]
    if strategy is not Strategy.single and not found.by_launcher:
        fix = f"several ranks are started by a launcher: {COMMAND} distributed={strategy.name}"
        return [ConfigError("distributed.strategy", strategy.name, "single", fix)]
    return []
