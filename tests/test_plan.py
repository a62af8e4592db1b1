"""What ``grpo-exp plan`` foresees, against arithmetic by hand."""

import json
import math
from pathlib import Path

import pytest
import scipy.stats
import torch
from commands import command

from grpo_exp.assets import locate
from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.schema import Config, LoraConfig
from grpo_exp.lora import adapter_parameters, add_adapters
from grpo_exp.plan.command import detectable
from grpo_exp.plan.memory import Memory, Shape, estimate
from grpo_exp.policy import load_policy

SHAPE = Shape(8, 24)


def config(*overrides: str) -> Config:
    return to_typed(compose(["trainer.tokens_per_micro_batch=256", *overrides]).config)


def planned(*overrides: str) -> Memory:
    return estimate(config(*overrides), SHAPE, torch.device("cpu"))


def test_sites_take_their_number_of_parameters_times_the_size_of_their_dtype() -> None:
    found = planned("precision=bf16_pure", "precision.optimizer_state=fp32")
    n = found.num_params
    assert (found.parameters, found.gradients, found.generator, found.wire) == (2 * n, 2 * n, 2 * n, 2 * n)
    assert (found.master, found.optimizer) == (4 * n, 8 * n)
    mixed = planned("precision=bf16")
    assert (mixed.parameters, mixed.gradients, mixed.optimizer, mixed.master) == (4 * n, 4 * n, 8 * n, 0)
    assert mixed.generator == 2 * n


def test_with_adapters_only_these_have_gradients_and_moments() -> None:
    found, whole = planned("precision=bf16_pure", "lora=r16"), planned("precision=bf16_pure")
    adapters = sum(p.numel() for p in adapter_parameters(_adapted_tiny()).values())
    assert found.num_params == whole.num_params
    assert found.parameters == whole.parameters + 2 * adapters
    assert (found.gradients, found.optimizer, found.generator) == (2 * adapters, 4 * adapters, whole.generator)
    assert planned("precision=bf16", "lora=r16", "algo.kl_coef=0.1").other_weights == 0
    assert planned("precision=bf16", "algo.kl_coef=0.1").other_weights == 4 * whole.num_params


def _adapted_tiny() -> torch.nn.Module:
    model = load_policy(locate("asset:tiny"))
    add_adapters(model, LoraConfig(rank=16), torch.float32, 0)
    return model


def test_the_cache_is_that_of_every_layer_head_and_token() -> None:
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(locate("asset:tiny"))
    found = planned("precision=bf16", "rollout.batch_size=10")
    head = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    assert found.kv_cache == 10 * 2 * model.num_hidden_layers * model.num_key_value_heads * head * 32 * 2


def test_more_tokens_in_a_micro_batch_take_more_and_a_smaller_dtype_less() -> None:
    small, large = planned("precision=fp32"), planned("precision=fp32", "trainer.tokens_per_micro_batch=1024")
    assert 3.5 < large.activations / small.activations < 4.5
    assert planned("precision=bf16").activations < small.activations


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_the_detectable_difference_shrinks_with_seeds_as_t_says(n: int) -> None:
    expected = (scipy.stats.t.ppf(0.975, n - 1) + scipy.stats.t.ppf(0.8, n - 1)) / math.sqrt(n)
    assert detectable(n) == pytest.approx(expected)
    assert detectable(1) is None


def test_a_sweep_is_planned_arm_by_arm_and_leaves_nothing_behind(tmp_path: Path) -> None:
    line = "plan -m precision=fp32,bf16 seed=0,1,2 trainer.max_steps=7 --completion-tokens 24 --memory 0.00001 --json"
    ended = command(*line.split(), cwd=tmp_path)
    assert ended.code == 3, ended.err
    report = json.loads(ended.out)
    assert (report["num_runs"], report["seeds"]) == (6, [0, 1, 2])
    assert [(arm["name"], arm["num_runs"]) for arm in report["arms"]] == [("precision=fp32", 3), ("precision=bf16", 3)]
    assert report["arms"][0]["tokens_at_most"] == 7 * 32 * 8 * 24
    assert [arm["fits"] for arm in report["arms"]] == [False, False]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_planned_is_refused_in_a_line(tmp_path: Path) -> None:
    ended = command("plan", "precision=fp17", cwd=tmp_path)
    assert ended.code == 2
    assert ended.err.startswith("error: precision='fp17'")
    ended = command("plan", "trainer.max_steps=0", cwd=tmp_path)
    assert (ended.code, ended.err.startswith("error: trainer.max_steps=0")) == (2, True)
