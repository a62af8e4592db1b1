"""The whole loop in small: with a worker beside it and in lockstep."""

import math
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engines import TESTS
from safetensors.torch import load_file
from small_runs import (
    LOCKSTEP,
    check_groups,
    events,
    metrics,
    repeatable,
    small_config,
    small_trainer,
    status,
    trained_prompts,
)

from grpo_exp import jsonl
from grpo_exp.config.schema import Backend
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.folder import State
from grpo_exp.precision import resolve
from grpo_exp.rollout.hf import HFEngine
from grpo_exp.rollout.start import ENGINES, engine_spec
from grpo_exp.rollout.stream import PromptStream
from grpo_exp.tasks import Row


def rows(count: int) -> list[Row]:
    """Prompts of the task ``reverse``."""
    words = ["".join("abcdefghij"[int(digit)] for digit in f"{(index * 7919) % 1000003:06d}") for index in range(count)]
    return [{"prompt": word + ">", "answer": word[::-1]} for word in words]


def learnable(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(ids[0] % 7) for ids in completion_ids]


def final_weights(path: Path) -> dict[str, torch.Tensor]:
    newest = max((path / "checkpoints").iterdir())
    return load_file(newest / "model.safetensors")


@pytest.fixture(scope="module")
def with_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps with one worker and a staleness of at most 1."""
    path = tmp_path_factory.mktemp("with_worker")
    small_trainer(path, "trainer.max_steps=12", "rollout.max_staleness=1").train()
    return path


def test_rollouts_go_on_while_the_trainer_trains(with_worker: Path) -> None:
    steps = [row for row in metrics(with_worker) if row["step"] > 0]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert {row["staleness/max"] for row in steps} == {0.0, 1.0}
    assert steps[0]["staleness/max"] == 0.0


def test_every_group_of_a_run_has_one_end(with_worker: Path) -> None:
    """D12"""
    check_groups(with_worker)
    assert status(with_worker)["groups"] == {
        "started": 48, "trained": 48, "dropped_stale": 0, "dropped_failed": 0, "replaced": 0, "left_over": 0,
    }  # fmt: skip


def test_a_run_leaves_no_process_behind(with_worker: Path) -> None:
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [command for command in commands if "grpo_exp.rollout.worker" in command]


def test_without_staleness_a_worker_changes_nothing(tmp_path: Path) -> None:
    """In fp32, staleness 0 is lockstep training, to the last bit of every metric and weight."""
    small_trainer(tmp_path / "worker", "rollout.max_staleness=0").train()
    small_trainer(tmp_path / "lockstep", LOCKSTEP).train()
    assert repeatable(metrics(tmp_path / "worker")) == repeatable(metrics(tmp_path / "lockstep"))
    one, other = final_weights(tmp_path / "worker"), final_weights(tmp_path / "lockstep")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_lockstep_run_waits_for_nobody_while_it_has_to_generate_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards of one's own come from another process: with nothing sent to it there is no news to be had from it."""
    monkeypatch.setattr("grpo_exp.rollout.source.PUMP_S", 30.0)
    own = ["letter_rewards:num_letters"]
    trainer = small_trainer(tmp_path, LOCKSTEP, "trainer.max_steps=2", reward_funcs=own, accuracy=None)
    start = time.monotonic()
    trainer.train()
    assert time.monotonic() - start < 30.0


def test_a_lockstep_run_repeats_bit_for_bit(tmp_path: Path) -> None:
    """B15"""
    for name in ("one", "two"):
        small_trainer(tmp_path / name, LOCKSTEP).train()
    assert repeatable(metrics(tmp_path / "one")) == repeatable(metrics(tmp_path / "two"))
    one, two = final_weights(tmp_path / "one"), final_weights(tmp_path / "two")
    assert all(torch.equal(one[name], two[name]) for name in one)
    small_trainer(tmp_path / "other", LOCKSTEP, "seed=1").train()
    assert repeatable(metrics(tmp_path / "one")) != repeatable(metrics(tmp_path / "other"))


def test_thread_counts_are_those_of_the_configuration(tmp_path: Path) -> None:
    """However many cores a machine has: sums are cut by threads, so results depend on their number."""
    trainer = small_trainer(tmp_path, "trainer.num_threads=2", "rollout.num_threads=1")
    assert torch.get_num_threads() == 2
    precision = resolve(trainer.config.precision, "fp32", torch.device("cpu"))
    HFEngine(engine_spec(trainer.config, precision, "cpu"))
    assert torch.get_num_threads() == 1
    assert engine_spec(small_config(LOCKSTEP, "trainer.num_threads=2"), precision, "cpu").num_threads == 2


def test_the_bound_on_epochs_ends_the_run_and_is_the_horizon_of_the_schedule(tmp_path: Path) -> None:
    """D13: one epoch of 4 prompts, 2 a step, max_steps 1000000: 2 steps."""
    overrides = (
        "trainer.max_epochs=1",
        "trainer.max_steps=1000000",
        "trainer.prompts_per_step=2",
        "optim.schedule=linear",
    )
    trainer = small_trainer(tmp_path, LOCKSTEP, *overrides, "optim.warmup_steps=0", train=rows(4))
    assert trainer.train() is State.done
    ended = status(tmp_path)
    assert (ended["step"], ended["max_steps"], ended["exit_code"], ended["reason"]) == (2, 2, 0, "trainer.max_epochs")
    rate = trainer.config.optim.lr
    assert [row["lr"] for row in metrics(tmp_path) if row["step"]] == pytest.approx([rate, rate / 2])
    assert sorted(trained_prompts(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_prompts", "sizes"), [(1, [1]), (3, [3]), (10, [4, 4, 2]), (8, [4, 4])])
def test_an_epoch_of_any_size_trains_every_prompt_once(tmp_path: Path, num_prompts: int, sizes: list[int]) -> None:
    bounds = "trainer.max_epochs=1", "trainer.max_steps=null"
    trainer = small_trainer(tmp_path, LOCKSTEP, *bounds, train=rows(num_prompts), eval_dataset=[])
    assert trainer.train() is State.done
    assert [len(row["groups"]) for row in jsonl.read(tmp_path / "trained.jsonl")] == sizes
    assert sorted(trained_prompts(tmp_path)) == list(range(num_prompts))
    assert trainer.bounds.horizon == len(sizes)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_data_smaller_than_a_batch_are_gone_through_again(tmp_path: Path, num_prompts: int) -> None:
    trainer = small_trainer(tmp_path, LOCKSTEP, "trainer.max_steps=3", train=rows(num_prompts), eval_dataset=[])
    assert trainer.train() is State.done
    prompts = trained_prompts(tmp_path)
    assert len(prompts) == 12
    assert max(prompts.count(index) for index in range(num_prompts)) == math.ceil(12 / num_prompts)


def test_an_empty_data_set_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train_dataset"):
        small_trainer(tmp_path / "run", LOCKSTEP, train=[])
    assert not (tmp_path / "run").exists()


def first_groups(data: list[Row], count: int) -> list[Row]:
    stream = PromptStream(data, seed=0, max_epochs=None)
    return [stream.row(serial) for serial in range(count)]


def test_a_step_without_any_reward_is_skipped_and_not_counted_as_trained(tmp_path: Path) -> None:
    """C3: with a word in events.jsonl; neither the version nor the learning rate moves."""
    data = [row | {"rewarded": True} for row in rows(16)]
    for row in first_groups(data, 4):
        row["rewarded"] = False

    def reward(completion_ids: list[list[int]], rewarded: list[bool], **columns: Any) -> list[float | None]:
        return [float(ids[0] % 7) if given else None for ids, given in zip(completion_ids, rewarded, strict=True)]

    trainer = small_trainer(tmp_path, LOCKSTEP, train=data, reward_funcs=reward, eval_dataset=[], accuracy=None)
    assert trainer.train() is State.done
    assert [(event["step"], event["reason"]) for event in events(tmp_path, "skipped_step")] == [
        (1, "no group has two valid rewards")
    ]
    first, second, *_ = metrics(tmp_path)
    assert first["reward/mean"] is None
    assert (first["group/dropped_frac"], first["params/changed_frac"], second["group/dropped_frac"]) == (1.0, 0.0, 0.0)
    assert first["lr"] == second["lr"]
    assert second["fp16/skipped_total"] == 0, "that counts gradients that were not finite"
    assert second["staleness/max"] == 0.0
    ended = status(tmp_path)
    assert (ended["step"], ended["updates"]) == (4, 3)
    assert (ended["groups"]["trained"], ended["groups"]["dropped_failed"]) == (12, 4)
    check_groups(tmp_path)


def test_a_group_without_rewards_is_dropped_and_counted_and_the_step_goes_on(tmp_path: Path) -> None:
    """C3: NaN and infinity are no rewards either."""
    data = [row | {"factor": 1.0} for row in rows(16)]
    for row, factor in zip(first_groups(data, 3), (math.nan, math.inf, 1.0), strict=True):
        row["factor"] = factor

    def reward(completion_ids: list[list[int]], factor: list[float], **columns: Any) -> list[float]:
        return [(1.0 + ids[0] % 7) * by for ids, by in zip(completion_ids, factor, strict=True)]

    small_trainer(tmp_path, LOCKSTEP, train=data, reward_funcs=reward, eval_dataset=[], accuracy=None).train()
    assert metrics(tmp_path)[0]["group/dropped_frac"] == 0.5
    assert all(
        math.isfinite(row[key]) for row in metrics(tmp_path) for key in ("reward/mean", "loss/policy", "grad/norm")
    )
    ended = status(tmp_path)
    assert (ended["updates"], ended["groups"]["dropped_failed"]) == (4, 2)


def test_a_run_that_never_gets_a_reward_fails(tmp_path: Path) -> None:
    """C3: never exit code 0 with no update."""

    def silent(completions: list[Any], **columns: Any) -> list[None]:
        return [None] * len(completions)

    with pytest.raises(RunFailed, match="without a single update"):
        small_trainer(tmp_path, LOCKSTEP, reward_funcs=silent, eval_dataset=[], accuracy=None).train()
    ended = status(tmp_path)
    assert (ended["state"], ended["exit_code"], ended["updates"]) == ("failed", 1, 0)


def test_a_reward_that_raises_ends_the_run_with_its_traceback_and_the_prompt(tmp_path: Path) -> None:
    """C5: policy fail, the default."""
    data = rows(16)
    bad = first_groups(data, 3)[2]["prompt"]

    def reward(prompts: list[str], completions: list[Any], **columns: Any) -> list[float]:
        if prompts[0] == bad:
            raise KeyError("on the third call")
        return [float(len(completion)) for completion in completions]

    with pytest.raises(RunFailed, match="on the third call"):
        small_trainer(tmp_path, LOCKSTEP, train=data, reward_funcs=reward, eval_dataset=[], accuracy=None).train()
    ended = status(tmp_path)
    assert ended["state"] == "failed"
    assert bad in ended["traceback"]
    assert 'raise KeyError("on the third call")' in ended["traceback"]


def test_with_policy_skip_a_group_whose_reward_raises_is_dropped_and_counted(tmp_path: Path) -> None:
    """C5"""
    data = rows(16)
    bad = first_groups(data, 3)[2]["prompt"]

    def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        if prompts[0] == bad:
            raise KeyError("on the third call")
        return [float(ids[0] % 7) for ids in completion_ids]

    overrides = "task.reward_errors=skip", "trainer.max_epochs=1", "trainer.max_steps=null"
    small_trainer(
        tmp_path, LOCKSTEP, *overrides, train=data, reward_funcs=reward, eval_dataset=[], accuracy=None
    ).train()
    ended = status(tmp_path)
    assert (ended["state"], ended["groups"]["trained"], ended["groups"]["dropped_failed"]) == ("done", 15, 1)
    assert [event["group"] for event in events(tmp_path, "failed_group")] == [2]
    assert sorted(trained_prompts(tmp_path)) == sorted(set(range(16)) - {data.index(first_groups(data, 3)[2])})


def test_slow_prompts_of_a_real_worker_are_trained_as_often_as_they_are_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D7: half of the prompts take five times as long."""
    monkeypatch.setitem(ENGINES, Backend.hf, "engines:SlowPrompts")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    data = rows(40)
    overrides = "trainer.max_steps=16", "rollout.max_staleness=2", "task.num_eval=0"
    trainer = small_trainer(tmp_path, *overrides, train=data)
    assert trainer.train() is State.done
    slow = [trainer.processing_class(row["prompt"])["input_ids"][-2] % 2 == 1 for row in data]
    stream = PromptStream(data, seed=0, max_epochs=None)
    offered = [slow[stream.index(serial)] for serial in range(64)]
    trained = [slow[prompt] for prompt in trained_prompts(tmp_path)[:48]]  # of the first 12 steps
    assert 0.3 < sum(offered) / 64 < 0.7
    assert abs(sum(trained) / 48 - sum(offered) / 64) < 0.1
    assert status(tmp_path)["groups"]["dropped_stale"] == 0
