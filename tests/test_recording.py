"""What is written of a step is what is read, each step once, and what is damaged or does not fit is refused beforehand."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from recordings import write_recording
from small_runs import small_config
from steps import groups

from grpo_exp import jsonl
from grpo_exp.checks import find_problems
from grpo_exp.config.freeze import freeze
from grpo_exp.config.replays import fingerprint, read_index, step_file, vocabulary_of
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.recording import Recording, read_step
from grpo_exp.rollout.types import Group


def same(one: list[Group], other: list[Group]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.serial, a.prompt_ids, a.version) == (b.serial, b.prompt_ids, b.version)
        assert np.array_equal(np.float32(a.rewards), np.float32(b.rewards), equal_nan=True)
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            assert (x.token_ids, x.finished) == (y.token_ids, y.finished)
            assert (x.mu.tobytes(), x.mu.dtype) == (y.mu.tobytes(), y.mu.dtype)
            assert np.array_equal(x.versions, y.versions)


def test_groups_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Rewards that are missing and completions of different lengths too; ``mu`` bit for bit."""
    written = groups(num_groups=3, size=5)
    written[1].rewards[2] = float("nan")
    recording = Recording(tmp_path, {"format": 1}, None)
    recording.write(1, 0, written, [5, 6, 7])
    recording.close()
    read, rows = read_step(tmp_path, 1)
    same(written, read)
    assert rows == [5, 6, 7]


def test_after_an_interruption_every_step_is_there_once(tmp_path: Path) -> None:
    """Later steps are cut back to the checkpoint and written anew, also a file that was never finished."""
    whole, broken = write_recording(tmp_path / "whole", 4), write_recording(tmp_path / "broken", 3)
    torn = broken / "rollouts" / f".{step_file(4)}.1.1.tmp"
    torn.write_bytes(b"half")
    with (broken / "rollouts" / "steps.jsonl").open("a") as index:
        index.write('{"step": 4, "ver')
    write_recording(broken, 4, after_step=1)
    assert not torn.exists()
    files = {path.name: path.read_bytes() for path in (whole / "rollouts").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (broken / "rollouts").iterdir()}
    assert [row["step"] for row in read_index(broken)] == [1, 2, 3, 4]


def test_a_run_that_begins_anew_records_anew(tmp_path: Path) -> None:
    write_recording(tmp_path, 4)
    write_recording(tmp_path, 2)
    assert [row["step"] for row in read_index(tmp_path)] == [1, 2]
    assert not (tmp_path / "rollouts" / step_file(3)).exists()


def problems(*overrides: str) -> list[str]:
    return [
        str(problem) for problem in find_problems(small_config("rollout=replay", "trainer.max_steps=3", *overrides))
    ]


def from_(run: Path) -> str:
    return f"rollout.replay_from={run}"


def test_a_recording_that_fits_is_not_refused(tmp_path: Path) -> None:
    assert problems(from_(write_recording(tmp_path))) == []


REFUSED = {
    "trainer.prompts_per_step=5": "trainer.prompts_per_step=5: allowed: 4 (as recorded in",
    "algo.group_size=8": "algo.group_size=8: allowed: 4 (as recorded in",
    "rollout.temperature=0.5": "rollout.temperature=0.5: allowed: 1.0 (as recorded in",
    "trainer.max_steps=4": "trainer.max_steps=4: allowed: 1 to 3 (so many steps were recorded in",
    "rollout.record=true": "rollout.record=true: allowed: false",
    "rollout.num_workers=1": "rollout.num_workers=1: allowed: 0",
    "rollout.max_staleness=0": "rollout.max_staleness=0: allowed: null",
    "trainer.max_epochs=1": "trainer.max_epochs=1: allowed: null",
    "correction=beta_removal": "correction.proximal='beta_removal': allowed: rollout, recompute, interpolate",
    "algo=dr_grpo": "task.max_completion_tokens=8: allowed: 256 (as recorded in",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_does_not_go_with_a_recording_is_refused(tmp_path: Path, override: str) -> None:
    about = {"task__max_completion_tokens": 256}
    [found] = problems(from_(write_recording(tmp_path, **about)), "task.max_completion_tokens=8", override)
    assert found.startswith(REFUSED[override])


def test_interpolation_goes_by_the_recorded_staleness(tmp_path: Path) -> None:
    interpolate = ("correction=decoupled", "correction.proximal=interpolate")
    assert problems(from_(write_recording(tmp_path / "stale", rollout__max_staleness=2)), *interpolate) == []
    [found] = problems(from_(write_recording(tmp_path / "fresh", rollout__max_staleness=1)), *interpolate)
    assert found.startswith("correction.proximal='interpolate': allowed: rollout")


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "step-000002.safetensors is not the file": lambda folder: flip(folder / step_file(2)),
    "step-000003.safetensors is not the file": lambda folder: (folder / step_file(3)).write_bytes(b"short"),
    "step-000001.safetensors: No such file": lambda folder: (folder / step_file(1)).unlink(),
    "steps.jsonl has no step 2": lambda folder: jsonl.replace_rows(
        folder / "steps.jsonl", [row for row in jsonl.read(folder / "steps.jsonl") if row["step"] != 2]
    ),
    "no step was recorded": lambda folder: (folder / "steps.jsonl").unlink(),
    "steps.jsonl:1: not a JSON object": lambda folder: (folder / "steps.jsonl").write_text("[]\n[]\n"),
    "recording.json: it cannot be read": lambda folder: (folder / "recording.json").write_text("{"),
    "recording.json: format 2": lambda folder: (folder / "recording.json").write_text('{"format": 2}'),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_recording_is_refused_before_anything_is_built(tmp_path: Path, words: str) -> None:
    DAMAGE[words](write_recording(tmp_path) / "rollouts")
    [found] = problems(from_(tmp_path))
    assert found.startswith("rollout.replay_from=")
    assert words in found


def test_a_step_beyond_those_that_are_replayed_may_be_damaged(tmp_path: Path) -> None:
    flip(write_recording(tmp_path) / "rollouts" / step_file(3))
    assert problems(from_(tmp_path), "trainer.max_steps=2") == []


def test_a_file_that_is_damaged_later_ends_the_run_with_its_name(tmp_path: Path) -> None:
    file = write_recording(tmp_path) / "rollouts" / step_file(2)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RunFailed, match=r"step-000002\.safetensors cannot be replayed"):
        read_step(tmp_path, 2)


def test_a_recording_is_named_by_its_run_or_by_a_folder_of_runs_and_the_seed(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_recording(tmp_path / f"run-{seed}", seed=seed)
    assert problems(from_(tmp_path), "seed=1") == []
    config = small_config("rollout=replay", from_(tmp_path), "seed=1", "trainer.max_steps=3")
    assert freeze(config).values["rollout"]["replay_from"] == str((tmp_path / "run-1").resolve())
    [found] = problems(from_(tmp_path), "seed=2")
    assert "none of the 2 runs in it recorded with seed=2" in found
    write_recording(tmp_path / "again", seed=1)
    [found] = problems(from_(tmp_path), "seed=1")
    assert "2 of the 3 runs in it recorded with seed=1" in found


def test_no_recording_at_all_is_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "nope", "no such folder"), (tmp_path, "nothing was recorded there")):
        [found] = problems(from_(path))
        assert words in found
    [found] = [str(problem) for problem in find_problems(small_config("rollout=hf", from_(tmp_path)))]
    assert "rollout=replay replays" in found
    with pytest.raises(ConfigError, match="no such folder"):
        freeze(small_config("rollout=replay", from_(tmp_path / "nope")))


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    run = write_recording(tmp_path, vocabulary_file="another")
    [found] = problems(from_(run))
    assert found.startswith("model.name_or_path='asset:tiny': allowed: a model with the vocabulary of the recording")


def test_a_vocabulary_is_known_by_its_tokens_and_their_ids() -> None:
    assert vocabulary_of("asset:tiny") is not None
    assert vocabulary_of("some/name-of-a-hub") is None
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0}) != fingerprint({"a": 1, "b": 0})


SCRIPT = """
import sys
from grpo_exp.checks import find_problems
from grpo_exp.config.compose import compose, to_typed
given = ["debug=smoke", "rollout=replay", f"rollout.replay_from={sys.argv[1]}", "trainer.max_steps=3"]
print(find_problems(to_typed(compose(given).config)), *({"torch", "transformers", "safetensors"} & set(sys.modules)))
"""


def test_a_recording_is_checked_without_torch(tmp_path: Path) -> None:
    run = write_recording(tmp_path)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
