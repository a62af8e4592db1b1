"""The settings of the library: TRL's names, there and back to the one configuration without loss."""

import json
import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_exp.args import PATHS, AsyncGRPOConfig
from grpo_exp.config.compose import CONF_DIR, compose, to_typed
from grpo_exp.config.schema import Advantage, Config, Device, Normalization, PrecisionConfig, Schedule, default_config
from grpo_exp.errors import ConfigError, ConfigErrors


def shipped() -> list[str]:
    files = sorted(path for path in CONF_DIR.glob("*/*.yaml") if path.parent.name != "sweeps")
    return [f"{path.parent.name}={path.stem}" for path in files]


@pytest.mark.parametrize("override", shipped())
def test_every_shipped_configuration_survives_the_way_there_and_back(override: str) -> None:
    """The command line builds exactly these settings, so nothing of a configuration may be lost in them."""
    name = ["model.name_or_path=org/name"] if override in ("model=hub", "model=local") else []
    config = to_typed(compose([override, *name, "seed=3"]).config)
    assert AsyncGRPOConfig.from_config(config, "somewhere").to_config() == config


@given(
    lr=st.floats(1e-9, 1.0),
    group_size=st.integers(2, 64),
    prompts=st.integers(1, 512),
    clip_high=st.floats(0.01, 5.0),
    max_steps=st.none() | st.integers(1, 10**6),
    max_staleness=st.none() | st.integers(0, 9),
    schedule=st.sampled_from(Schedule),
    advantage=st.sampled_from(Advantage),
    normalization=st.sampled_from(Normalization),
    device=st.sampled_from(Device),
    init_kwargs=st.dictionaries(st.text(min_size=1), st.text() | st.booleans(), max_size=3),
)
def test_any_configuration_survives_the_way_there_and_back(
    lr: float,
    group_size: int,
    prompts: int,
    clip_high: float,
    max_steps: int | None,
    max_staleness: int | None,
    schedule: Schedule,
    advantage: Advantage,
    normalization: Normalization,
    device: Device,
    init_kwargs: dict[str, str | bool],
) -> None:
    config = default_config()
    config.algo = replace(
        config.algo, group_size=group_size, clip_high=clip_high, advantage=advantage, normalization=normalization
    )
    config.optim = replace(config.optim, lr=lr, schedule=schedule)
    config.trainer = replace(config.trainer, prompts_per_step=prompts, max_steps=max_steps, max_epochs=3, device=device)
    config.rollout.max_staleness = max_staleness
    config.model.init_kwargs = dict(init_kwargs)
    assert AsyncGRPOConfig.from_config(config, "somewhere").to_config() == config


def test_the_defaults_are_those_of_the_schema() -> None:
    assert AsyncGRPOConfig().to_config() == default_config()


def test_each_name_sets_the_key_that_the_table_says() -> None:
    changed = AsyncGRPOConfig(
        trust_remote_code=True,
        num_generations=4,
        advantage="rloo",
        normalization="constant",
        epsilon=0.1,
        epsilon_high=0.3,
        mask_truncated_completions=True,
        max_completion_length=99,
        temperature=0.7,
        max_staleness=3,
        num_workers=2,
        learning_rate=1e-3,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_epsilon=1e-7,
        weight_decay=0.1,
        max_grad_norm=2.0,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_steps=77,
        num_train_epochs=2,
        eval_steps=11,
        save_steps=12,
        save_total_limit=3,
        report_to="wandb",
        seed=9,
    )
    config, default = changed.to_config(), default_config()
    for name, path in PATHS.items():
        assert value_at(config, path) != value_at(default, path), name


def test_one_epsilon_is_for_both_sides_unless_the_upper_one_is_given() -> None:
    assert AsyncGRPOConfig(epsilon=0.1).to_config().algo.clip_high == 0.1
    assert AsyncGRPOConfig(epsilon=0.1, epsilon_high=0.3).to_config().algo.clip_high == 0.3


def test_no_bound_may_be_written_as_trl_does() -> None:
    config = AsyncGRPOConfig(max_steps=-1, num_train_epochs=1).to_config()
    assert (config.trainer.max_steps, config.trainer.max_epochs) == (None, 1)


def test_model_keywords_may_be_a_dictionary_or_json_and_are_never_changed() -> None:
    given_dict = {"dtype": "bfloat16", "attn_implementation": "eager"}
    before = deepcopy(given_dict)
    args = AsyncGRPOConfig(model_init_kwargs=given_dict)
    config = args.to_config()
    config.model.init_kwargs["dtype"] = "float16"
    assert given_dict == args.model_init_kwargs == before
    assert AsyncGRPOConfig(model_init_kwargs=json.dumps(before)).to_config().model.init_kwargs == before
    assert AsyncGRPOConfig(model_init_kwargs=None).to_config().model.init_kwargs == {}


@pytest.mark.parametrize("wrong", ["not json", "[1, 2]", "3", 16])
def test_model_keywords_that_are_no_object_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"model\.init_kwargs=.*JSON object"):
        AsyncGRPOConfig(model_init_kwargs=wrong)  # type: ignore[arg-type]


def test_a_precision_is_a_name_in_any_spelling_or_an_object() -> None:
    """A5."""
    for spelling in ("bf16", "torch.bfloat16", "BFloat16"):
        assert AsyncGRPOConfig(precision=spelling).to_config().precision.compute == "bf16"
    own = PrecisionConfig(params="fp32", rollout="bf16")
    assert AsyncGRPOConfig(precision=own).to_config().precision == own


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("precision", "fp8", "bf16_head32"),
        ("advantage", "gae", "grpo, dr_grpo, rloo"),
        ("normalization", "mean", "sequence_mean, token_mean, constant"),
        ("lr_scheduler_type", "polynomial", "constant, linear, cosine"),
        ("report_to", "tensorboard", "none, wandb"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_those_that_are(name: str, value: str, allowed: str) -> None:
    """C9: an unknown normalisation is an error."""
    with pytest.raises(ValueError, match=f"{name}='{value}': allowed: .*{allowed}"):
        AsyncGRPOConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("learning_rate", -1.0, "0 or more"),
        ("learning_rate", math.nan, "0 or more"),
        ("learning_rate", "1e-5", "a number"),
        ("learning_rate", None, "a number"),
        ("num_generations", 1, "2 or more"),
        ("num_generations", 4.0, "a whole number"),
        ("per_device_train_batch_size", True, "a whole number"),
        ("max_steps", 0, "1 or more"),
        ("max_steps", "10", "a whole number, null"),
        ("num_train_epochs", 1.5, "a whole number, null"),
        ("temperature", 0.0, "a number > 0"),
        ("epsilon", 1.5, "a number between 0 and 1"),
        ("eval_steps", -1, "0 or more"),
        ("save_total_limit", 0, "1 or more"),
        ("adam_beta1", 1.0, "a number from 0 up to, but not, 1"),
        ("seed", "zero", "a whole number"),
        ("max_staleness", -1, "0 or more"),
        ("mask_truncated_completions", 1, "true, false"),
        ("max_completion_length", 0, "1 or more"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_at_once_under_its_name_here(
    name: str, value: object, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}=.*: allowed: {allowed}"):
        AsyncGRPOConfig(**{name: value})  # type: ignore[arg-type]
    args = AsyncGRPOConfig()
    setattr(args, name, value)
    with pytest.raises(ConfigError, match=rf"^{name}="):
        args.to_config()


def test_all_problems_are_told_together_and_those_of_the_base_by_their_keys() -> None:
    base = default_config()
    base.trainer.logprob_chunk = 0
    with pytest.raises(ConfigErrors) as caught:
        AsyncGRPOConfig(learning_rate=-1.0, epsilon_high=-1.0, base=base)
    assert {error.key for error in caught.value.errors} == {"trainer.logprob_chunk", "learning_rate", "epsilon_high"}
    for wrong in (None, Config()):
        with pytest.raises(ConfigError, match="default_config"):
            AsyncGRPOConfig(base=wrong)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    config = AsyncGRPOConfig(learning_rate=np.float32(0.5), max_steps=np.int64(7)).to_config()  # type: ignore[arg-type]
    assert (config.optim.lr, config.trainer.max_steps) == (0.5, 7)
    assert type(config.optim.lr) is float
    assert type(config.trainer.max_steps) is int


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_the_switches_of_trl_lead_to_the_precision(name: str) -> None:
    """A1: one place decides."""
    with pytest.raises(ConfigError, match=f'{name}=true: say precision="{name}"'):
        AsyncGRPOConfig(**{name: True})
    assert AsyncGRPOConfig(**{name: False}) == AsyncGRPOConfig()


def test_an_argument_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="use_vllm"):
        AsyncGRPOConfig(use_vllm=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("batch", "accumulation", "group", "nearest"),
    [(6, 1, 4, "4, 8"), (1, 1, 4, "4"), (3, 2, 4, "4, 8"), (0, 1, 4, "4"), (7, 3, 10, "20, 30")],
)
def test_a_batch_that_holds_no_whole_groups_is_refused_with_the_nearest_ones(
    batch: int, accumulation: int, group: int, nearest: str
) -> None:
    """C11: the message states the unit, the product and the nearest valid values."""
    with pytest.raises(ConfigError) as caught:
        AsyncGRPOConfig(
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, num_generations=group
        )
    text = str(caught.value)
    assert f"per_device_train_batch_size={batch}" in text
    assert f"multiples of num_generations={group}" in text
    product = f"1 rank x {batch} x gradient_accumulation_steps={accumulation} = {batch * accumulation} completions"
    assert product in text
    assert text.endswith(f"nearest: {nearest})")


def test_a_batch_of_whole_groups_is_so_many_prompts() -> None:
    """C11: the unit is completions, as in TRL."""
    args = AsyncGRPOConfig(per_device_train_batch_size=8, gradient_accumulation_steps=3, num_generations=4)
    assert args.to_config().trainer.prompts_per_step == 6


@pytest.mark.parametrize("group", [0, -4])
def test_a_group_of_none_is_refused_and_divides_nothing(group: int) -> None:
    """C1."""
    with pytest.raises(ConfigError, match=f"num_generations={group}: allowed: 2 or more"):
        AsyncGRPOConfig(num_generations=group)


def test_a_cpu_can_be_asked_for() -> None:
    assert AsyncGRPOConfig(use_cpu=True).to_config().trainer.device is Device.cpu
    assert AsyncGRPOConfig().to_config().trainer.device is Device.auto


def test_the_base_is_not_changed() -> None:
    base = default_config()
    AsyncGRPOConfig(seed=5, learning_rate=1.0, use_cpu=True, base=base).to_config()
    assert base == default_config()


def value_at(config: Config, path: str) -> object:
    value: object = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
