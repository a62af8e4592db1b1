"""What lies in the folder of a command: a reward module is found there, and nothing else is taken from it."""

from pathlib import Path

import pytest
from commands import SMALL, Ended, command, runs
from small_runs import events, metrics, status

from grpo_exp.folder import RunFolder, State

REWARDS = """
from helpers import share

def reward(completions, **columns):
    return [share(text) for text in completions]
"""
HELPERS = "def share(text):\n    return len(set(text)) / 8\n"
ONE = ("debug=smoke", "trainer.max_steps=1", "trainer.eval_every=0")
MINE = ("task=jsonl", "task.path=prompts.jsonl", "task.max_completion_tokens=4", "task.reward=rewards:reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With blanks and letters beyond ASCII in its name, and modules that are called as those of Python and ours are."""
    path = tmp_path_factory.mktemp("meine Läufe 実験")
    for name in ("random", "torch", "datasets", "tokens", "yaml"):
        (path / f"{name}.py").write_text("raise RuntimeError('taken from the folder of the command')\n")
    (path / "rewards.py").write_text(REWARDS)
    (path / "helpers.py").write_text(HELPERS)
    (path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{letter}é>"}}\n' for letter in "abcdefgh"))
    return path


@pytest.fixture(scope="module")
def single(folder: Path) -> tuple[Ended, Path]:
    ended = command(*ONE, *MINE, cwd=folder)
    (run,) = runs(folder / "runs").values()
    return ended, run


def test_a_single_run_takes_the_reward_from_the_folder_and_nothing_else(single: tuple[Ended, Path]) -> None:
    ended, run = single
    assert ended.code == 0, ended.err
    assert [row["step"] for row in metrics(run)] == [1]


def test_a_sweep_finds_the_same(folder: Path, single: tuple[Ended, Path]) -> None:
    ended = command("-m", *SMALL, *MINE, "trainer.max_steps=1", "seed=7,", cwd=folder)
    assert ended.code == 2, "a comma too many is no sweep"
    ended = command("-m", *SMALL, *MINE, "trainer.max_steps=1", "seed=7", "runs_dir=swept", cwd=folder)
    assert ended.code == 0, ended.err


def test_a_resume_finds_it_from_anywhere_and_says_that_there_is_no_checkpoint(
    single: tuple[Ended, Path], tmp_path: Path
) -> None:
    """E14: a run without a usable checkpoint says so when it starts anew."""
    _, run = single
    for path in (run / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    RunFolder(run).update(state=State.preempted)
    ended = command("resume", str(run), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert (
        f"no checkpoint is left in {run}/checkpoints: the run starts again from step 0 (it had reached 1)" in ended.err
    )
    assert [event["lost_steps"] for event in events(run, "restart")] == [1]
    assert (status(run)["state"], [row["step"] for row in metrics(run)]) == ("done", [1])
