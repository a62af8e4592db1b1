"""A real Slurm on this machine: sweeps through sbatch arrays, and all that happens to jobs of a cluster."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commands import SMALL, Ended, command, runs, step, wait_for
from small_runs import events, metrics, status

from grpo_exp.launch.freeze_code import copy_code

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "slurm"
SKIP = 77
SLURM = ("hydra/launcher=slurm", "hydra.launcher.poll_s=0.5", "hydra.launcher.grace_s=30")
STEPS = 80
LONG = ("debug=smoke", "rollout=lockstep", "trainer.eval_every=0", "trainer.save_every=5", f"trainer.max_steps={STEPS}")
REWARDS = "def bad(completions, **columns):\n    raise ZeroDivisionError('no reward today')\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Started for this module, and found by every command through SLURM_CONF."""
    folder = tmp_path_factory.mktemp("slurm")
    for parent in folder.parents[:2]:
        parent.chmod(0o755)  # munged is another user
    folder.chmod(0o755)
    done = subprocess.run([SCRIPTS / "start.sh", folder, "6"], capture_output=True, text=True)
    if done.returncode == SKIP:
        pytest.skip(done.stdout.strip())
    os.environ["SLURM_CONF"] = str(folder / "etc" / "slurm.conf")
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        yield
    finally:
        subprocess.run([SCRIPTS / "stop.sh", folder], check=True)
        del os.environ["SLURM_CONF"]


def slurm(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def job(run: Path) -> str:
    return str(json.loads((run / "slurm.json").read_text())["job"])


def state(run: Path) -> str:
    """Slurm's word for the last job of a run."""
    return slurm("squeue", "-h", "-t", "all", "-r", "-j", job(run), "-o", "%T")


def grid(folder: Path) -> dict[str, dict[str, Any]]:
    """What ``grpo-exp status`` says, by run."""
    lines = json.loads(command("status", "--json", "runs", cwd=folder).out)
    return {Path(line["path"]).name.rpartition("_")[0]: line for line in lines}


@dataclass(frozen=True)
class Sweep:
    folder: Path
    first: Ended
    again: Ended
    more: Ended
    jobs: dict[str, str]


@pytest.fixture(scope="module")
def sweep(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    folder = tmp_path_factory.mktemp("sweep")
    line = ("-m", "+sweeps=precision", *SMALL, *SLURM, "hydra.launcher.n_jobs=2")
    first = command(*line, "seed=0,1", cwd=folder)
    jobs = {name: job(path) for name, path in runs(folder / "runs" / "precision").items()}
    again = command(*line, "seed=0,1", cwd=folder)
    more = command(*line, "seed=0,1,2", cwd=folder)
    return Sweep(folder, first, again, more, jobs)


def test_the_precision_sweep_runs_as_an_array_and_ends_with_its_comparison(sweep: Sweep) -> None:
    assert sweep.first.code == 0, sweep.first.err
    assert "submitted 8 runs as job" in sweep.first.err
    assert "8 runs: 8 done" in sweep.first.out
    assert "minus the baseline precision=fp32" in sweep.first.out
    assert len({number.partition("_")[0] for number in sweep.jobs.values()}) == 1
    for path in runs(sweep.folder / "runs" / "precision").values():
        assert (status(path)["state"], state(path)) == ("done", "COMPLETED")
        assert [row["step"] for row in metrics(path)] == [0, 1, 2]


def test_a_finished_sweep_submits_nothing(sweep: Sweep) -> None:
    assert sweep.again.code == 0
    assert "submitted" not in sweep.again.err
    assert sweep.again.wall_s < 10, "3 s on a machine that is not busy"


def test_one_seed_more_submits_only_the_new_runs(sweep: Sweep) -> None:
    assert sweep.more.code == 0, sweep.more.err
    assert "submitted 4 runs as job" in sweep.more.err
    assert "12 runs: 12 done" in sweep.more.out
    found = runs(sweep.folder / "runs" / "precision")
    assert {name: job(path) for name, path in found.items() if name in sweep.jobs} == sweep.jobs


@dataclass(frozen=True)
class Troubles:
    folder: Path
    submitted: Ended
    states: dict[str, str]  # Slurm's, after the first part
    shown: dict[str, dict[str, Any]]  # ours
    again: Ended


@pytest.fixture(scope="module")
def troubles(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Troubles:
    """Seeds 0 to 3: killed, requeued, cancelled, and told of a coming limit; each in the middle of its steps."""
    folder = tmp_path_factory.mktemp("troubles")
    line = ("-m", *LONG, "precision=fp32", "seed=0,1,2,3", *SLURM)
    submitted = command(*line, "hydra.launcher.wait=false", cwd=folder)
    assert submitted.code == 0, submitted.err
    killed, requeued, cancelled, warned = (runs(folder / "runs")[f"seed-{seed}"] for seed in range(4))
    wait_for(lambda: step(killed) > 6, 180)
    os.kill(status(killed)["pid"], signal.SIGKILL)
    wait_for(lambda: step(requeued) > 6, 180)
    slurm("scontrol", "requeue", job(requeued))
    wait_for(lambda: step(cancelled) > 6, 180)
    assert command("cancel", str(cancelled), cwd=folder).code == 0
    wait_for(lambda: step(warned) > 6, 180)
    slurm("scancel", "--signal=USR2", "--batch", job(warned))
    wait_for(lambda: all(state(run) not in ("RUNNING", "COMPLETING") for run in (killed, cancelled)), 60)
    names = {"killed": killed, "cancelled": cancelled}
    states, shown = {name: state(run) for name, run in names.items()}, grid(folder)
    return Troubles(folder, submitted, states, shown, command(*line, cwd=folder))


def test_slurm_and_the_run_folder_agree_on_a_run_that_was_killed(troubles: Troubles) -> None:
    assert troubles.states["killed"] == "FAILED"
    assert troubles.shown["seed-0"]["state"] == "crashed"


def test_a_cancelled_run_has_saved_a_checkpoint(troubles: Troubles) -> None:
    assert troubles.states["cancelled"] == "CANCELLED"
    assert troubles.shown["seed-2"]["state"] == "preempted"
    assert troubles.shown["seed-2"]["reason"] == "SIGTERM"


def test_every_run_of_a_troubled_sweep_ends_with_each_step_once(troubles: Troubles) -> None:
    assert troubles.again.code == 0, troubles.again.err
    for name, path in runs(troubles.folder / "runs").items():
        assert (status(path)["state"], state(path)) == ("done", "COMPLETED")
        assert [row["step"] for row in metrics(path)] == list(range(STEPS + 1)), name
        assert len(events(path, "resume")) >= 1, name


def test_what_was_interrupted_by_slurm_itself_goes_on_as_the_same_job(troubles: Troubles) -> None:
    for seed in (1, 3):
        path = runs(troubles.folder / "runs")[f"seed-{seed}"]
        shown = slurm("scontrol", "show", "job", job(path))
        assert "Restarts=1" in shown
        saved = [event["step"] for event in events(path, "checkpoint")]
        assert events(path, "resume")[0]["step"] in saved


def test_a_failing_arm_is_failed_for_slurm_too_and_the_others_end(cluster: None, tmp_path: Path) -> None:
    """E2."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab>"}\n' * 8)
    (tmp_path / "my" / "experiment").mkdir(parents=True)
    good = "# @package _global_\nseed: 0\n"
    bad = (
        "# @package _global_\ndefaults:\n  - override /task: jsonl\n"
        "task:\n  path: prompts.jsonl\n  reward: rewards.py:bad\n  max_completion_tokens: 4\n"
    )
    for name, text in {"good": good, "bad": bad}.items():
        (tmp_path / "my" / "experiment" / f"{name}.yaml").write_text(text)
    line = ("--config-dir", str(tmp_path / "my"), "-m", *SMALL, *SLURM, "experiment=bad,good", "task.num_eval=0")
    ended = command(*line, cwd=tmp_path)
    assert ended.code == 1
    assert "1 of 2 runs did not end well" in ended.err
    found = runs(tmp_path / "runs")
    assert {name: (status(path)["state"], state(path)) for name, path in found.items()} == {
        "experiment-bad": ("failed", "FAILED"),
        "experiment-good": ("done", "COMPLETED"),
    }
    assert "no reward today" in status(found["experiment-bad"])["traceback"]


def test_a_time_limit_comes_with_a_checkpoint_and_the_job_goes_on(cluster: None, tmp_path: Path) -> None:
    """E14."""
    line = ("-m", *LONG, "precision=fp32", "seed=0", "trainer.max_steps=null", "trainer.max_minutes=0.2", *SLURM)
    ended = command(*line, "hydra.launcher.time=1", cwd=tmp_path)
    assert ended.code == 0, ended.err
    [path] = runs(tmp_path / "runs").values()
    assert (status(path)["state"], state(path)) == ("done", "COMPLETED")
    assert events(path, "resume")
    steps = [row["step"] for row in metrics(path)]
    assert steps == list(range(len(steps)))


def test_a_partition_of_higher_priority_takes_the_place_and_gives_it_back(cluster: None, tmp_path: Path) -> None:
    line = ("-m", *LONG, "precision=fp32", "seed=0", *SLURM, "hydra.launcher.cpus=6")
    assert command(*line, "hydra.launcher.wait=false", cwd=tmp_path).code == 0
    [path] = runs(tmp_path / "runs").values()
    wait_for(lambda: step(path) > 6, 180)
    slurm("sbatch", "--partition=high", "--cpus-per-task=6", "--output=/dev/null", "--wrap=sleep 1")
    ended = command(*line, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "Restarts=1" in slurm("scontrol", "show", "job", job(path))
    assert [row["step"] for row in metrics(path)] == list(range(STEPS + 1))


def test_edits_after_submission_change_no_job(cluster: None, tmp_path: Path) -> None:
    """Neither of a YAML file nor of the source: the submission is what runs."""
    copy_code(tmp_path / "checkout")
    (tmp_path / "my" / "experiment").mkdir(parents=True)
    wanted = tmp_path / "my" / "experiment" / "wanted.yaml"
    wanted.write_text("# @package _global_\nseed: 7\n")
    line = ("--config-dir", str(tmp_path / "my"), "-m", *SMALL, "experiment=wanted", *SLURM, "precision=fp32")
    held = ("hydra.launcher.wait=false", "hydra.launcher.extra=[--hold]")
    ended = command(*line, *held, cwd=tmp_path, PYTHONPATH=str(tmp_path / "checkout"))
    assert ended.code == 0, ended.err
    [path] = runs(tmp_path / "runs").values()
    assert grid(tmp_path)[path.name.rpartition("_")[0]]["state"] == "queued"
    wanted.write_text("# @package _global_\nseed: 8\n")
    for name in ("run.py", "trainer.py"):
        (tmp_path / "checkout" / "grpo_exp" / name).write_text("raise SystemExit('edited')\n")
    slurm("scontrol", "release", job(path))
    wait_for(lambda: status(path)["state"] == "done", 180)
    assert "seed: 7" in (path / "config.yaml").read_text()
