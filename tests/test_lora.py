"""LoRA: only adapters are trained, generators get whole weights, and the base never changes."""

import os
from collections.abc import Iterator
from pathlib import Path

import peft
import pytest
import torch
from commands import command
from small_runs import LOCKSTEP, metrics, repeatable, small_trainer, status
from transformers import AutoModelForCausalLM

from grpo_exp import jsonl
from grpo_exp.assets import path as asset
from grpo_exp.config.schema import LoraConfig
from grpo_exp.errors import ConfigError, ConfigErrors, RunFailed
from grpo_exp.lora import adapter_parameters, add_adapters, as_served, without_adapters
from grpo_exp.policy import load_policy
from grpo_exp.precision import DTYPES
from grpo_exp.sync.names import is_adapter
from grpo_exp.sync.shm import Sender, checksum, unique_parameters

TINY = str(asset("tiny"))
LORA = "lora=r16"
IDS = torch.arange(3, 23).view(2, 10)


def adapted(dtype: str = "fp32", adapter: str = "fp32", seed: int = 0, rank: int = 4) -> torch.nn.Module:
    """The tiny model with adapters that do something."""
    model = load_policy(TINY, params=dtype)
    add_adapters(model, LoraConfig(rank=rank), DTYPES[adapter], seed)
    change(model, seed)
    return model


@torch.no_grad()
def change(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.fixture
def fd() -> Iterator[int]:
    found = os.memfd_create("weights")
    yield found
    os.close(found)


def test_a_model_with_served_weights_computes_what_the_one_with_adapters_does() -> None:
    model, plain = adapted(), load_policy(TINY, params="fp32")
    expected = model(IDS).logits
    assert not torch.allclose(plain(IDS).logits, expected, atol=1e-2)
    plain.load_state_dict(dict(as_served(model, unique_parameters(model))), strict=False)
    assert torch.allclose(plain(IDS).logits, expected, atol=1e-4)
    with without_adapters(model):
        assert torch.equal(model(IDS).logits, load_policy(TINY, params="fp32")(IDS).logits)
    assert torch.equal(model(IDS).logits, expected)


def test_served_weights_are_those_that_peft_merges() -> None:
    model = adapted()
    served = dict(as_served(model, unique_parameters(model)))
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
    for name, weight in unique_parameters(model).items():
        assert torch.allclose(served[name], weight, atol=1e-6), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_base_is_the_same_bits_after_a_hundred_syncs(dtype: str, fd: int) -> None:
    """Merging into low precision and taking out again drifts; this is what peft's own merge does for comparison."""
    model, other = adapted(dtype), adapted(dtype)
    sender = Sender(fd, DTYPES[dtype], DTYPES[dtype])
    before = checksum(unique_parameters(model).values())
    sums = set()
    for step in range(100):
        change(model, step)
        sums.add(sender.write(step, model).checksum)
    assert len(sums) == 100
    assert checksum(unique_parameters(model).values()) == before
    layers = [module for module in other.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    for step in range(100):
        change(other, step)
        for layer in layers:
            layer.merge()
            layer.unmerge()
    assert checksum(unique_parameters(other).values()) != before
    assert torch.equal(torch.cat([p.flatten() for p in adapter_parameters(model).values()]),
                       torch.cat([p.flatten() for p in adapter_parameters(other).values()]))  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "params", "adapter"),
    [("fp32", "fp32", "fp32"), ("fp16", "fp32", "fp32"), ("bf16_pure", "bf16", "bf16")],
)
def test_every_site_is_as_declared_and_only_adapters_are_trained(
    tmp_path: Path, precision: str, params: str, adapter: str
) -> None:
    run = small_trainer(tmp_path, LORA, LOCKSTEP, f"precision={precision}", "optim.lr=1e-2")
    base = checksum(unique_parameters(run.model).values())
    assert all(is_adapter(name) for name, _ in run.optimizer.named)
    run.train()
    assert checksum(unique_parameters(run.model).values()) == base
    found = jsonl.read_json(tmp_path / "manifest.json")["precision"]
    assert found["observed"]["first_step"] == found["declared"]
    assert (found["declared"]["params"], found["declared"]["adapter"]) == (params, adapter)
    assert metrics(tmp_path)[-1]["params/changed_frac"] > 0
    assert any(row.get("probe/beta_mean") is not None for row in metrics(tmp_path))


def test_adapters_in_fp32_beside_a_base_in_bf16_are_seen_apart(tmp_path: Path) -> None:
    run = small_trainer(tmp_path, LORA, LOCKSTEP, "precision=bf16_pure", "precision.optimizer_state=fp32")
    run.train()
    found = jsonl.read_json(tmp_path / "manifest.json")["precision"]
    assert found["observed"]["first_step"] == found["declared"]
    seen = {
        site: found["declared"][site] for site in ("params", "compute", "adapter", "grad_reduce", "optimizer_state")
    }
    assert seen == {
        "params": "bf16",
        "compute": "bf16",
        "adapter": "fp32",
        "grad_reduce": "fp32",
        "optimizer_state": "fp32",
    }


def test_a_generator_that_got_served_weights_agrees_with_the_trainer(tmp_path: Path) -> None:
    small_trainer(tmp_path, LORA, LOCKSTEP, "precision=fp32", "optim.lr=1e-2", "trainer.max_steps=4").train()
    for row in metrics(tmp_path):
        assert row["step"] == 0 or row["mismatch/abs_max"] < 1e-4


def test_a_checkpoint_is_one_of_peft_and_a_broken_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    settings = (LORA, LOCKSTEP, "precision=fp32", "optim.lr=1e-2", "trainer.save_every=2", "algo.kl_coef=0.01")
    unbroken = small_trainer(tmp_path / "unbroken", *settings, "trainer.max_steps=4")
    unbroken.train()
    small_trainer(tmp_path / "broken", *settings, "trainer.max_steps=2").train()
    resumed = small_trainer(tmp_path / "broken", *settings, "trainer.max_steps=4")
    resumed.train(resume_from_checkpoint=True)
    mine, theirs = adapter_parameters(unbroken.model), adapter_parameters(resumed.model)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert repeatable(metrics(tmp_path / "unbroken"))[-1] == repeatable(metrics(tmp_path / "broken"))[-1]
    checkpoint = tmp_path / "unbroken" / "checkpoints" / "step-000004"
    assert not (checkpoint / "model.safetensors").exists()
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY), str(checkpoint))
    assert torch.allclose(loaded(IDS).logits, unbroken.model(IDS).logits, atol=1e-6)


def test_the_base_is_the_reference_and_takes_no_copy(tmp_path: Path) -> None:
    run = small_trainer(tmp_path, LORA, LOCKSTEP, "precision=fp32", "algo.kl_coef=0.1", "optim.lr=1e-2")
    assert run.passes.reference is not None
    own = {parameter.data_ptr() for parameter in unique_parameters(run.model).values()}
    assert {weight.data_ptr() for weight in run.passes.reference.weights} == own
    run.train()
    values = [row["reference/kl"] for row in metrics(tmp_path) if row.get("reference/kl") is not None]
    assert values[0] == pytest.approx(0, abs=1e-9)
    assert values[-1] > 1e-6


def test_adapters_are_not_put_beside_another_base(tmp_path: Path) -> None:
    settings = (LORA, LOCKSTEP, "precision=fp32", "trainer.save_every=1", "trainer.max_steps=1")
    small_trainer(tmp_path / "run", *settings).train()
    other = load_policy(TINY, params="fp32")
    other.get_parameter("model.norm.weight").data[0] += 1
    other.save_pretrained(tmp_path / "model")
    for file in asset("tiny").glob("tokenizer*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    changed = small_trainer(
        tmp_path / "run", *settings[:-1], "trainer.max_steps=2", f"model.name_or_path={tmp_path / 'model'}"
    )
    with pytest.raises(RunFailed, match="not the checkpoint that the run began with"):
        changed.train(resume_from_checkpoint=True)
    assert status(tmp_path / "run")["state"] == "failed"


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        (("precision.adapter=fp32",), "precision.adapter", "lora.rank=0"),
        ((LORA, "precision=bf16_pure", "precision.adapter=fp16"), "precision.adapter", "fp32, bf16"),
        ((LORA, "precision.reference=bf16", "algo.kl_coef=0.1"), "precision.reference", "the base, as it is"),
        ((LORA, "lora.rank=-1"), "lora.rank", "0 or more"),
        ((LORA, "lora.alpha=0"), "lora.alpha", "a number > 0"),
        ((LORA, "distributed=fsdp2"), "lora.rank", "0 with distributed=fsdp2"),
        ((LORA, "lora.target_modules=[no_such]"), "lora.target_modules", "names of linear layers"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_refused(tmp_path: Path, settings: tuple[str, ...], key: str, words: str) -> None:
    with pytest.raises((ConfigError, ConfigErrors), match=key) as caught:
        small_trainer(tmp_path, LOCKSTEP, *settings)
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_default_task_is_learnt_with_adapters(tmp_path: Path, precision: str) -> None:
    ended = command(LORA, f"precision={precision}", "optim.lr=5e-3", cwd=tmp_path)
    assert ended.code == 0, ended.err
    [run] = (tmp_path / "runs").iterdir()
    assert metrics(run)[-1]["eval/accuracy"] > 0.3  # from 0.08; the head, which is the embedding, is not trained
