"""A run that was broken and resumed is the run that was never broken."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoint as model_checkpoint
from safetensors.torch import load_file
from small_runs import (
    LOCKSTEP,
    check_groups,
    events,
    metrics,
    repeatable,
    small_trainer,
    status,
    trained_prompts,
)

from grpo_exp import jsonl
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.folder import State
from grpo_exp.saving import save
from grpo_exp.sync.shm import checksum, unique_parameters

SAVE_ALL = ("trainer.save_every=1", "trainer.keep_checkpoints=100")
PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("precision=bf16",),
    # a scale that overflows at first and then grows again: skipped steps and growth on both sides of the break
    "fp16": (
        "precision=fp16",
        "precision.loss_scale.init=524288.0",
        "precision.loss_scale.growth_interval=2",
        "trainer.max_steps=8",
    ),
}


class Crash(BaseException):
    """Not an error that anything handles."""


class At:
    """Does something after a step is recorded, before its checkpoint is written."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


def crash() -> None:
    raise Crash


def newest(path: Path) -> Path:
    return max((path / "checkpoints").iterdir())


def same_bits(one: Path, other: Path) -> None:
    """Weights, moments, RNG and all else that a checkpoint holds."""
    assert one.name == other.name
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = load_file(one / name), load_file(other / name)
        assert first.keys() == second.keys()
        for key in first:
            assert torch.equal(first[key].reshape(-1).view(torch.uint8), second[key].reshape(-1).view(torch.uint8)), (
                name,
                key,
            )
    progress = [jsonl.read_json(path / "trainer.json") for path in (one, other)]
    for entry in progress:
        del entry["wall_s"], entry["probe_s"]
    assert progress[0] == progress[1]


@pytest.fixture(scope="module", params=list(PRECISIONS))
def unbroken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    path, overrides = tmp_path_factory.mktemp("unbroken"), (LOCKSTEP, *PRECISIONS[request.param], *SAVE_ALL)
    small_trainer(path, *overrides).train()
    return path, overrides


@pytest.mark.parametrize(("step", "how"), [(1, "stop"), (2, "crash"), (3, "stop"), (4, "stop")])
def test_a_lockstep_run_that_was_broken_at_any_step_is_bit_for_bit_the_unbroken_one(
    unbroken: tuple[Path, tuple[str, ...]], tmp_path: Path, step: int, how: str
) -> None:
    whole, overrides = unbroken
    if how == "crash":
        with pytest.raises(Crash):
            small_trainer(tmp_path, *overrides, callbacks=[At(step, crash)]).train()
        assert status(tmp_path)["state"] == "failed"
    else:
        asked: list[bool] = []
        trainer = small_trainer(
            tmp_path, *overrides, callbacks=[At(step, lambda: asked.append(True))], should_stop=lambda: bool(asked)
        )
        expected = State.done if step == status(whole)["step"] else State.preempted
        assert trainer.train() is expected
    broken_at = status(tmp_path)["step"]
    assert small_trainer(tmp_path, *overrides).train(resume_from_checkpoint=True) is State.done
    assert broken_at == step
    same_bits(newest(whole), newest(tmp_path))
    assert repeatable(metrics(whole)) == repeatable(metrics(tmp_path))
    assert jsonl.read(whole / "trained.jsonl") == jsonl.read(tmp_path / "trained.jsonl")
    assert status(whole)["groups"] == status(tmp_path)["groups"]


def scales(path: Path) -> list[float]:
    return [row["fp16/scale"] for row in metrics(path) if row["step"]]


def test_the_scale_of_the_fp16_run_fell_and_grew(unbroken: tuple[Path, tuple[str, ...]]) -> None:
    """A12: or the test before would say nothing about the scaler."""
    path, overrides = unbroken
    if "precision=fp16" in overrides:
        steps = scales(path)
        changes = {after / before for before, after in pairwise(steps)}
        assert changes >= {0.5, 2.0}, steps
        assert status(path)["updates"] < status(path)["step"]


class FullQueue:
    """Crashes after a step, once every group that may be started is finished and waits to be trained."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.trainer: Any = None
        self.waiting: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.step:
            return
        source = self.trainer.source
        source._start_groups(None)
        while source.buffer.open:
            source.pump()
        self.waiting = sorted(source.buffer.ready)
        save(self.trainer)
        raise Crash


class FirstRollouts:
    """Notes what the worker holds before training begins."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.held: tuple[int, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pool = self.trainer.source.pool
        self.held = pool.members[0].version, pool._payload.checksum


def test_an_async_run_that_was_killed_loses_and_repeats_no_prompt(tmp_path: Path) -> None:
    """D9: 12 prompts, ended after step 2 with a queue full of finished groups, resumed to the end of the epoch.

    D10: and the first rollouts after the resume come from the weights of the checkpoint.
    """
    overrides = (
        "trainer.max_epochs=1",
        "trainer.max_steps=null",
        "task.num_train=12",
        "trainer.prompts_per_step=2",
        *SAVE_ALL,
    )
    crashing, first = FullQueue(2), FirstRollouts()
    crashing.trainer = small_trainer(tmp_path, "rollout.max_staleness=2", *overrides, callbacks=[crashing])
    with pytest.raises(Crash):
        crashing.trainer.train()
    assert len(crashing.waiting) == 6
    saved = unique_parameters(crashing.trainer.model)
    first.trainer = small_trainer(tmp_path, "rollout.max_staleness=2", *overrides, callbacks=[first])
    assert first.trainer.train(resume_from_checkpoint=True) is State.done
    assert first.held == (2, checksum(saved.values()))
    assert sorted(trained_prompts(tmp_path)) == list(range(12))
    rows = {row["step"]: row for row in metrics(tmp_path) if row["step"]}
    assert list(rows) == [1, 2, 3, 4, 5, 6]
    assert rows[3]["staleness/max"] == 0.0
    assert status(tmp_path)["groups"]["started"] == 12
    check_groups(tmp_path)


def test_a_run_that_stopped_before_its_first_step_starts_anew(tmp_path: Path) -> None:
    assert small_trainer(tmp_path, LOCKSTEP, should_stop=lambda: True).train() is State.preempted
    assert status(tmp_path)["step"] == 0
    assert not list((tmp_path / "checkpoints").iterdir())
    assert small_trainer(tmp_path, LOCKSTEP).train(resume_from_checkpoint=True) is State.done
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4]


def test_resuming_a_run_that_is_done_adds_nothing(tmp_path: Path) -> None:
    for resume in (False, True):
        assert small_trainer(tmp_path, LOCKSTEP).train(resume_from_checkpoint=resume) is State.done
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3, 4]
    assert status(tmp_path)["updates"] == 4
    check_groups(tmp_path)


def test_going_back_to_an_earlier_checkpoint_cuts_all_that_came_later(tmp_path: Path) -> None:
    small_trainer(tmp_path, LOCKSTEP, *SAVE_ALL).train()
    before = repeatable(metrics(tmp_path))
    early = tmp_path / "checkpoints" / "step-000002"
    asked: list[bool] = []
    trainer = small_trainer(
        tmp_path, LOCKSTEP, *SAVE_ALL, callbacks=[At(3, lambda: asked.append(True))], should_stop=lambda: bool(asked)
    )
    assert trainer.train(resume_from_checkpoint=early) is State.preempted
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())][-1] == "step-000003"
    assert [row["step"] for row in metrics(tmp_path)] == [0, 1, 2, 3]
    assert small_trainer(tmp_path, LOCKSTEP, *SAVE_ALL).train(resume_from_checkpoint=True) is State.done
    assert repeatable(metrics(tmp_path)) == before
    assert [event["from"] for event in events(tmp_path, "resume")] == ["step-000002", "step-000003"]


def test_a_run_that_begins_anew_does_not_pick_up_checkpoints_of_the_one_before(tmp_path: Path) -> None:
    small_trainer(tmp_path, LOCKSTEP, "trainer.max_steps=6").train()
    small_trainer(tmp_path, LOCKSTEP, "trainer.max_steps=2").train()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_only_the_newest_checkpoints_are_kept_and_half_written_ones_are_not_taken(tmp_path: Path) -> None:
    trainer = small_trainer(
        tmp_path, LOCKSTEP, "trainer.save_every=1", "trainer.keep_checkpoints=2", "trainer.max_steps=3"
    )
    trainer.train()
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000002", "step-000003"]
    shutil.copytree(checkpoints / "step-000003", checkpoints / ".step-000004.part")
    (checkpoints / ".step-000004.part" / "trainer.json").unlink()
    assert small_trainer(tmp_path, LOCKSTEP, "trainer.max_steps=3").train(resume_from_checkpoint=True) is State.done
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_checkpoint_are_an_ordinary_model(tmp_path: Path, tied: bool) -> None:
    """B9: of a tied pair one is stored, of an untied one both."""
    overrides = LOCKSTEP, f"model.name_or_path={model_checkpoint(tied=tied)}", "trainer.max_steps=1"
    trainer = small_trainer(tmp_path, *overrides)
    trainer.train()
    assert small_trainer(tmp_path, *overrides).train(resume_from_checkpoint=True) is State.done
    again = small_trainer(tmp_path / "next", LOCKSTEP, f"model.name_or_path={newest(tmp_path)}")
    for name, parameter in unique_parameters(trainer.model).items():
        assert torch.equal(parameter, unique_parameters(again.model)[name])


def test_a_checkpoint_of_another_model_or_dtype_is_refused(tmp_path: Path) -> None:
    small_trainer(tmp_path, LOCKSTEP, "trainer.max_steps=1").train()
    for name in ("other", "pure"):
        shutil.copytree(tmp_path / "checkpoints", tmp_path / name / "checkpoints")
    other = small_trainer(tmp_path / "other", LOCKSTEP, f"model.name_or_path={model_checkpoint(tied=False)}")
    with pytest.raises(RunFailed, match="not a checkpoint of this model"):
        other.train(resume_from_checkpoint=True)
    pure = small_trainer(tmp_path / "pure", "precision=bf16_pure", LOCKSTEP)
    with pytest.raises((RunFailed, ConfigError), match="stored in"):
        pure.train(resume_from_checkpoint=True)


class Began:
    """Whether training has begun, which is before the first evaluation."""

    yet = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.yet = True


@pytest.mark.parametrize("when", ["before the first step", "in the middle", "after the last step"])
def test_a_stop_during_an_evaluation_loses_nothing(
    unbroken: tuple[Path, tuple[str, ...]], tmp_path: Path, when: str
) -> None:
    """The step that was to be evaluated is kept, and the resumed run makes up for the evaluation."""
    whole, overrides = unbroken
    step = {"before the first step": 0, "in the middle": 2}.get(when, status(whole)["step"])
    began = Began()
    broken = small_trainer(tmp_path, *overrides, callbacks=[began])
    broken.should_stop = lambda: began.yet and broken.progress.step == step  # of such a step, evaluate is first to ask
    assert broken.train() is State.preempted
    assert (status(tmp_path)["step"], status(tmp_path)["reason"]) == (step, None)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == (list(range(step + 1)) if step else [])
    assert not step or "eval/accuracy" not in rows[-1]
    assert small_trainer(tmp_path, *overrides).train(resume_from_checkpoint=True) is State.done
    same_bits(newest(whole), newest(tmp_path))
    assert repeatable(metrics(whole)) == repeatable(metrics(tmp_path))
    assert status(whole)["groups"] == status(tmp_path)["groups"]


def test_an_evaluation_that_came_late_is_in_the_row_of_its_step(tmp_path: Path) -> None:
    """F4: the data run out before the last step can know that it is the last; each step has one row all the same."""
    overrides = ("trainer.max_epochs=1", "trainer.max_steps=null", "task.num_train=10", "trainer.eval_every=0")
    small_trainer(tmp_path, LOCKSTEP, *overrides).train()
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "eval/accuracy" in rows[3]
    assert "loss/policy" in rows[3]
