"""Everything that can be known to be wrong before anything is built, all of it at once. Imports no torch.

A user mends all problems in one go; nothing is loaded, and no run folder made, while there is one.
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from . import assets, tasks, track
from .config.replays import replay_problems
from .config.schema import Backend, Config, Device
from .config.validate import type_problems, value_problems
from .distributed.launched import launch_problems
from .errors import ConfigError, ConfigErrors

DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap", "/dev/kfd")  # NVIDIA, the same under WSL and on Tegra, AMD


def check(config: Config) -> None:
    """Raises :class:`ConfigErrors` (a ValueError) listing every problem."""
    problems = find_problems(config)
    if problems:
        raise ConfigErrors(problems)


def find_problems(config: Config) -> list[ConfigError]:
    """What is wrong with a configuration wherever it runs."""
    problems = value_problems(config)
    if not type_problems(config):
        problems += replay_problems(config)
    return [*problems, *tasks.validate(config.task), *track.validate(config.tracker)]


def machine_problems(config: Config, starts_ranks: bool = False) -> list[ConfigError]:
    """What does not go on this machine, as far as that is seen without torch.

    Args:
        starts_ranks: ranks are not expected to have been started: that is still to come.
    """
    missing = assets.problem("model.name_or_path", config.model.name_or_path)
    problems = [*([] if starts_ranks else launch_problems(config)), *([] if missing is None else [missing])]
    if _starts_vllm(config) and find_spec("vllm") is None:
        fix = "vllm is not installed: `make setup-vllm`, or `pip install grpo-exp[vllm]` on a machine with a GPU"
        problems.append(ConfigError("rollout.backend", config.rollout.backend.name, "hf", fix))
    if config.lora.rank and find_spec("peft") is None:
        fix = "peft is not installed: pip install 'grpo-exp[lora]'"
        problems.append(ConfigError("lora.rank", config.lora.rank, "0", fix))
    if has_gpu():
        return problems
    if config.trainer.device is Device.cuda:
        problems.append(ConfigError("trainer.device", "cuda", "auto, cpu", "this machine has no GPU"))
    elif config.precision.matmul in ("high", "medium") and config.trainer.device is Device.auto:
        fix = "this machine has no GPU, and a CPU has no TF32 matmuls"
        problems.append(ConfigError("precision.matmul", config.precision.matmul, "highest", fix))
    return problems


def _starts_vllm(config: Config) -> bool:
    match config.rollout.backend:
        case Backend.hf | Backend.replay:
            return False
        case Backend.vllm:
            return True
        case Backend.vllm_server:
            return not config.rollout.urls


def choice_problems(config: Config, choices: Mapping[str, str]) -> list[ConfigError]:
    """What contradicts the group option it came with."""
    name = config.model.name_or_path
    if choices.get("model") == "local" and not name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        allowed = "a folder with a checkpoint (config.json)"
        return [ConfigError("model.name_or_path", name, allowed, "model=hub takes the name of a model on a hub")]
    return []


def has_gpu() -> bool:
    """Whether a driver of a GPU is there and not hidden from this process."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path(driver).exists() for driver in DRIVERS)
