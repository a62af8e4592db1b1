"""Runs and sweeps that are killed, go on where they stopped, and share a folder."""

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import SMALL, Command, Ended, processes, runs, step, wait_for
from small_runs import events, metrics, status

from grpo_exp.config.freeze import config_hash


@dataclass(frozen=True)
class Troubled:
    folder: Path
    interrupted: Ended
    steps_at_interrupt: dict[str, int]
    statuses_at_interrupt: dict[str, dict[str, Any]]
    left_after_kill: float
    statuses_after_kill: dict[str, dict[str, Any]]
    together: tuple[Ended, Ended]


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troubled]:
    """Two runs side by side. One is killed, then the sweep is interrupted; started again, the sweep is killed; then two at once."""
    folder = tmp_path_factory.mktemp("troubled")
    line = (*SMALL[:2], "trainer.max_steps=120", "trainer.eval_every=0", "trainer.save_every=5", "precision=fp32")
    line = ("-m", *line, "seed=0,1", "hydra.launcher.n_jobs=2")
    try:
        yield _trouble(folder, line)
    finally:
        for process in processes(folder):
            process.kill()


def _trouble(folder: Path, line: tuple[str, ...]) -> Troubled:
    sweep = Command(*line, cwd=folder)
    wait_for(lambda: (folder / "runs").is_dir() and len(runs(folder / "runs")) == 2)
    found = runs(folder / "runs")
    wait_for(lambda: all(step(path) >= 7 for path in found.values()))
    os.kill(status(found["seed-0"])["pid"], signal.SIGKILL)
    time.sleep(1.0)
    sweep.process.send_signal(signal.SIGINT)
    interrupted = sweep.end()
    statuses = {name: status(path) for name, path in found.items()}
    steps = {name: metrics(path)[-1]["step"] for name, path in found.items()}  # a killed run's status may be older

    sweep = Command(*line, cwd=folder)
    wait_for(lambda: all(status(p)["state"] == "running" and step(p) > steps[n] + 1 for n, p in found.items()))
    sweep.process.kill()
    sweep.end()
    killed = time.monotonic()
    wait_for(lambda: not processes(folder), limit_s=20)
    left = time.monotonic() - killed
    after_kill = {name: status(path) for name, path in found.items()}

    together = Command(*line, cwd=folder), Command(*line, cwd=folder)
    return Troubled(folder, interrupted, steps, statuses, left, after_kill, (together[0].end(), together[1].end()))


def test_a_run_that_is_killed_is_reported_and_the_other_goes_on(troubled: Troubled) -> None:
    [line] = [line for line in troubled.interrupted.err.splitlines() if "exit code" in line]
    assert re.fullmatch(r"seed-0_\w+: ended with exit code -9", line)
    assert troubled.statuses_at_interrupt["seed-0"]["state"] == "running", "it could not say anything any more"


def test_an_interrupted_sweep_stops_its_runs_with_a_checkpoint_and_exits_with_130(troubled: Troubled) -> None:
    assert troubled.interrupted.code == 130
    assert "SIGINT: 1 runs were stopped, 0 not started; the same command goes on" in troubled.interrupted.err
    one = troubled.statuses_at_interrupt["seed-1"]
    assert (one["state"], one["reason"], one["exit_code"]) == ("preempted", "SIGTERM", 143)
    written = events(runs(troubled.folder / "runs")["seed-1"], "checkpoint")
    assert one["step"] in [event["step"] for event in written]


def test_when_the_sweep_is_killed_no_process_outlives_it(troubled: Troubled) -> None:
    assert troubled.left_after_kill < 15
    assert {one["state"] for one in troubled.statuses_after_kill.values()} == {"preempted"}


def test_the_same_command_resumes_what_was_interrupted(troubled: Troubled) -> None:
    """E14"""
    for name, path in runs(troubled.folder / "runs").items():
        resumed = [event["step"] for event in events(path, "resume")]
        assert len(resumed) == 2, name
        assert resumed[0] <= troubled.steps_at_interrupt[name]
        assert resumed[0] % 5 == 0 if name == "seed-0" else resumed[0] == troubled.steps_at_interrupt[name]
        assert [row["step"] for row in metrics(path)] == list(range(121))


def test_two_sweeps_at_once_run_each_run_once(troubled: Troubled) -> None:
    """Each waits for what the other runs, and both end well."""
    assert [ended.code for ended in troubled.together] == [0, 0], [ended.err for ended in troubled.together]
    for path in runs(troubled.folder / "runs").values():
        assert status(path)["state"] == "done"
    for ended in troubled.together:
        assert "2 runs: 2 done" in ended.out


@pytest.mark.slow
def test_four_runs_and_two_sweeps_started_in_the_same_second_have_a_folder_each(tmp_path: Path) -> None:
    """Each folder has the configuration that its command asked for, and its name is its hash."""
    single = [(*SMALL, f"seed={seed}") for seed in range(4)]
    sweeps = [("-m", *SMALL, "seed=4,5"), ("-m", *SMALL, "seed=0,4", "precision=bf16")]
    started = time.monotonic()
    together = [Command(*line, cwd=tmp_path) for line in (*single, *sweeps)]
    assert time.monotonic() - started < 1
    ended = [command.end() for command in together]
    assert [one.code for one in ended] == [0] * 6, [one.err for one in ended]
    paths = [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]
    configs = {path: yaml.safe_load((path / "config.yaml").read_text()) for path in paths}
    asked = [(seed, None) for seed in range(6)] + [(0, "bf16"), (4, "bf16")]
    found = [(config["seed"], config["precision"]["compute"]) for config in configs.values()]
    assert sorted(found, key=str) == sorted(asked, key=str)
    for path, config in configs.items():
        assert path.name.rpartition("_")[2] == config_hash(config)
        assert [row["step"] for row in metrics(path)] == [0, 1, 2]
        assert status(path)["state"] == "done"
