"""A real Slurm on this machine: sweeps through sbatch arrays, and all that happens to jobs of a cluster."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import SMALL, Command, Ended, command, runs, step, wait_for
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
    line = ("-m", *LONG, "precision=fp32", "seed=0", "trainer.max_steps=null", "trainer.max_minutes=0.6", *SLURM)
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


def test_a_run_that_takes_too_much_memory_is_explained_and_goes_on_with_more(cluster: None, tmp_path: Path) -> None:
    line = ("-m", *LONG, "precision=fp32", "seed=0", *SLURM)
    ended = command(*line, "hydra.launcher.mem=250M", cwd=tmp_path)
    assert ended.code == 1
    [path] = runs(tmp_path / "runs").values()
    assert state(path) in ("OUT_OF_MEMORY", "FAILED")  # the latter where Slurm has no cgroups to count in
    [shown] = grid(tmp_path).values()
    assert shown["state"] in ("crashed", "preempted", "created")
    ended = command(*line, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert [row["step"] for row in metrics(path)] == list(range(STEPS + 1))


def test_a_controller_that_is_restarted_is_waited_for(cluster: None, tmp_path: Path) -> None:
    waiting = Command("-m", *LONG, "precision=fp32", "seed=0,1", *SLURM, "hydra.launcher.n_jobs=1", cwd=tmp_path)
    wait_for(
        lambda: (tmp_path / "runs").is_dir() and any(step(path) > 6 for path in runs(tmp_path / "runs").values()), 180
    )
    controller = int((Path(os.environ["SLURM_CONF"]).parents[1] / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGKILL)
    time.sleep(3)  # some looks at the queue get no answer
    subprocess.run(["slurmctld"], check=True)
    ended = waiting.end()
    assert ended.code == 0, ended.err
    for path in runs(tmp_path / "runs").values():
        assert (status(path)["state"], state(path)) == ("done", "COMPLETED")
        assert [row["step"] for row in metrics(path)] == list(range(STEPS + 1))


def test_ranks_of_a_run_are_tasks_of_its_job_and_go_on_after_a_requeue(cluster: None, tmp_path: Path) -> None:
    ranks = ("distributed=fsdp2", "hydra.launcher.ranks_per_node=2", "probe.every=0")
    line = ("-m", *LONG, "precision=fp32", "seed=0", *SLURM, *ranks)
    assert command(*line, "hydra.launcher.wait=false", cwd=tmp_path).code == 0
    [path] = runs(tmp_path / "runs").values()
    wait_for(lambda: step(path) > 6, 180)
    slurm("scancel", "--signal=USR2", "--batch", job(path))
    ended = command(*line, cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert (status(path)["state"], state(path)) == ("done", "COMPLETED")
    assert "Restarts=1" in slurm("scontrol", "show", "job", job(path))
    assert [row["step"] for row in metrics(path)] == list(range(STEPS + 1))
    found = json.loads((path / "manifest.json").read_text())["precision"]["observed"]["first_step"]
    assert (found["num_ranks"], found["wrapper"]) == ("2", "fsdp2")


def test_a_rank_that_is_killed_ends_the_job_and_the_same_command_goes_on(cluster: None, tmp_path: Path) -> None:
    ranks = ("distributed=ddp", "hydra.launcher.ranks_per_node=2")
    line = ("-m", *LONG, "precision=fp32", "seed=0", *SLURM, *ranks)
    assert command(*line, "hydra.launcher.wait=false", cwd=tmp_path).code == 0
    [path] = runs(tmp_path / "runs").values()
    wait_for(lambda: step(path) > 6, 180)
    os.kill(_other_rank(path), signal.SIGKILL)
    wait_for(lambda: state(path) not in ("RUNNING", "COMPLETING"), 90)
    assert state(path) in ("FAILED", "CANCELLED")
    assert status(path)["state"] in ("failed", "preempted")
    ended = command(*line, "hydra.launcher.retry=failed", cwd=tmp_path)
    assert ended.code == 0, ended.err
    steps = [row["step"] for row in metrics(path)]
    assert steps == list(range(STEPS + 1))


def _other_rank(path: Path) -> int:
    """The process of rank 1 of a run."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment = process.info["environ"] or {}
        words = process.info["cmdline"] or ()
        if "grpo_exp.run" in words and str(path) in words and environment.get("RANK") == "1":
            return int(process.pid)
    raise AssertionError("no rank 1")
