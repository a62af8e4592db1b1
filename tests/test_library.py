"""The library without the command line: what reaches ``from_pretrained``, what is refused before it, what a run leaves."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from letter_rewards import num_letters
from models import Family, build, checkpoint
from small_runs import events, metrics, status
from test_sites import BAD_DTYPES
from transformers import AutoModelForCausalLM, AutoTokenizer
from wandb_file import segments

from grpo_exp import AsyncGRPOConfig, AsyncGRPOTrainer, assets
from grpo_exp.config.schema import PrecisionConfig, TaskConfig, TaskName
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.folder import State
from grpo_exp.policy import load_policy, read_checkpoint_dtype
from grpo_exp.report.load import find_runs
from grpo_exp.tasks import build as build_task

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
PROMPTS = [{"prompt": text} for text in ("abc>", "fedc>", "bd>", "cafe>")]


def trainer(path: Path, model: Path | str, **settings: Any) -> AsyncGRPOTrainer:
    args = AsyncGRPOConfig(
        output_dir=str(path / "run"),
        use_cpu=True,
        num_workers=0,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=6,
        **settings,
    )
    return AsyncGRPOTrainer(model=model, reward_funcs=num_letters, args=args, train_dataset=PROMPTS)


def dtypes(model: torch.nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keywords of every call of ``from_pretrained``, which loads as ever."""
    calls: list[dict[str, Any]] = []
    load = AutoModelForCausalLM.from_pretrained

    def recorded(name: str, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return load(name, **{key: value for key, value in kwargs.items() if key != "revision"})

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", recorded)
    return calls


@pytest.fixture
def no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forbidden)


# -- the dtype


@pytest.mark.parametrize("dtype", list(NAMES))
@pytest.mark.parametrize("kwargs", [None, {}, {"dtype": "auto"}, {"dtype": None}])
def test_without_a_dtype_a_policy_has_that_of_its_checkpoint(dtype: torch.dtype, kwargs: dict[str, Any] | None):
    """A1"""
    source = checkpoint(Family.llama, dtype)
    assert dtypes(load_policy(str(source), kwargs)) == {dtype}
    assert read_checkpoint_dtype(str(source), {}) == NAMES[dtype]


@pytest.mark.parametrize("dtype", list(NAMES))
def test_without_a_dtype_a_trainer_computes_and_serves_in_that_of_the_checkpoint(dtype: torch.dtype, tmp_path: Path):
    """A1"""
    run = trainer(tmp_path, checkpoint(Family.llama, dtype))
    assert dtypes(run.model) == {dtype}
    assert (run.precision.params, run.precision.compute, run.precision.rollout) == (dtype,) * 3


@pytest.mark.parametrize("spelled", ["bfloat16", torch.bfloat16, "bf16", "torch.bfloat16", "BF16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_among_the_model_keywords_is_that_of_the_parameters(spelled: object, key: str, tmp_path: Path):
    """A1, A5"""
    source = checkpoint(Family.llama, FP32)
    assert dtypes(load_policy(str(source), {key: spelled})) == {BF16}
    run = trainer(tmp_path, source, model_init_kwargs={key: spelled})
    assert dtypes(run.model) == {BF16}
    assert run.precision.rollout == BF16


@pytest.mark.parametrize("spelled", ["fp16", torch.float16, "half"])
def test_so_is_a_dtype_of_the_precision_group(spelled: object):
    """A1"""
    assert dtypes(load_policy(str(checkpoint(Family.llama)), None, spelled)) == {FP16}


def test_two_dtypes_that_agree_are_accepted(tmp_path: Path):
    """A1"""
    run = trainer(tmp_path, checkpoint(Family.llama, FP16), precision="bf16", model_init_kwargs={"dtype": "float32"})
    assert dtypes(run.model) == {FP32}
    assert run.precision.compute == BF16


@pytest.mark.usefixtures("no_loader")
def test_two_dtypes_that_disagree_are_one_error_that_names_both_keys(tmp_path: Path):
    """A1: also against an option whose name is a dtype and which keeps its weights in another."""
    for option, given in (("bf16", "bfloat16"), ("fp32", "float16"), ("bf16_pure", torch.float32)):
        with pytest.raises(ValueError, match=r"model\.init_kwargs\.dtype=.*precision\.params"):
            trainer(tmp_path, checkpoint(Family.llama), precision=option, model_init_kwargs={"dtype": given})
    with pytest.raises(ValueError, match=r"model\.init_kwargs\.dtype='fp16'.*precision\.params"):
        load_policy(str(checkpoint(Family.llama)), {"dtype": "half"}, "bf16")


@pytest.mark.usefixtures("no_loader")
@pytest.mark.parametrize("value", BAD_DTYPES, ids=repr)
def test_a_bad_dtype_is_a_value_error_before_anything_is_loaded(value: Any, tmp_path: Path):
    source = str(checkpoint(Family.llama))
    if value is not None:  # which is no dtype among the keywords
        for key in ("dtype", "torch_dtype"):
            with pytest.raises(ValueError, match=rf"model\.init_kwargs\.{key}=.*allowed: auto, bf16"):
                load_policy(source, {key: value})
            with pytest.raises(ValueError, match=rf"model\.init_kwargs\.{key}=.*allowed: auto, bf16"):
                trainer(tmp_path, source, model_init_kwargs={key: value})
    with pytest.raises(ValueError, match=r"precision\.params=.*allowed: auto, bf16"):
        load_policy(source, None, value)
    with pytest.raises(ValueError, match=r"precision\.params=.*allowed: auto, bf16"):
        trainer(tmp_path, source, precision=PrecisionConfig(params=value))
    with pytest.raises(ValueError, match=r"precision=.*allowed: auto, bf16"):
        trainer(tmp_path, source, precision=value)
    assert not (tmp_path / "run").exists(), "nor is a run folder made"


@pytest.mark.parametrize(("spelled", "compute"), [("bfloat16", BF16), (torch.float16, FP16), (" FP32", FP32)])
def test_an_option_of_the_precision_group_may_be_spelled_as_a_dtype(spelled: Any, compute: torch.dtype, tmp_path: Path):
    """A5"""
    assert trainer(tmp_path, checkpoint(Family.llama), precision=spelled).precision.compute == compute


def test_a_checkpoint_in_a_dtype_of_its_own_needs_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build(Family.llama).double().save_pretrained(tmp_path)
    assert dtypes(load_policy(str(tmp_path), {"dtype": "bf16"})) == {BF16}
    assert read_checkpoint_dtype(str(tmp_path), {}) == "float64"
    with pytest.raises(ValueError, match=r"precision\.params='auto'.*stored in float64: name a dtype"):
        trainer(tmp_path, tmp_path)


# -- other keywords


@pytest.mark.parametrize(
    ("given", "expected"), [({}, None), ({"device_map": None}, None), ({"device_map": "cpu"}, "cpu")]
)
def test_a_device_map_is_none_unless_it_is_given(
    given: dict[str, Any], expected: object, loader: list[dict[str, Any]], tmp_path: Path
):
    trainer(tmp_path, checkpoint(Family.llama), model_init_kwargs=given)
    assert [call["device_map"] for call in loader] == [expected]


def test_other_keywords_reach_the_loader(loader: list[dict[str, Any]], tmp_path: Path):
    given = {"attn_implementation": "eager", "revision": "main", "use_safetensors": True, "low_cpu_mem_usage": True}
    run = trainer(tmp_path, checkpoint(Family.llama), model_init_kwargs=given)
    assert {key: loader[0][key] for key in given} == given
    assert run.model.config._attn_implementation == "eager"


def test_generators_load_with_the_same_keywords(loader: list[dict[str, Any]], tmp_path: Path):
    run = trainer(
        tmp_path,
        checkpoint(Family.llama),
        model_init_kwargs={"attn_implementation": "eager", "dtype": "bf16"},
        max_steps=1,
    )
    assert run.train() is State.done
    assert [(call["attn_implementation"], call["dtype"]) for call in loader] == [("eager", BF16)] * 2


def test_a_subfolder_is_where_the_checkpoint_is(tmp_path: Path):
    build(Family.llama).bfloat16().save_pretrained(tmp_path / "inner")
    assert read_checkpoint_dtype(str(tmp_path), {"subfolder": "inner"}) == "bf16"
    assert dtypes(load_policy(str(tmp_path), {"subfolder": "inner"})) == {BF16}


def test_the_given_dictionary_is_never_changed(tmp_path: Path):
    """A1"""
    given = {"dtype": "bfloat16", "device_map": "cpu", "attn_implementation": "eager"}
    before = deepcopy(given)
    load_policy(str(checkpoint(Family.llama)), given)
    precision = PrecisionConfig(rollout="fp16")
    run = trainer(tmp_path, checkpoint(Family.llama), model_init_kwargs=given, precision=precision, max_steps=1)
    run.train()
    assert given == before
    assert precision == PrecisionConfig(rollout="fp16")
    assert run.args.model_init_kwargs is given


def test_model_keywords_may_be_a_json_string(tmp_path: Path):
    text = json.dumps({"dtype": "bfloat16", "attn_implementation": "eager"})
    run = trainer(tmp_path, checkpoint(Family.llama), model_init_kwargs=text)
    assert dtypes(run.model) == {BF16}
    assert run.model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"model\.init_kwargs=.*a JSON object"):
        trainer(tmp_path, checkpoint(Family.llama), model_init_kwargs="{dtype: bf16}")


def test_a_policy_is_loaded_without_dropout():
    assert not load_policy(str(checkpoint(Family.llama))).training


# -- a run


def test_a_library_run_trains_and_leaves_a_run_folder(tmp_path: Path):
    seen: list[int] = []

    class Callback:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert isinstance(args, AsyncGRPOConfig)
            seen.append(state.global_step)

    args = AsyncGRPOConfig(
        output_dir=str(tmp_path / "run"),
        num_workers=0,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=6,
        learning_rate=1e-2,
        max_steps=2,
        use_cpu=True,
    )
    run = AsyncGRPOTrainer(
        model=assets.path("tiny"),
        reward_funcs=[num_letters, num_letters],
        args=args,
        train_dataset=PROMPTS,
        processing_class=AutoTokenizer.from_pretrained(assets.path("tiny")),
        callbacks=[Callback()],
    )
    assert run.train() is State.done
    assert seen == [1, 2]
    folder = tmp_path / "run"
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(row["loss/policy"]) for row in rows)
    assert max(row["mismatch/abs_max"] for row in rows) < 1e-4
    assert (status(folder)["state"], status(folder)["updates"]) == ("done", 2)
    assert events(folder, "warning") == []
    assert dtypes(load_policy(str(folder / "checkpoints" / "step-000002"))) == {FP32}


def test_a_run_without_prompts_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="train_dataset"):
        AsyncGRPOTrainer(assets.path("tiny"), num_letters, AsyncGRPOConfig(output_dir=str(tmp_path / "run")), [])
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_loader")
def test_a_reward_function_that_is_not_there_is_refused_before_anything_is_loaded_or_made(tmp_path: Path):
    args = AsyncGRPOConfig(output_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"reward_funcs='letter_rewards:letters'.*did you mean num_letters\?"):
        AsyncGRPOTrainer(assets.path("tiny"), [num_letters, "letter_rewards:letters"], args, PROMPTS)
    assert not (tmp_path / "run").exists()


def test_a_library_run_can_be_compared_and_is_resumed_only_where_its_data_are(tmp_path: Path):
    trainer(tmp_path, assets.path("tiny"), max_steps=1, precision="bf16").train()
    run = find_runs([tmp_path / "run"])[0]
    assert (run.state.value, run.manifest["choices"]) == ("done", {"precision": "bf16"})
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["task"]["name"] == "python"
    resumed = trainer(tmp_path, assets.path("tiny"), max_steps=2, precision="bf16")
    assert resumed.train(resume_from_checkpoint=True) is State.done
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
    with pytest.raises(ConfigError, match="given in Python"):
        build_task(TaskConfig(name=TaskName.python))


@pytest.mark.parametrize("report_to", ["wandb", ["wandb"]])
def test_report_to_starts_the_tracker_and_gives_it_the_exit_code(report_to: Any, tmp_path: Path):
    trainer(tmp_path, assets.path("tiny"), max_steps=1, report_to=report_to).train()
    (segment,) = segments(tmp_path / "run")
    assert segment.exit_code == 0
    assert [row["step"] for row in segment.history] == [1]


def test_two_trackers_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="report_to"):
        trainer(tmp_path, assets.path("tiny"), report_to=["wandb", "tensorboard"])


def test_a_prompt_that_leaves_no_room_in_the_context_is_named(tmp_path: Path):
    args = AsyncGRPOConfig(output_dir=str(tmp_path / "run"), num_workers=0, max_completion_length=6, max_steps=1)
    long = AsyncGRPOTrainer(assets.path("tiny"), num_letters, args, [{"prompt": "a" * 1100}])
    with pytest.raises(ConfigError, match=r"1101 tokens.*at most 1018 tokens"):
        long.train()
    assert status(tmp_path / "run")["state"] == "failed"
    args.max_completion_length = 1024
    with pytest.raises(ConfigError, match="context of 1024 tokens"):
        AsyncGRPOTrainer(assets.path("tiny"), num_letters, args, PROMPTS)


def test_a_model_that_is_no_name_is_refused_before_anything_is_asked_for(tmp_path: Path):
    with pytest.raises(ConfigError, match="model='3'"):
        AsyncGRPOTrainer(3, num_letters, AsyncGRPOConfig(output_dir=str(tmp_path)), PROMPTS)  # type: ignore[arg-type]


def test_a_damaged_checkpoint_says_what_to_remove(tmp_path: Path):
    trainer(tmp_path, assets.path("tiny"), max_steps=1).train()
    weights = tmp_path / "run" / "checkpoints" / "step-000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(RunFailed, match="step-000001 is damaged"):
        trainer(tmp_path, assets.path("tiny"), max_steps=2).train(resume_from_checkpoint=True)
