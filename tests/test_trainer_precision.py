"""Precision through whole runs, in lockstep: what is declared is what happens, and what overflows is told."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Family, checkpoint
from small_runs import LOCKSTEP, events, metrics, small_trainer, status
from test_precision import ON_CPU, TRAINER
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_exp import AsyncGRPOTrainer, jsonl, precision
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.folder import State

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BARE = ("trainer.eval_every=0", "task.num_eval=0", "trainer.save_every=0", "optim.warmup_steps=0")


def trainer(path: Path, *overrides: str, **arguments: Any) -> AsyncGRPOTrainer:
    return small_trainer(path, LOCKSTEP, *BARE, *overrides, **arguments)


def weights(trainer: AsyncGRPOTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def equal(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def manifest(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = jsonl.read_json(path / "manifest.json")["precision"]
    return found


class Steps:
    """A callback that calls a function with the number of the step that has just ended, 0 before the first."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self.function = function

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(state.global_step)


@pytest.mark.parametrize("option", ON_CPU)
def test_every_shipped_option_trains_and_is_what_it_says(option: str, tmp_path: Path):
    """A3, A8: done, weights changed and finite, every declared dtype observed, a warning where the sides differ."""
    run = trainer(tmp_path, f"precision={option}", "trainer.max_steps=3", "optim.lr=3e-3")
    before = weights(run)
    assert run.train() is State.done
    after = weights(run)
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert sum(int((after[name] != before[name]).sum()) for name in after) > 1000
    assert run.optimizer.loss_scale.enabled is (option == "fp16")
    seen = manifest(tmp_path)
    assert seen["declared"].keys() == seen["observed"]["first_step"].keys()
    assert seen["declared"] == seen["observed"]["first_step"]
    if option != "auto":  # which is about a checkpoint in bf16 there
        names = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
        sites = ("params", "compute", "head", "optimizer_state")
        assert [seen["declared"][site] for site in sites] == [names[dtype] for dtype in TRAINER[option]]
    mixed = [event for event in events(tmp_path, "warning") if "generator workers" in event["message"]]
    assert len(mixed) == ("rollout" in option)
    rows = metrics(tmp_path)
    assert [row["fp16/skipped_total"] for row in rows] == [0, 0, 0]
    assert {row["fp16/scale"] for row in rows} == {65536.0 if option == "fp16" else 1.0}
    assert all(math.isfinite(row["loss/policy"]) and row["grad/norm"] > 0 for row in rows)


@pytest.mark.parametrize(("dtype", "name"), [(FP16, "fp16"), (BF16, "bf16"), (FP32, "fp32")])
def test_auto_follows_the_checkpoint_with_moments_in_fp32(dtype: torch.dtype, name: str, tmp_path: Path):
    """A1, A3"""
    source = checkpoint(Family.llama, dtype)
    run = trainer(tmp_path, "precision=auto", f"model.name_or_path={source}", "trainer.max_steps=2", "optim.lr=1e-2")
    assert {p.dtype for p in run.model.parameters()} == {dtype}
    assert run.train() is State.done
    seen = manifest(tmp_path)["observed"]["first_step"]
    assert {seen[site] for site in ("params", "compute", "head", "grad_reduce", "rollout", "wire", "kv_cache")} == {
        name
    }
    assert (seen["optimizer_state"], seen["loss_scale"]) == ("fp32", "none")


def test_four_dtypes_of_a_mix_are_four_fields_and_one_warning(tmp_path: Path):
    """A8: trainer in fp16, rollouts in bf16."""
    run = trainer(tmp_path, "precision=fp16", "precision.rollout=bf16", "trainer.max_steps=1")
    assert run.train() is State.done
    (warning,) = events(tmp_path, "warning")
    assert "computes in fp16 (precision.compute), generator workers in bf16 (precision.rollout)" in warning["message"]
    assert warning["step"] == 0
    declared = manifest(tmp_path)["declared"]
    fields = [declared[site] for site in ("params", "compute", "optimizer_state", "rollout")]
    assert fields == ["fp32", "fp16", "fp32", "bf16"]


def test_a_device_without_bf16_is_told_before_any_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A9"""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(precision, "supports_bf16", lambda device: False)
    run = trainer(tmp_path / "fp16", "precision=fp16", "trainer.max_steps=1")
    assert run.train() is State.done, "fp16 is not affected"
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", forbidden)
    with pytest.raises(ConfigError, match=r"precision\.compute='bf16': allowed: fp16, fp32"):
        trainer(tmp_path / "bf16", "precision=bf16")


# -- overflows


def overflow_in(run: AsyncGRPOTrainer, *steps: int) -> None:
    """Make the gradient of one weight infinite in some steps."""
    weight = run.model.get_submodule("model.norm").weight
    weight.register_hook(lambda gradient: gradient * torch.inf if run.progress.step in steps else gradient)


class Overflow:
    """A run that overflows in some steps, and what it looks like after each."""

    def __init__(self, path: Path, steps: set[int], *overrides: str) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.versions: list[tuple[int, int]] = []
        self.run = trainer(path, "precision=fp16", "optim.schedule=linear", *overrides, callbacks=[Steps(self.after)])
        overflow_in(self.run, *steps)

    def after(self, step: int) -> None:
        pool = self.run.source.pool
        pool.wait_synced()
        self.weights.append(weights(self.run))
        self.versions.append((self.run.source.version, pool.members[0].version))


def test_an_overflow_skips_the_step_and_nothing_else(tmp_path: Path):
    """A10"""
    case = Overflow(tmp_path, {2}, "trainer.max_steps=4")
    assert case.run.train() is State.done
    start_, first, second, third, _ = case.weights
    assert not equal(start_, first)
    assert equal(first, second), "the weights of step 2 are those of step 1"
    assert not equal(second, third), "the run goes on"
    assert case.versions == [(0, 0), (1, 1), (1, 1), (2, 2), (3, 3)], "nothing was synchronised for the skipped step"
    rows = metrics(tmp_path)
    assert [row["fp16/skipped_total"] for row in rows] == [0, 1, 1, 1]
    assert [row["fp16/scale"] for row in rows] == [65536.0, 65536.0, 32768.0, 32768.0]
    rates = [row["lr"] / rows[0]["lr"] for row in rows]
    assert rates == pytest.approx([1.0, 0.75, 0.75, 0.5]), "counts updates, not steps"
    assert [row["grad/norm"] is None for row in rows] == [False, True, False, False]
    assert rows[1]["params/changed_frac"] == 0.0
    assert (status(tmp_path)["step"], status(tmp_path)["updates"]) == (4, 3)


def test_the_event_of_a_skipped_step_names_pass_and_module(tmp_path: Path):
    """A10"""
    case = Overflow(tmp_path, {1}, "trainer.max_steps=2")
    case.run.train()
    (event,) = events(tmp_path, "skipped_step")
    told = {key: event[key] for key in ("step", "reason", "scale", "where", "module")}
    expected = {
        "step": 1,
        "reason": "non-finite gradient",
        "scale": 65536.0,
        "where": "backward",
        "module": "model.norm",
    }
    assert told == expected


def test_an_overflow_on_the_way_forward_is_told_as_such(tmp_path: Path):
    """A10: in fp16, from a weight that is too large for it; the generator, in bf16, has no trouble with it."""
    run = trainer(tmp_path, "precision=fp16", "precision.rollout=bf16", "trainer.max_skipped_steps=2")
    with torch.no_grad():
        run.model.get_submodule("model.layers.1.mlp.up_proj").weight.mul_(1e6)
    before = weights(run)
    with pytest.raises(RunFailed, match="2 steps in a row were skipped"):
        run.train()
    assert equal(weights(run), before)
    assert [(event["where"], event["module"]) for event in events(tmp_path, "skipped_step")] == [
        ("forward", "model.layers.1.mlp.up_proj")
    ] * 2


def test_overflows_in_a_row_end_the_run_and_say_so(tmp_path: Path):
    """A10: as many as trainer.max_skipped_steps; fewer, with a good step in between, do not."""
    case = Overflow(tmp_path, {1, 2, 4, 5, 6, 7}, "trainer.max_steps=9", "trainer.max_skipped_steps=3")
    with pytest.raises(RunFailed, match=r"3 steps in a row were skipped \(trainer\.max_skipped_steps\)"):
        case.run.train()
    told = status(tmp_path)
    assert (told["state"], told["exit_code"], told["updates"]) == ("failed", 1, 1)
    assert "3 steps in a row were skipped" in told["reason"]
    assert [event["step"] for event in events(tmp_path, "skipped_step")] == [1, 2, 4, 5, 6]


# -- resume


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> AsyncGRPOTrainer:
    """Five fp16 steps in which the loss scale is cut once and grows once."""
    run = fp16_run(tmp_path_factory.mktemp("unbroken"))
    assert run.train() is State.done
    return run


def fp16_run(path: Path, **arguments: Any) -> AsyncGRPOTrainer:
    scale = ("precision.loss_scale.init=1024", "precision.loss_scale.growth_interval=2")
    run = trainer(path, "precision=fp16", *scale, "optim.schedule=cosine", "trainer.max_steps=5", **arguments)
    overflow_in(run, 2)
    return run


@pytest.mark.parametrize("broken_after", [1, 2, 3])
def test_an_fp16_run_that_is_resumed_ends_as_the_unbroken_one(
    broken_after: int, unbroken: AsyncGRPOTrainer, tmp_path: Path
):
    """A12: the same loss scale and growth tracker, learning rates, weights and moments, bit for bit."""
    first = fp16_run(tmp_path, should_stop=lambda: first.progress.step >= broken_after)
    assert first.train() is State.preempted
    assert first.progress.step == broken_after
    second = fp16_run(tmp_path)
    assert second.train(resume_from_checkpoint=True) is State.done
    assert second.optimizer.loss_scale.state_dict() == unbroken.optimizer.loss_scale.state_dict()
    assert equal(weights(second), weights(unbroken))
    assert equal(second.optimizer.tensors(), unbroken.optimizer.tensors())
    keys = ("step", "lr", "fp16/scale", "fp16/skipped_total", "grad/norm", "reward/mean", "mismatch/abs_max")
    found, expected = metrics(tmp_path), metrics(unbroken.folder.path)
    assert [[row[key] for key in keys] for row in found] == [[row[key] for key in keys] for row in expected]


def test_a_run_that_is_done_goes_on_from_its_checkpoint_with_a_later_bound(tmp_path: Path):
    """Why it ended then is no reason to end now."""
    short = ("precision=fp16", "optim.schedule=constant")
    assert trainer(tmp_path, *short, "trainer.max_steps=1").train() is State.done
    again = trainer(tmp_path, *short, "trainer.max_steps=2")
    assert again.train(resume_from_checkpoint=True) is State.done
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]


def test_the_scale_of_the_unbroken_run_is_cut_and_grows(unbroken: AsyncGRPOTrainer):
    assert [row["fp16/scale"] for row in metrics(unbroken.folder.path)] == [1024.0, 1024.0, 512.0, 512.0, 1024.0]
    assert unbroken.optimizer.loss_scale.state_dict() == {"scale": 1024.0, "growth_tracker": 1}


# -- updates that are lost


def test_bf16_weights_swallow_a_small_learning_rate_and_the_run_says_so(tmp_path: Path):
    """A14"""
    run = trainer(tmp_path, "precision=bf16_pure", "optim.lr=1e-6", "trainer.max_steps=6")
    assert run.train() is State.done
    assert max(row["params/changed_frac"] for row in metrics(tmp_path)) < 0.02
    (warning,) = events(tmp_path, "warning")
    assert "of the parameters changed" in warning["message"]
    assert "lr=1e-06" in warning["message"]
    assert "precision.params=fp32" in warning["message"]


def test_fp32_masters_take_every_update(tmp_path: Path):
    """A14"""
    run = trainer(tmp_path, "precision=bf16", "optim.lr=1e-6", "trainer.max_steps=6")
    assert run.train() is State.done
    assert min(row["params/changed_frac"] for row in metrics(tmp_path)) > 0.99
    assert events(tmp_path, "warning") == []


@pytest.mark.parametrize("family", [Family.llama, Family.qwen3])
def test_a_tied_model_keeps_its_tie_and_dtype_under_an_fp32_head(family: Family, tmp_path: Path):
    """A14: on both sides, and generation works."""
    run = trainer(
        tmp_path,
        "precision=auto",
        "precision.head=fp32",
        "precision.rollout_head=fp32",
        f"model.name_or_path={checkpoint(family, BF16)}",
        "trainer.max_steps=2",
        "optim.lr=1e-2",
    )
    assert run.train() is State.done
    assert run.model.lm_head.weight is run.model.model.embed_tokens.weight
    assert run.model.model.embed_tokens.weight.dtype == BF16
    seen = manifest(tmp_path)["observed"]["first_step"]
    sites = ("params", "compute", "head", "rollout", "rollout_head")
    assert [seen[site] for site in sites] == ["bf16", "bf16", "fp32", "bf16", "fp32"]
    assert run.model.generate(torch.tensor([[1, 5, 6]]), max_new_tokens=3).shape[1] > 3


def test_a_model_with_a_soft_cap_trains_and_its_generator_caps_as_well(tmp_path: Path):
    """Equal weights, both in fp32: what the trainer and the generator say of a token is the same."""
    run = trainer(
        tmp_path,
        "precision=fp32",
        f"model.name_or_path={checkpoint(Family.gemma2)}",
        "trainer.max_steps=2",
        "optim.lr=1e-2",
    )
    assert run.train() is State.done
    assert max(row["mismatch/abs_max"] for row in metrics(tmp_path)) < 1e-4
