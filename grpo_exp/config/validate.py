"""What can be known to be wrong with the values of a configuration, by looking at them alone. Imports no torch.

The task and the tracker check their own groups; :mod:`grpo_exp.checks` puts everything together.
"""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from ..assets import check_known, locate
from ..errors import ConfigError
from .alarms import alarm_problems
from .algos import algo_problems
from .corrections import correction_problems
from .layouts import layout_problems
from .messages import allowed, leaves
from .rollouts import engine_problems, rollout_problems
from .schema import Config, Device
from .sites import FOLLOWS, UNKNOWN, checkpoint_dtype, combination_problems, resolve_sites, site_problems

POSITIVE = "a number > 0"
SMALLEST, LARGEST = 2.0**-126, 2.0**127  # fp32 holds what lies between in full precision
COUNT = "1 or more"
MANY = 1024  # processes or threads: beyond it a machine is brought down by a typo
COUNT_OR_ZERO = "0 or more"


def value_problems(config: Config) -> list[ConfigError]:
    """Every problem of the groups model, precision, rollout, algo, correction, optim and alarm, and of trainer."""
    wrong_types = type_problems(config)
    if wrong_types:  # nothing else can be said about such values
        return wrong_types
    try:
        check_known("model.name_or_path", config.model.name_or_path)
        check_known("model.tokenizer", config.model.tokenizer or "")
    except ConfigError as error:
        return [error]
    return [
        *_precision_problems(config),
        *_model_problems(config),
        *_count_problems(config),
        *_number_problems(config),
        *rollout_problems(config),
        *algo_problems(config),
        *correction_problems(config),
        *layout_problems(config),
        *alarm_problems(config.alarm),
    ]


def type_problems(config: Config) -> list[ConfigError]:
    """Values that are of another type than the schema says. Only Python can give any: OmegaConf converts or refuses."""
    problems = []
    for key, hint in leaves().items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if key.removeprefix("precision.") not in FOLLOWS and not _fits(value, hint):  # a dtype may be torch's own
            problems.append(ConfigError(key, value, allowed(key)))
    return problems


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    kind = get_origin(hint) or hint
    return isinstance(value, int | float if kind is float else kind)


def _precision_problems(config: Config) -> list[ConfigError]:
    precision, kwargs = config.precision, config.model.init_kwargs
    problems = site_problems(precision, kwargs)
    folder = Path(locate(config.model.name_or_path)) / str(kwargs.get("subfolder", ""))
    own = checkpoint_dtype(folder) if folder.is_dir() else None
    if not problems:
        try:
            sites = resolve_sites(precision, kwargs, own or UNKNOWN, config.lora.rank > 0)
            problems = combination_problems(precision, sites, config.optim.eps, config.distributed.strategy)
            problems += engine_problems(config.rollout.backend, {site: entry.name for site, entry in sites.items()})
        except ConfigError as error:
            problems = [] if own is None else [error]  # without the checkpoint at hand, auto may stand for anything
    if precision.matmul in ("high", "medium") and config.trainer.device is Device.cpu:
        problems.append(ConfigError("precision.matmul", precision.matmul, "highest", "a CPU has no TF32 matmuls"))
    return problems


def _model_problems(config: Config) -> list[ConfigError]:
    problems = []
    name = config.model.name_or_path
    folder = Path(locate(name)).expanduser()
    if not name.strip():
        problems.append(ConfigError("model.name_or_path", name, "a model's name or the path of a checkpoint"))
    elif name.startswith(("/", ".", "~")) and not (folder / "config.json").is_file():
        problems.append(ConfigError("model.name_or_path", name, "a folder with a checkpoint (config.json)"))
    if config.model.init_kwargs.get("use_safetensors") is False:
        problems.append(ConfigError("model.init_kwargs.use_safetensors", False, "true", "pickled weights can run code"))
    if config.model.init_kwargs.get("trust_remote_code") and not config.model.trust_remote_code:
        problems.append(
            ConfigError("model.init_kwargs.trust_remote_code", True, "model.trust_remote_code", "set it there")
        )
    return problems


def _refused(values: dict[str, Any], allowed: str, is_good: Callable[[Any], bool]) -> list[ConfigError]:
    """One problem for each value that is neither null nor good."""
    return [
        ConfigError(key, value, allowed) for key, value in values.items() if value is not None and not is_good(value)
    ]


def _count_problems(config: Config) -> list[ConfigError]:
    trainer, rollout = config.trainer, config.rollout
    positive = {
        "trainer.max_steps": trainer.max_steps,
        "trainer.max_epochs": trainer.max_epochs,
        "trainer.prompts_per_step": trainer.prompts_per_step,
        "trainer.tokens_per_micro_batch": trainer.tokens_per_micro_batch,
        "trainer.logprob_chunk": trainer.logprob_chunk,
        "trainer.keep_checkpoints": trainer.keep_checkpoints,
        "trainer.max_skipped_steps": trainer.max_skipped_steps,
        "rollout.batch_size": rollout.batch_size,
        "probe.prompts": config.probe.prompts,
        "sweep.window": config.sweep.window,
    }
    or_zero = {
        "repeat": config.repeat,
        "lora.rank": config.lora.rank,
        "trainer.eval_every": trainer.eval_every,
        "trainer.save_every": trainer.save_every,
        "probe.every": config.probe.every,
        "optim.warmup_steps": config.optim.warmup_steps,
        "rollout.max_staleness": rollout.max_staleness,
        "rollout.max_retries": rollout.max_retries,
        "rollout.max_failures": rollout.max_failures,
        "tracker.details_every": config.tracker.details_every,
        "tracker.num_samples": config.tracker.num_samples,
    }
    threads = {"trainer.num_threads": trainer.num_threads, "rollout.num_threads": rollout.num_threads}
    problems = [
        *_refused(positive, COUNT, lambda value: value >= 1),
        *_refused(or_zero, COUNT_OR_ZERO, lambda value: value >= 0),
        *_refused(threads, f"1 to {MANY}", lambda value: 1 <= value <= MANY),
        *_refused({"rollout.num_workers": rollout.num_workers}, f"0 to {MANY}", lambda value: 0 <= value <= MANY),
    ]
    if trainer.max_steps is None and trainer.max_epochs is None and trainer.max_minutes is None:
        fix = "or set trainer.max_epochs or trainer.max_minutes"
        problems.append(ConfigError("trainer.max_steps", None, COUNT, fix))
    return problems


def _number_problems(config: Config) -> list[ConfigError]:
    trainer, optim = config.trainer, config.optim
    positive = {
        "trainer.max_minutes": trainer.max_minutes,
        "distributed.timeout_s": config.distributed.timeout_s,
        "trainer.stall_timeout_s": trainer.stall_timeout_s,
        "rollout.startup_timeout_s": config.rollout.startup_timeout_s,
        "rollout.request_timeout_s": config.rollout.request_timeout_s,
        "rollout.http_timeout_s": config.rollout.http_timeout_s,
        "optim.eps": optim.eps,
        "lora.alpha": config.lora.alpha,
        "algo.advantage_eps": config.algo.advantage_eps,
        "sweep.margin": config.sweep.margin,
    }
    decays = {"optim.beta1": optim.beta1, "optim.beta2": optim.beta2}
    or_zero = {"optim.lr": optim.lr, "optim.weight_decay": optim.weight_decay}  # lr=0 shows what stays without learning
    return [
        *_refused(positive, POSITIVE, lambda value: SMALLEST <= value <= LARGEST),
        *_refused(or_zero, COUNT_OR_ZERO, lambda value: value == 0 or SMALLEST <= value <= LARGEST),
        *_refused({"probe.max_share": config.probe.max_share}, "0 to 1", lambda value: 0 <= value <= 1),
        *_refused({"sweep.collapse": config.sweep.collapse}, "null, or 0 to 1", lambda value: 0 <= value <= 1),
        *_refused({"optim.max_grad_norm": optim.max_grad_norm}, COUNT_OR_ZERO, lambda value: value >= 0),
        *_refused(decays, "a number from 0 up to, but not, 1", lambda value: 0 <= value < 1),
    ]
