"""Where the trainer computes, and on how many ranks: what accelerate says, checked against what was asked for."""

import os

import torch

from .config.schema import Config, Device
from .errors import ConfigError


def compute_device(config: Config) -> torch.device:
    """The device of this process.

    Raises:
        ConfigError: if it has no such device, or was started as one of several ranks, which distributed=single is not.
    """
    from accelerate import PartialState

    asked = config.trainer.device
    if asked is Device.cuda and not torch.cuda.is_available():
        raise ConfigError("trainer.device", "cuda", "auto, cpu", "torch sees no CUDA device here")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "distributed.strategy",
            config.distributed.strategy.name,
            "a single process",
            f"this is one of {os.environ['WORLD_SIZE']} ranks: start it without a distributed launcher",
        )
    cpu = asked is Device.cpu or not torch.cuda.is_available()
    device: torch.device = PartialState(cpu=cpu).device
    return device


def num_ranks() -> int:
    """Ranks in effect, for the audit."""
    from accelerate import PartialState

    return int(PartialState().num_processes)
