"""What is refused before anything is built: the key, the value and what would be allowed are named, all problems at once."""

import math
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_exp import checks
from grpo_exp.checks import check, choice_problems, find_problems, machine_problems
from grpo_exp.config.messages import leaves
from grpo_exp.config.schema import Config, Device, LossScaleMode, TaskName
from grpo_exp.errors import ConfigError, ConfigErrors


def changed(**changes: Any) -> Config:
    """The shipped defaults with some keys set; ``__`` stands for the dot."""
    config = deepcopy(BASE)
    for key, value in changes.items():
        *parents, name = key.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        assert hasattr(target, name), key
        setattr(target, name, value)
    return config


def base() -> Config:
    from grpo_exp.config.schema import default_config

    config = default_config()
    config.model.name_or_path = "asset:tiny"
    return config


BASE = base()

REFUSED: list[tuple[str, Any]] = [
    *((f"precision__{site}", value) for site in ("params", "compute", "head", "grad_reduce", "optimizer_state", "rollout")
      for value in ("tensor", "nn", "cuda", "int8", "complex64", "float8_e4m3fn", "", "bfloat", "torch.", "none")),
    *((f"precision__{site}", "bfloat") for site in ("rollout_head", "kv_cache", "wire")),
    ("precision__matmul", "tf32"),
    ("precision__loss_scale__init", 0.0),
    ("model__name_or_path", ""),
    ("model__name_or_path", "./not_there"),
    ("model__name_or_path", "/not/there"),
    ("model__name_or_path", "~/not_there"),
    ("algo__group_size", 1),
    ("algo__group_size", 0),
    ("algo__clip_low", 0.0),
    ("algo__clip_low", 1.0),
    ("algo__clip_high", -0.1),
    ("algo__clip_high", math.nan),
    ("algo__dual_clip", 1.0),
    ("algo__overlong_tokens", -1),
    ("algo__overlong_tokens", 10**6),
    ("algo__overlong_penalty", 0.0),
    ("algo__max_replaced", 0),
    ("algo__advantage_eps", 0.0),
    ("rollout__temperature", 0.0),
    ("rollout__temperature", math.inf),
    ("rollout__temperature", 1e-320),
    ("rollout__num_workers", 10**9),
    ("rollout__num_threads", 10**6),
    ("trainer__num_threads", 10**6),
    ("optim__weight_decay", math.inf),
    ("precision__loss_scale__init", math.inf),
    ("precision__loss_scale__growth_factor", math.nan),
    ("precision__loss_scale__backoff_factor", 1.0),
    ("precision__loss_scale__growth_interval", 0),
    ("rollout__num_workers", -1),
    ("rollout__max_staleness", -1),
    ("rollout__batch_size", 0),
    ("rollout__startup_timeout_s", 0.0),
    ("optim__lr", 1e-50),
    ("optim__lr", -1e-3),
    ("optim__lr", math.nan),
    ("optim__beta1", 1.0),
    ("optim__beta2", -0.1),
    ("optim__eps", 0.0),
    ("optim__weight_decay", -1.0),
    ("optim__max_grad_norm", math.nan),
    ("optim__warmup_steps", -1),
    ("trainer__max_steps", 0),
    ("trainer__max_steps", -1),
    ("trainer__max_epochs", 0),
    ("trainer__max_minutes", 0.0),
    ("trainer__prompts_per_step", 0),
    ("trainer__tokens_per_micro_batch", 0),
    ("trainer__num_threads", 0),
    ("trainer__eval_every", -1),
    ("trainer__save_every", -1),
    ("trainer__keep_checkpoints", 0),
    ("task__max_completion_tokens", 0),
    ("task__num_eval", -1),
    ("task__reward", "package.module:function"),
]  # fmt: skip


def test_the_defaults_are_accepted() -> None:
    assert find_problems(BASE) == []


@pytest.mark.parametrize(
    ("key", "value"), REFUSED, ids=lambda value: repr(value) if not isinstance(value, str) else value
)
def test_a_value_that_cannot_be_used_is_refused_by_name(key: str, value: Any) -> None:
    """C1 is among them: a group of one has no advantage."""
    [problem] = find_problems(changed(**{key: value}))
    assert problem.key == key.replace("__", ".")
    assert problem.allowed
    assert str(value) in str(problem)


def test_a_load_dtype_that_is_no_dtype_is_refused_in_the_dictionary_too() -> None:
    """A1."""
    for value in ("tensor", "int8", "", 16):
        [problem] = find_problems(changed(model__init_kwargs={"dtype": value}))
        assert problem.key == "model.init_kwargs.dtype"
        assert "bf16 (bfloat16)" in problem.allowed


def test_a_dtype_in_two_places_must_agree_and_the_error_names_both() -> None:
    """A1."""
    agreeing = changed(model__init_kwargs={"dtype": "bfloat16"}, precision__params="bf16")
    assert find_problems(agreeing) == []
    assert find_problems(changed(model__init_kwargs={"dtype": "bfloat16"}, precision__params="auto")) == []
    [problem] = find_problems(changed(model__init_kwargs={"dtype": "bfloat16"}, precision__params="fp32"))
    assert "model.init_kwargs.dtype" in str(problem)
    assert "precision.params" in str(problem)


def test_a_group_of_one_is_told_that_two_are_needed() -> None:
    """C1."""
    with pytest.raises(ConfigError, match=r"algo\.group_size=1: allowed: 2 or more"):
        check(changed(algo__group_size=1))


def test_lockstep_has_no_staleness() -> None:
    assert find_problems(changed(rollout__num_workers=0, rollout__max_staleness=0)) == []
    [problem] = find_problems(changed(rollout__num_workers=0, rollout__max_staleness=2))
    assert problem.key == "rollout.max_staleness"


def test_fp16_compute_over_fp32_weights_wants_a_loss_scale_and_nothing_else_does() -> None:
    """A3."""
    fp16 = {"precision__params": "fp32", "precision__compute": "fp16"}
    [problem] = find_problems(changed(**fp16))
    assert problem.key == "precision.loss_scale.mode"
    assert find_problems(changed(**fp16, precision__loss_scale__mode=LossScaleMode.dynamic)) == []
    [problem] = find_problems(changed(precision__loss_scale__mode=LossScaleMode.dynamic))
    assert (problem.key, problem.allowed) == ("precision.loss_scale.mode", "none")


def test_what_does_not_go_together_is_found_without_the_checkpoint_where_no_site_is_auto() -> None:
    elsewhere = {"model__name_or_path": "org/name"}
    [problem] = find_problems(changed(**elsewhere, precision__params="fp32", precision__compute="fp16"))
    assert problem.key == "precision.loss_scale.mode"
    assert find_problems(changed(**elsewhere, precision__compute="fp16")) == []


@pytest.mark.parametrize("mode", ["high", "medium"])
def test_tf32_is_refused_where_the_device_is_a_cpu(mode: str) -> None:
    [problem] = find_problems(changed(precision__matmul=mode, trainer__device=Device.cpu))
    assert (problem.key, problem.allowed) == ("precision.matmul", "highest")


def test_what_needs_a_gpu_is_refused_on_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known without torch, so before anything is loaded; a sweep that is submitted to another machine is not held to it."""
    monkeypatch.setattr(checks, "DRIVERS", ())
    [problem] = machine_problems(changed(precision__matmul="high"))
    assert (problem.key, problem.allowed) == ("precision.matmul", "highest")
    [problem] = machine_problems(changed(trainer__device=Device.cuda))
    assert (problem.key, problem.allowed) == ("trainer.device", "auto, cpu")
    assert machine_problems(BASE) == []
    assert find_problems(changed(precision__matmul="high")) == []


def test_a_gpu_that_is_hidden_from_the_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DRIVERS", (os.devnull,))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine_problems(changed(trainer__device=Device.cuda)) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine_problems(changed(trainer__device=Device.cuda)) != []


def test_a_local_model_has_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert choice_problems(changed(model__name_or_path="there"), {"model": "local"}) == []
    assert choice_problems(changed(model__name_or_path="org/name"), {"model": "hub"}) == []
    [problem] = choice_problems(changed(model__name_or_path="org/name"), {"model": "local"})
    assert problem.key == "model.name_or_path"


def test_a_run_needs_a_bound() -> None:
    assert find_problems(changed(trainer__max_steps=None, trainer__max_minutes=1.0)) == []
    assert [problem.key for problem in find_problems(changed(trainer__max_steps=None))] == ["trainer.max_steps"]


def test_remote_code_and_pickled_weights_have_to_be_asked_for_by_their_own_settings() -> None:
    [problem] = find_problems(changed(model__init_kwargs={"trust_remote_code": True}))
    assert "model.trust_remote_code" in problem.allowed
    [problem] = find_problems(changed(model__init_kwargs={"use_safetensors": False}))
    assert problem.key == "model.init_kwargs.use_safetensors"


def test_all_problems_are_found_at_once_a_line_each() -> None:
    config = changed(
        algo__group_size=1, optim__lr=-1.0, precision__params="nn", trainer__max_steps=0, task__name=TaskName.jsonl
    )
    with pytest.raises(ConfigErrors) as caught:
        check(config)
    keys = [line.partition("=")[0] for line in str(caught.value).splitlines()]
    assert keys == ["precision.params", "trainer.max_steps", "optim.lr", "algo.group_size", "task.path", "task.reward"]
    assert isinstance(caught.value, ValueError)


def test_nothing_in_a_configuration_is_changed_by_checking_it() -> None:
    config = changed(algo__group_size=1, model__init_kwargs={"dtype": "BF16"})
    before = deepcopy(config)
    find_problems(config)
    machine_problems(config)
    assert config == before


@given(
    st.floats() | st.integers(), st.sampled_from(["optim__lr", "rollout__temperature", "algo__clip_low", "optim__eps"])
)
def test_a_number_that_is_accepted_is_finite_and_positive(value: float, key: str) -> None:
    """But for a learning rate of 0, the control in which nothing is learnt."""
    if not find_problems(changed(**{key: value})):
        assert 0 < value < math.inf or (key == "optim__lr" and value == 0)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -1, 0, 2**63, 10**400, 1e-320, 1e308], ids=lambda value: str(value)[:8]
)
def test_no_number_makes_checking_fail_and_nan_is_never_accepted(value: float) -> None:
    """Every key that takes a number, with every odd number."""
    for key, hint in leaves().items():
        kinds = {hint, *get_args(hint)}
        if float in kinds or (int in kinds and isinstance(value, int)):
            refused = key in {problem.key for problem in find_problems(changed(**{key.replace(".", "__"): value}))}
            assert refused or value == value, key


def test_errors_survive_a_process_boundary() -> None:
    import pickle

    makers: list[Callable[[], ConfigError]] = [
        lambda: ConfigError("a.b", 1, ["x", "y"], "do that"),
        lambda: ConfigErrors([ConfigError("a", "1"), ConfigError("b", 2, "3")]),
    ]
    for make in makers:
        again = pickle.loads(pickle.dumps(make()))
        assert (type(again), str(again)) == (type(make()), str(make()))


def test_checking_loads_neither_torch_nor_a_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subprocess tests of the command line show it for torch; here: the reward function is not imported."""
    name = "package_that_must_not_be_imported"
    (tmp_path / f"{name}.py").write_text("def function(completions, **columns): ...\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.chdir(tmp_path)
    task = {"task__name": TaskName.jsonl, "task__path": "prompts.jsonl"}
    assert find_problems(changed(**task, task__reward=f"{name}:function")) == []
    assert [problem.key for problem in find_problems(changed(**task, task__reward=f"{name}:fun"))] == ["task.reward"]
    assert name not in sys.modules
