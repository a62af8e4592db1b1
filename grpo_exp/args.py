"""The settings of the library, under the names that users of TRL know, mapped onto the one configuration.

``AsyncGRPOConfig`` is flat; what has no name of its own here is set on ``base``. :meth:`AsyncGRPOConfig.to_config` and
:meth:`AsyncGRPOConfig.from_config` go back and forth, so the command line and the library run the same thing.
"""

from copy import deepcopy
from dataclasses import InitVar, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from . import tasks
from .config.schema import (
    Advantage,
    AlgoConfig,
    Config,
    Device,
    Normalization,
    OptimConfig,
    PrecisionConfig,
    RolloutConfig,
    Schedule,
    TaskConfig,
    TrackerName,
    TrainerConfig,
    default_config,
)
from .config.sites import parse_init_kwargs
from .config.validate import value_problems
from .errors import ConfigError, ConfigErrors

PATHS = {
    "trust_remote_code": "model.trust_remote_code",
    "num_generations": "algo.group_size",
    "advantage": "algo.advantage",
    "normalization": "algo.normalization",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "mask_truncated_completions": "algo.mask_truncated",
    "max_completion_length": "task.max_completion_tokens",
    "temperature": "rollout.temperature",
    "max_staleness": "rollout.max_staleness",
    "num_workers": "rollout.num_workers",
    "learning_rate": "optim.lr",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.max_grad_norm",
    "lr_scheduler_type": "optim.schedule",
    "warmup_steps": "optim.warmup_steps",
    "max_steps": "trainer.max_steps",
    "num_train_epochs": "trainer.max_epochs",
    "eval_steps": "trainer.eval_every",
    "save_steps": "trainer.save_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "report_to": "tracker.name",
    "seed": "seed",
}
"""Names of the library → keys of the configuration, wherever one stands for the other."""

NAMES = {path: name for name, path in PATHS.items()}

ENUMS: dict[str, type[Enum]] = {
    "advantage": Advantage,
    "normalization": Normalization,
    "lr_scheduler_type": Schedule,
    "report_to": TrackerName,
}


@runtime_checkable
class Scalar(Protocol):
    """A number of NumPy's or torch's."""

    def item(self) -> Any: ...


@dataclass
class AsyncGRPOConfig:
    """Settings of :class:`grpo_exp.AsyncGRPOTrainer`.

    Args:
        output_dir: the run folder.
        model_init_kwargs: keywords of ``from_pretrained``, a dictionary (never changed) or a JSON object as a string. A
            ``dtype`` in it must agree with ``precision``.
        precision: the name of a shipped option (``"bf16"``, ``"fp16"``, …), a :class:`PrecisionConfig`, or ``"auto"``.
        per_device_train_batch_size: completions per forward pass and device, times ``gradient_accumulation_steps`` the
            completions of one optimizer step; must be a multiple of ``num_generations``. How a step is cut into
            micro-batches is decided by ``base.trainer.tokens_per_micro_batch``.
        max_steps: optimizer steps; None or -1: no bound, then ``num_train_epochs`` has to be given.
        use_cpu: compute on the CPU even where there is a GPU.
        base: every other setting.
        bf16, fp16: TRL's names for what ``precision`` says here; True is refused.

    Raises:
        ConfigError: (a ValueError) for values that cannot be used; again by :meth:`to_config`, as fields can be set.
    """

    output_dir: str = "run"
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    precision: PrecisionConfig | str = "auto"
    num_generations: int = AlgoConfig.group_size
    per_device_train_batch_size: int = TrainerConfig.prompts_per_step * AlgoConfig.group_size
    gradient_accumulation_steps: int = 1
    advantage: str = AlgoConfig.advantage.name
    normalization: str = AlgoConfig.normalization.name
    epsilon: float = AlgoConfig.clip_low
    epsilon_high: float | None = None
    mask_truncated_completions: bool = AlgoConfig.mask_truncated
    max_completion_length: int = TaskConfig.max_completion_tokens
    temperature: float = RolloutConfig.temperature
    max_staleness: int | None = RolloutConfig.max_staleness
    num_workers: int = RolloutConfig.num_workers
    learning_rate: float = OptimConfig.lr
    adam_beta1: float = OptimConfig.beta1
    adam_beta2: float = OptimConfig.beta2
    adam_epsilon: float = OptimConfig.eps
    weight_decay: float = OptimConfig.weight_decay
    max_grad_norm: float = OptimConfig.max_grad_norm
    lr_scheduler_type: str = OptimConfig.schedule.name
    warmup_steps: int = OptimConfig.warmup_steps
    max_steps: int | None = TrainerConfig.max_steps
    num_train_epochs: int | None = TrainerConfig.max_epochs
    eval_steps: int = TrainerConfig.eval_every
    save_steps: int = TrainerConfig.save_every
    save_total_limit: int = TrainerConfig.keep_checkpoints
    report_to: str | list[str] = TrackerName.none.name
    seed: int = Config.seed
    use_cpu: bool = False
    base: Config = field(default_factory=default_config)
    bf16: InitVar[bool] = False
    fp16: InitVar[bool] = False

    def __post_init__(self, bf16: bool, fp16: bool) -> None:
        for name, given in {"bf16": bf16, "fp16": fp16}.items():
            if given:
                raise ConfigError(name, given, "", f'say precision="{name}": it sets the dtypes of both sides')
        self.to_config()

    def to_config(self) -> Config:
        """The configuration these settings stand for; ``base`` is not changed.

        Raises:
            ConfigError: (a ValueError) for a batch that holds no whole groups, a name that is none, a value of the wrong
                type or out of bounds; under the name it has here.
        """
        if not isinstance(self.base, Config) or not is_dataclass(self.base.model):
            raise ConfigError("base", self.base, "grpo_exp.config.schema.default_config(), with values changed")
        config = deepcopy(self.base)
        for name, path in PATHS.items():
            _set(config, path, self._value(name))
        config.model.init_kwargs = parse_init_kwargs(self.model_init_kwargs)
        config.precision = self._precision()
        config.trainer.prompts_per_step = self._prompts_per_step()
        if self.use_cpu:
            config.trainer.device = Device.cpu
        problems = [_renamed(problem) for problem in (value_problems(config) or tasks.common_problems(config.task))]
        if problems:
            raise ConfigErrors(problems) if len(problems) > 1 else problems[0]
        return config

    @classmethod
    def from_config(cls, config: Config, output_dir: str) -> "AsyncGRPOConfig":
        """The settings that stand for a configuration: ``from_config(c, d).to_config() == c``."""
        values = {name: _get(config, path) for name, path in PATHS.items()}
        values |= {name: values[name].name for name in ENUMS}
        return cls(
            output_dir=output_dir,
            model_init_kwargs=dict(config.model.init_kwargs),
            precision=config.precision,
            per_device_train_batch_size=config.trainer.prompts_per_step * config.algo.group_size,
            use_cpu=config.trainer.device is Device.cpu,
            base=deepcopy(config),
            **values,
        )

    def _value(self, name: str) -> Any:
        value = getattr(self, name)
        if isinstance(value, Scalar):
            value = value.item()
        if name == "epsilon_high" and value is None:
            return self.epsilon
        if name == "max_steps" and value == -1:
            return None
        if name == "report_to" and isinstance(value, list | tuple) and len(value) < 2:  # as TRL writes it
            value = value[0] if value else TrackerName.none.name
        if name not in ENUMS:
            return value
        if not isinstance(value, str) or value not in ENUMS[name].__members__:
            raise ConfigError(name, value, ENUMS[name].__members__)
        return ENUMS[name][value]

    def _precision(self) -> PrecisionConfig:
        from .config.compose import load_precision

        if isinstance(self.precision, PrecisionConfig):
            return replace(self.precision, loss_scale=replace(self.precision.loss_scale))
        return load_precision(str(self.precision))  # a torch.dtype is the name of an option as well

    def _prompts_per_step(self) -> int:
        for name in ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps"):
            if type(value := getattr(self, name)) is not int:
                raise ConfigError(name, value, "a whole number")
        if self.num_generations < 2:
            raise ConfigError("num_generations", self.num_generations, "2 or more completions of each prompt")
        completions = self.per_device_train_batch_size * self.gradient_accumulation_steps
        prompts, rest = divmod(completions, self.num_generations)
        if rest or not prompts:
            lower = prompts * self.num_generations
            near = ", ".join(str(n) for n in (lower, lower + self.num_generations) if n > 0)
            raise ConfigError(
                "per_device_train_batch_size",
                self.per_device_train_batch_size,
                f"completions in multiples of num_generations={self.num_generations}",
                f"1 rank x {self.per_device_train_batch_size} x gradient_accumulation_steps="
                f"{self.gradient_accumulation_steps} = {completions} completions a step; nearest: {near}",
            )
        return prompts


def _renamed(problem: ConfigError) -> ConfigError:
    """A problem under the name that the key has here."""
    name = NAMES.get(problem.key, problem.key)
    return ConfigError(name, problem.value, problem.allowed, problem.fix)


def _set(config: Config, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    target: Any = config
    for parent in parents:
        target = getattr(target, parent)
    assert name in {entry.name for entry in fields(target)}, path
    setattr(target, name, value)


def _get(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
