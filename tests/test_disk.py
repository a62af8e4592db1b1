"""A disk that is full and folders that cannot be written to: said in a line, with nothing half-made in the way."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from commands import PROGRAM, SMALL, Ended, command
from small_runs import small_trainer, status

from grpo_exp.errors import RunFailed
from grpo_exp.run import IN_USE


def with_room_for(kilobytes: int, *arguments: str, cwd: Path) -> Ended:
    """A command none of whose files may become larger: what it is told is what a full disk tells it."""
    script = f"ulimit -f {kilobytes}; exec {shlex.join([PROGRAM, *arguments])}"
    done = subprocess.run(["bash", "-c", script], cwd=cwd, capture_output=True, text=True, timeout=120)
    return Ended(done.returncode, done.stdout, done.stderr, 0.0)


def test_a_run_that_cannot_even_be_prepared_is_a_user_error(tmp_path: Path) -> None:
    for arguments in (SMALL, ("-m", *SMALL, "seed=0,1")):
        ended = with_room_for(0, *arguments, cwd=tmp_path)
        assert (ended.code, ended.out) == (2, "")
        [line] = ended.err.splitlines()
        assert line.startswith(f"error: runs_dir='{tmp_path}/runs': File too large")


def test_a_checkpoint_for_which_there_is_no_room_ends_the_run_and_leaves_no_half(tmp_path: Path) -> None:
    # bf16 weights on the wire: the moments of AdamW are the only file that is larger than this
    small = (*SMALL, "precision=bf16", "trainer.save_every=1")
    ended = with_room_for(800, *small, cwd=tmp_path)
    assert ended.code == 1
    (run,) = (tmp_path / "runs").glob("run_*")
    step = run / "checkpoints" / "step-000001"
    assert f"error: {step} could not be written: " in ended.err
    assert list((run / "checkpoints").iterdir()) == []
    assert status(run)["state"] == "failed"
    again = command(*small, cwd=tmp_path)
    assert again.code == 0, again.err


def test_a_status_that_cannot_be_written_is_told_with_the_traceback(tmp_path: Path) -> None:
    """As where the disk of the runs is gone while one is going on."""
    source = "import shutil\n\ndef bad(completions, **columns):\n    shutil.rmtree('runs')\n    raise ValueError('no runs')\n"
    (tmp_path / "rewards.py").write_text(source)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab>"}\n' * 8)
    task = ("task=jsonl", "task.path=prompts.jsonl", "task.reward=rewards.py:bad", "task.max_completion_tokens=4")
    ended = command(*SMALL, *task, cwd=tmp_path)
    assert ended.code == 1
    assert "status.json could not be written: No such file or directory" in ended.err
    assert "ValueError: no runs" in ended.err


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    (tmp_path / "lock").mkdir()
    ended = command("resume", str(tmp_path), cwd=tmp_path)
    assert (ended.code, ended.err) == (2, f"error: {tmp_path} cannot be written to: Is a directory\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_run_of_another_user_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    for name in ("logs", "checkpoints"):
        (tmp_path / name).mkdir()
    tmp_path.chmod(0o555)
    ended = command("resume", str(tmp_path), cwd=tmp_path.parent)
    tmp_path.chmod(0o755)
    assert (ended.code, ended.err) == (2, f"error: {tmp_path} cannot be written to: Permission denied\n")


def test_of_two_runs_in_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    first = small_trainer(tmp_path, "rollout=lockstep")
    first.folder.lock()
    with pytest.raises(RunFailed, match="in use by a run that is going on"):
        small_trainer(tmp_path, "rollout=lockstep").train()
    (tmp_path / "config.yaml").touch()
    assert command("resume", str(tmp_path), cwd=tmp_path).code == IN_USE
    first.folder.close()
