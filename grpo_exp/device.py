"""Where the trainer computes, and on how many ranks: what accelerate says, checked against what was asked for."""

import torch

from .config.schema import Config, Device
from .distributed.launched import launch_problems, launched
from .errors import ConfigError


def compute_device(config: Config) -> torch.device:
    """The device of this process.

    Raises:
        ConfigError: if it has no such device, or was started as one of several ranks, which distributed=single is not.
    """
    asked = config.trainer.device
    if asked is Device.cuda and not torch.cuda.is_available():
        raise ConfigError("trainer.device", "cuda", "auto, cpu", "torch sees no CUDA device here")
    if problems := launch_problems(config):
        raise problems[0]
    cpu = asked is Device.cpu or not torch.cuda.is_available()
    found = launched()
    if found.by_launcher:  # accelerate would set up process groups of its own
        return torch.device("cpu") if cpu else torch.device("cuda", found.local_rank)
    from accelerate import PartialState

    device: torch.device = PartialState(cpu=cpu).device
    return device


def num_ranks() -> int:
    """Ranks in effect, for the audit."""
    from accelerate import PartialState

    return int(PartialState().num_processes)
