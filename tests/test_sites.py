"""Dtype names and which precision site follows which, without torch in the code under test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import Family, build, checkpoint
from safetensors.torch import save_file

from grpo_exp.config.schema import LossScaleConfig, LossScaleMode, PrecisionConfig
from grpo_exp.config.sites import (
    FOLLOWS,
    checkpoint_dtype,
    combination_problems,
    loader_dtype,
    parse_dtype,
    parse_init_kwargs,
    resolve_sites,
    site_problems,
)
from grpo_exp.errors import ConfigError, written

BAD_DTYPES = [
    "tensor",
    "nn",
    "cuda",
    "int8",
    "complex64",
    "float8_e4m3fn",
    "",
    "bfloat",
    "float64",
    "torch.int8",
    "torch.",
    "not_a_dtype",
    16,
    True,
    None,
    torch.int8,
    torch.complex64,
    torch.float64,
    torch.float8_e4m3fn,
    torch.Tensor,
    torch.nn,
]
SPELLED = {
    "bf16": ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, " BF16 ", "Torch.BFloat16"],
    "fp16": ["fp16", "half", "float16", "torch.float16", torch.float16, torch.half, "HALF"],
    "fp32": ["fp32", "float", "float32", "torch.float32", torch.float32, torch.float, "FP32\n"],
    "auto": ["auto", "AUTO", " auto "],
}


def names(config: PrecisionConfig, checkpoint: str = "fp32") -> dict[str, str]:
    return {site: entry.name for site, entry in resolve_sites(config, {}, checkpoint).items()}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SPELLED.items() for value in values])
def test_every_spelling_comes_to_one_name_and_naming_it_again_changes_nothing(name: str, value: object):
    """A5: strings in any case, with or without `torch.`, and dtype objects."""
    assert parse_dtype(value, "key") == name
    assert parse_dtype(parse_dtype(value, "key"), "key") == name


@pytest.mark.parametrize("value", BAD_DTYPES, ids=repr)
def test_what_is_no_float_dtype_is_refused_with_key_value_and_allowed_names(value: object):
    with pytest.raises(ValueError, match=r"^precision\.rollout=") as caught:
        parse_dtype(value, "precision.rollout")
    text = str(caught.value)
    assert written(value) in text
    assert all(name in text for name in ("auto", "bf16", "fp16", "fp32"))
    assert "\n" not in text


@pytest.mark.parametrize(
    ("value", "meant"),
    [("bfloat", "bf16"), ("bf-16", "bf16"), ("flaot32", "fp32"), ("float64", ""), ("int8", ""), ("cuda", ""), ("", "")],
)
def test_a_misspelt_dtype_gets_a_suggestion_and_another_dtype_none(value: str, meant: str):
    with pytest.raises(ConfigError) as caught:
        parse_dtype(value, "precision.rollout")
    assert caught.value.fix == (f"did you mean {meant}?" if meant else "")


@pytest.mark.parametrize("value", [v for v in BAD_DTYPES if v is not None], ids=repr)
def test_a_bad_dtype_is_found_at_every_site(value: object):
    for site in FOLLOWS:
        problems = site_problems(PrecisionConfig(**{site: value}), {})  # type: ignore[arg-type]
        assert [problem.key for problem in problems] == [f"precision.{site}"]


def test_every_bad_site_is_listed_at_once():
    config = PrecisionConfig(params="tensor", head="int8", matmul="fast", loss_scale=LossScaleConfig(init=0.0))
    keys = [problem.key for problem in site_problems(config, {"dtype": "bfloat"})]
    assert keys == ["precision.params", "precision.head", "precision.matmul", "precision.loss_scale.init"]


def test_two_places_that_agree_are_one_dtype():
    """A1: the same dtype in both places is accepted in any spelling, and auto agrees with anything."""
    assert loader_dtype({"dtype": torch.bfloat16}, "bf16") == "bf16"
    assert loader_dtype({"torch_dtype": "half"}, torch.float16) == "fp16"
    assert loader_dtype({"dtype": "auto"}, "fp32") == "fp32"
    assert loader_dtype({"dtype": "bfloat16"}, "auto") == "bf16"
    assert loader_dtype({"dtype": None}, "fp16") == "fp16"
    assert loader_dtype({}, "auto") == "auto"


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_two_places_that_disagree_are_one_error_that_names_both_keys(key: str):
    """A1"""
    with pytest.raises(ConfigError) as caught:
        loader_dtype({key: "float32"}, "bf16")
    text = str(caught.value)
    assert f"model.init_kwargs.{key}='fp32'" in text
    assert "precision.params" in text
    assert "bf16" in text


def test_dtype_and_torch_dtype_have_to_agree_with_each_other():
    with pytest.raises(ConfigError, match=r"torch_dtype='fp16'"):
        loader_dtype({"dtype": "bf16", "torch_dtype": "fp16"}, "auto")


def test_sites_follow_each_other_where_they_are_not_set():
    assert set(names(PrecisionConfig(params="bf16", optimizer_state="bf16")).values()) == {"bf16"}
    mixed = names(PrecisionConfig(params="fp32", compute="fp16", rollout="bf16"))
    assert (mixed["head"], mixed["grad_reduce"], mixed["optimizer_state"]) == ("fp16", "fp32", "fp32")
    assert {mixed[site] for site in ("rollout", "rollout_head", "kv_cache", "wire")} == {"bf16"}


def test_auto_is_the_checkpoints_dtype_at_every_site_that_says_so():
    config = PrecisionConfig(params="auto", rollout="auto", optimizer_state="auto")
    assert set(names(config, "fp16").values()) == {"fp16"}
    sites = resolve_sites(PrecisionConfig(params="auto"), {}, "bf16")
    assert sites["params"].reason == "the checkpoint's own dtype"
    assert (sites["compute"].name, sites["compute"].reason) == ("bf16", "follows params")
    named = resolve_sites(PrecisionConfig(params="auto"), {"dtype": "fp16"}, "bf16")
    assert (named["params"].name, named["params"].reason) == ("fp16", "model.init_kwargs.dtype")


def test_auto_over_a_checkpoint_in_another_dtype_asks_for_a_name():
    with pytest.raises(ConfigError, match=r"precision\.params='auto'.*float8_e4m3fn: name a dtype"):
        resolve_sites(PrecisionConfig(), {}, "float8_e4m3fn")
    assert names(PrecisionConfig(params="bf16"), "float8_e4m3fn")["params"] == "bf16"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (PrecisionConfig(params="bf16", compute="fp32"), "precision.compute"),
        (PrecisionConfig(params="fp16", compute="bf16"), "precision.compute"),
        (PrecisionConfig(params="fp32", compute="fp16"), "precision.loss_scale.mode"),
        (PrecisionConfig(params="fp32", optimizer_state="bf16"), "precision.optimizer_state"),
        (PrecisionConfig(params="fp16", optimizer_state="fp16"), "optim.eps"),
        (PrecisionConfig(params="fp32", grad_reduce="bf16"), "precision.grad_reduce"),
        (PrecisionConfig(params="fp32", kv_cache="bf16"), "precision.kv_cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sites_that_do_not_go_together_are_refused(config: PrecisionConfig, key: str):
    problems = combination_problems(config, resolve_sites(config, {}, "fp32"), optim_eps=1e-8)
    assert [problem.key for problem in problems] == [key]
    assert problems[0].allowed


@pytest.mark.parametrize("mode", [LossScaleMode.dynamic, LossScaleMode.static])
@pytest.mark.parametrize(
    ("params", "compute", "scaled"),
    [("fp32", "fp16", True), ("fp32", "bf16", False), ("fp32", "fp32", False), ("fp16", "fp16", False)],
)
def test_a_loss_scale_is_for_fp16_over_fp32_masters_and_for_nothing_else(
    params: str, compute: str, scaled: bool, mode: LossScaleMode
):
    """A3"""
    for loss_scale, good in ((LossScaleConfig(mode), scaled), (LossScaleConfig(), not scaled)):
        config = PrecisionConfig(params=params, compute=compute, loss_scale=loss_scale)
        problems = combination_problems(config, resolve_sites(config, {}, "fp32"), optim_eps=1e-4)
        assert (problems == []) is good


@pytest.mark.parametrize(
    "scale",
    [
        LossScaleConfig(init=-1.0),
        LossScaleConfig(init=float("nan")),
        LossScaleConfig(LossScaleMode.dynamic, growth_factor=1.0),
        LossScaleConfig(LossScaleMode.dynamic, backoff_factor=1.0),
        LossScaleConfig(LossScaleMode.dynamic, backoff_factor=0.0),
        LossScaleConfig(LossScaleMode.dynamic, growth_interval=0),
    ],
)
def test_a_loss_scale_that_cannot_work_is_refused(scale: LossScaleConfig):
    assert len(site_problems(PrecisionConfig(loss_scale=scale), {})) == 1


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_a_checkpoint_says_what_it_is_stored_in(dtype: torch.dtype, name: str, tmp_path: Path):
    assert checkpoint_dtype(checkpoint(Family.llama, dtype)) == name
    save_file({"ids": torch.zeros(1, dtype=torch.int64), "w": torch.zeros(2, dtype=dtype)}, tmp_path / "m.safetensors")
    assert checkpoint_dtype(tmp_path) == name, "from the weights alone"


def test_a_checkpoint_in_a_dtype_of_its_own_says_so(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "torch.float8_e4m3fn"}))
    assert checkpoint_dtype(tmp_path) == "float8_e4m3fn"
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_dtype(tmp_path) is None
    build(Family.llama).double().save_pretrained(tmp_path)
    assert checkpoint_dtype(tmp_path) == "float64"


def test_init_kwargs_are_copied_and_may_be_json():
    given = {"dtype": "bf16", "attn_implementation": "eager"}
    parsed = parse_init_kwargs(given)
    assert parsed == given
    assert parsed is not given
    assert parse_init_kwargs(json.dumps(given)) == given
    assert parse_init_kwargs(None) == {}


@pytest.mark.parametrize("value", ["{not json", "[1, 2]", '"bf16"', ["dtype"], 16])
def test_init_kwargs_that_are_no_mapping_are_refused(value: object):
    with pytest.raises(ConfigError, match=r"model\.init_kwargs"):
        parse_init_kwargs(value)  # type: ignore[arg-type]


def test_names_are_checked_without_importing_torch():
    code = "import sys, grpo_exp.config.sites, grpo_exp.config.validate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
