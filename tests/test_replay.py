"""A replay trains what was recorded, in its order, and nothing else: so arms that replay differ in the trainer alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from recordings import write_recording
from safetensors.numpy import load_file
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
from test_resume import At, Crash, crash, newest, same_bits

from grpo_exp import jsonl
from grpo_exp.errors import ConfigError
from grpo_exp.folder import State
from grpo_exp.recording import read_step, read_trace
from grpo_exp.report.compare import main as compare
from grpo_exp.rollout.replay import ReplaySource
from grpo_exp.rollout.types import Rollout

SAVE_ALL = ("trainer.save_every=1", "trainer.keep_checkpoints=100")
RECORD = "rollout.record=true"


def replay(path: Path, run: Path, *overrides: str, **arguments: Any) -> Any:
    return small_trainer(path, "rollout=replay", f"rollout.replay_from={run}", *SAVE_ALL, *overrides, **arguments)


def files(path: Path, begin: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "rollouts").iterdir() if file.name.startswith(begin)}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lockstep run in fp32."""
    path = tmp_path_factory.mktemp("recorded")
    assert small_trainer(path, LOCKSTEP, RECORD, *SAVE_ALL).train() is State.done
    return path


@pytest.fixture(scope="module")
def replays(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same steps in three precisions, as a sweep leaves them."""
    folder = tmp_path_factory.mktemp("replays")
    for precision in ("fp32", "bf16", "fp16"):
        trainer = replay(folder / precision, recorded, f"precision={precision}")
        assert trainer.train() is State.done
    return folder


def test_a_replay_in_the_recorded_precision_is_the_recorded_run_bit_for_bit(recorded: Path, replays: Path) -> None:
    """Weights, moments, metrics, evaluations and probes: nothing but the time that it took."""
    same = replays / "fp32"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (newest(recorded) / name).read_bytes() == (newest(same) / name).read_bytes()
    assert repeatable(metrics(recorded)) == repeatable(metrics(same))
    assert jsonl.read(recorded / "trained.jsonl") == jsonl.read(same / "trained.jsonl")


def test_recording_changes_nothing_that_is_computed(recorded: Path, tmp_path: Path) -> None:
    small_trainer(tmp_path, LOCKSTEP, *SAVE_ALL).train()
    same_bits(newest(recorded), newest(tmp_path))
    assert repeatable(metrics(recorded)) == repeatable(metrics(tmp_path))
    assert not (tmp_path / "rollouts").exists()


def test_every_arm_trains_the_same_groups_in_the_same_order(recorded: Path, replays: Path) -> None:
    for arm in replays.iterdir():
        assert jsonl.read(recorded / "trained.jsonl") == jsonl.read(arm / "trained.jsonl")
        check_groups(arm)
        for key in ("reward/mean", "staleness/mean", "completion/length_mean"):
            assert [row.get(key) for row in metrics(recorded)] == [row.get(key) for row in metrics(arm)], key
    assert metrics(replays / "bf16")[1]["mismatch/abs_mean"] > 1e-4 > metrics(replays / "fp32")[1]["mismatch/abs_mean"]


def test_a_replay_starts_no_process(replays: Path) -> None:
    for arm in replays.iterdir():
        assert list((arm / "logs").iterdir()) == []


def test_an_asynchronous_run_is_replayed_with_the_staleness_it_had(tmp_path: Path) -> None:
    """Two workers, so that the order in which groups were finished is nobody's to choose."""
    run = tmp_path / "recorded"
    assert (
        small_trainer(run, "rollout=hf", RECORD, "rollout.num_workers=2", "trainer.max_steps=6").train() is State.done
    )
    again = tmp_path / "replayed"
    assert replay(again, run, "trainer.max_steps=6").train() is State.done
    assert trained_prompts(run) == trained_prompts(again)
    for key in ("staleness/mean", "staleness/max", "loss/policy", "grad/norm", "mismatch/abs_mean"):
        assert [row.get(key) for row in metrics(run)] == [row.get(key) for row in metrics(again)], key
    assert (newest(run) / "model.safetensors").read_bytes() == (newest(again) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("step", [1, 3])
def test_a_recorded_run_that_was_broken_has_every_step_once(recorded: Path, tmp_path: Path, step: int) -> None:
    """Killed after a step was recorded and before its checkpoint: the step is run and recorded again."""
    with pytest.raises(Crash):
        small_trainer(tmp_path, LOCKSTEP, RECORD, *SAVE_ALL, callbacks=[At(step, crash)]).train()
    assert len(files(tmp_path, "step-")) == step
    small_trainer(tmp_path, LOCKSTEP, RECORD, *SAVE_ALL).train(resume_from_checkpoint=True)
    for begin in ("step", "recording"):
        assert files(recorded, begin) == files(tmp_path, begin)


def test_a_replay_that_was_broken_is_the_unbroken_one(recorded: Path, replays: Path, tmp_path: Path) -> None:
    with pytest.raises(Crash):
        replay(tmp_path, recorded, "precision=bf16", callbacks=[At(3, crash)]).train()
    assert replay(tmp_path, recorded, "precision=bf16").train(resume_from_checkpoint=True) is State.done
    same_bits(newest(replays / "bf16"), newest(tmp_path))
    assert repeatable(metrics(replays / "bf16")) == repeatable(metrics(tmp_path))
    assert files(replays / "bf16", "trace") == files(tmp_path, "trace")


def test_a_replay_without_a_bound_on_steps_ends_with_the_recording(recorded: Path, tmp_path: Path) -> None:
    overrides = ("trainer.max_steps=null", "trainer.max_minutes=10", "trainer.eval_every=0", "probe.every=0")
    assert replay(tmp_path, recorded, *overrides).train() is State.done
    assert (status(tmp_path)["step"], status(tmp_path)["reason"]) == (4, "what was recorded is used up")


def test_another_vocabulary_is_noticed_at_the_latest_when_the_tokenizer_is_there(
    recorded: Path, tmp_path: Path
) -> None:
    """Where the tokenizer is no file on this machine, nothing is known before."""
    run = write_recording(tmp_path / "run", vocabulary="another", vocabulary_file=None)
    with pytest.raises(ConfigError, match="whose vocabulary is another"):
        replay(tmp_path / "replay", run, "trainer.max_steps=3").train()


def test_tokens_stay_as_stale_as_they_were_where_other_steps_were_skipped(tmp_path: Path) -> None:
    run = write_recording(tmp_path)
    config = small_config("rollout=replay", f"rollout.replay_from={run}", "trainer.max_steps=3")
    task: Any = small_trainer(tmp_path / "unused", LOCKSTEP).task
    source = ReplaySource(config, task, None, None, lambda *_: None, lambda: False)  # type: ignore[arg-type]
    for step, version in ((1, 0), (2, 1), (3, 1)):  # the third is trained by version 2 in the recording
        source.version = version
        groups, (recorded, _) = source.next_batch(None), read_step(run, step)
        assert groups is not None
        for group, before in zip(groups, recorded, strict=True):
            pairs: list[tuple[Rollout, Rollout]] = list(zip(group.rollouts, before.rollouts, strict=True))
            assert all(((version - now.versions) == (step - 1 - then.versions)).all() for now, then in pairs)
            assert all((now.mu == then.mu).all() for now, then in pairs)
    assert source.next_batch(None) is None
    assert source.buffer.counts.started == 12
    source.rewards.close()


# -- what is traced, and what compare makes of it


def test_a_trace_has_the_log_probability_of_every_token_in_the_order_of_the_recording(
    recorded: Path, replays: Path
) -> None:
    """In the first step the weights are those that sampled: fp32 on both sides is ``mu`` up to rounding."""
    trace, (groups, _) = read_trace(replays / "fp32", 1), read_step(recorded, 1)
    assert trace is not None
    mu = [value for group in groups for rollout in group.rollouts for value in rollout.mu.tolist()]
    assert trace["logprobs"].tolist() == pytest.approx(mu, abs=1e-5)
    rows = metrics(replays / "fp32")[1:]
    for row in rows:
        norms = load_file(replays / "fp32" / "rollouts" / f"trace-{row['step']:06d}.safetensors")["norms"]
        assert norms[0] == row["grad/norm"]
        assert norms[1] > 0


def compared(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert compare([*arguments, "--json"]) == 0
    return {item["arm"]: item for item in json.loads(capsys.readouterr().out)["replays"]}


def declare(folder: Path) -> None:
    for run in folder.iterdir():
        manifest = jsonl.read_json(run / "manifest.json")
        manifest["sweep"] = {"name": "replay", "factors": {"precision": run.name}, "baseline": "precision=fp32"}
        manifest["choices"] = {"precision": run.name}
        jsonl.write_json_atomic(run / "manifest.json", manifest)


def test_compare_says_how_far_replays_are_apart(replays: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declare(replays)
    found = compared(capsys, str(replays))
    assert found.keys() == {"precision=bf16", "precision=fp16"}
    bf16, fp16 = (found[f"precision={name}"]["values"] for name in ("bf16", "fp16"))
    assert all(item["num_steps"] == 4 and item["num_pairs"] == 1 for item in found.values())
    assert bf16["logprob_first"] > 4 * fp16["logprob_first"] > 0
    assert bf16["logprob_max"] >= bf16["logprob_mean"] > 0
    assert bf16["gradient_first"] < fp16["gradient_first"] <= 1.0
    assert bf16["gradient_first"] > 0.9
    assert 0.5 < bf16["norm_ratio"] < 2
    assert compare([str(replays)]) == 0
    text = capsys.readouterr().out
    assert "On the same rollouts, against precision=fp32" in text


def test_an_arm_that_differs_in_nothing_is_equal_in_everything(
    recorded: Path, replays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fp32", "again"):
        assert replay(tmp_path / name, recorded, "trainer.max_steps=2", "probe.every=0").train() is State.done
    declare(tmp_path)
    found = compared(capsys, str(tmp_path))["precision=again"]
    values = found["values"]
    assert (values["logprob_max"], values["norm_ratio"], found["num_steps"]) == (0.0, 1.0, 2)
    assert values["gradient_min"] == pytest.approx(1.0, abs=1e-12)


def test_a_trace_that_is_gone_is_left_out(replays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(replays, tmp_path / "copy")
    declare(tmp_path / "copy")
    (tmp_path / "copy" / "bf16" / "rollouts" / "trace-000002.safetensors").unlink()
    (tmp_path / "copy" / "bf16" / "rollouts" / "trace-000003.safetensors").write_bytes(b"torn")
    assert compared(capsys, str(tmp_path / "copy"))["precision=bf16"]["num_steps"] == 2


def test_a_resumed_recording_says_nothing_of_damage(recorded: Path) -> None:
    assert events(recorded, "warning") == []
