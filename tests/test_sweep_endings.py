"""A sweep in which an arm fails, is skipped, mended and retried; and sweeps by launchers that are not ours."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from commands import PLUGINS, SMALL, Command, Ended, command, runs, wait_for
from small_runs import status

REWARDS = """
def good(completions, **columns):
    return [float(index % 2) for index, _ in enumerate(completions)]


def bad(completions, **columns):
    raise ZeroDivisionError("no reward today")
"""
EXPERIMENT = "# @package _global_\ntrainer:\n  max_steps: {}\n"
JSONL = ("task=jsonl", "task.path=data/prompts.jsonl", "task.max_completion_tokens=4")


def write_task(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n:03d}>"}) + "\n" for n in range(16))
    )
    (folder / "rewards.py").write_text(REWARDS)


@dataclass(frozen=True)
class Failing:
    folder: Path
    first: Ended
    traceback: str
    again: Ended
    retried: Ended


@dataclass(frozen=True)
class Stock:
    folder: Path
    basic: Ended
    single: Ended
    pickled: Ended


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> tuple[Failing, Stock]:
    """Two scenarios that run one process after the other, at the same time."""
    with ThreadPoolExecutor() as pool:
        failing = pool.submit(_fail, tmp_path_factory.mktemp("failing"))
        stock = pool.submit(_stock, tmp_path_factory.mktemp("stock"))
        return failing.result(), stock.result()


@pytest.fixture(scope="module")
def failing(side_by_side: tuple[Failing, Stock]) -> Failing:
    return side_by_side[0]


@pytest.fixture(scope="module")
def stock(side_by_side: tuple[Failing, Stock]) -> Stock:
    return side_by_side[1]


def _fail(folder: Path) -> Failing:
    write_task(folder)
    mine = folder / "user" / "experiment" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(EXPERIMENT.format(2))
    line = ("-m", "--config-dir", "user", "experiment=mine", "rollout=lockstep", *JSONL, "trainer.eval_every=0")
    line += ("trainer.prompts_per_step=4", "algo.group_size=2", "task.reward=rewards.py:bad,rewards.py:good")
    sweep = Command(*line, cwd=folder)
    wait_for(lambda: (folder / "runs").is_dir() and len(runs(folder / "runs")) == 2)
    mine.write_text(EXPERIMENT.format(3))
    first = sweep.end()
    traceback = status(runs(folder / "runs")["reward-rewards.py-bad"])["traceback"]
    mine.write_text(EXPERIMENT.format(2))
    again = command(*line, cwd=folder)
    mended = REWARDS.replace('raise ZeroDivisionError("no reward today")', "return good(completions)")
    (folder / "rewards.py").write_text(mended)
    return Failing(folder, first, traceback, again, command(*line, "hydra.launcher.retry=failed", cwd=folder))


def test_an_arm_that_fails_leaves_the_others_alone_and_is_listed(failing: Failing) -> None:
    """E2: the failure is in status, log, list and exit code; the comparison is printed all the same."""
    folder, first = failing.folder, failing.first
    assert first.code == 1
    assert "1 of 2 runs did not end well" in first.err
    [line] = [line for line in first.err.splitlines() if "task.reward=rewards.py" in line and "bad" in line]
    assert "reward function 'bad' failed on group" in line
    path = runs(folder / "runs")["reward-rewards.py-bad"]
    assert f"{path}/status.json" in first.err
    assert "ZeroDivisionError: no reward today" in failing.traceback
    assert "no run has eval/accuracy: compared by reward/mean" in first.err
    assert "rewards.py-good" in "".join(line for line in first.err.splitlines() if line.endswith(": done"))
    assert re.search(r"2 runs: 1 done, 1 failed", first.out), first.out


def test_the_frozen_configuration_is_what_runs(failing: Failing) -> None:
    """An edit between submission and start changes nothing."""
    path = runs(failing.folder / "runs")["reward-rewards.py-good"]
    assert status(path)["max_steps"] == 2
    assert yaml.safe_load((path / "config.yaml").read_text())["trainer"]["max_steps"] == 2


def test_what_failed_before_is_skipped_and_still_an_error(failing: Failing) -> None:
    again = failing.again
    assert again.code == 1
    assert sorted(line.partition(": ")[2] for line in again.err.splitlines()[:2]) == ["done already", "failed before"]
    assert "hydra.launcher.retry=failed" in again.err
    assert again.wall_s < 15, "it takes seconds"


def test_what_failed_is_run_again_when_asked(failing: Failing) -> None:
    folder, retried = failing.folder, failing.retried
    assert retried.code == 0, retried.err
    assert "goes on (failed before)" in retried.err
    assert {status(path)["state"] for path in runs(folder / "runs").values()} == {"done"}
    assert status(runs(folder / "runs")["reward-rewards.py-bad"])["traceback"] is None


def test_relative_paths_mean_the_folder_of_the_command(failing: Failing) -> None:
    """E5."""
    folder = failing.folder
    values = yaml.safe_load((runs(folder / "runs")["reward-rewards.py-good"] / "config.yaml").read_text())
    assert values["task"]["path"] == str(folder / "data" / "prompts.jsonl")
    assert values["task"]["reward"] == f"{folder}/rewards.py:good"


def _stock(folder: Path) -> Stock:
    write_task(folder / "start")
    one = (*SMALL, *JSONL, "task.reward=rewards.py:good", "runs_dir=../runs", "trainer.max_steps=1")
    line = ("-m", *one, "seed=0,1")
    basic = command(*line, "hydra/launcher=basic", "hydra.job.chdir=true", cwd=folder / "start")
    single = command(*one, "hydra.job.chdir=true", "hydra.run.dir=../hydra", cwd=folder / "start")
    (folder / "elsewhere").mkdir()
    environment = {"PYTHONPATH": PLUGINS, "ELSEWHERE": str(folder / "elsewhere")}
    return Stock(folder, basic, single, command(*line, "hydra/launcher=pickling", cwd=folder / "start", **environment))


def test_each_job_of_a_stock_launcher_runs_in_a_process_of_its_own(stock: Stock) -> None:
    """E5: also where Hydra changes the folder; nothing is left in that of the command."""
    assert stock.basic.code == 0, stock.basic.err
    found = list((stock.folder / "runs").glob("[!.]*"))
    assert {status(path)["state"] for path in found} == {"done"}
    assert len({status(path)["pid"] for path in found}) == len(found) == 2
    assert set(runs(stock.folder / "runs")) == {"seed-0", "seed-1"}, "each job knows what varies in its sweep"
    for path in found:
        values = yaml.safe_load((path / "config.yaml").read_text())
        assert values["task"]["path"] == str(stock.folder / "start" / "data" / "prompts.jsonl")
    left = {path.name for path in (stock.folder / "start").iterdir()}
    assert left - {"__pycache__"} == {"data", "rewards.py"}


def test_a_single_run_is_the_same_run_wherever_hydra_goes(stock: Stock) -> None:
    """E5."""
    assert stock.single.code == 0, stock.single.err
    assert re.fullmatch(rf"done already: {stock.folder}/runs/seed-0_\w+\n", stock.single.out)


def test_a_job_comes_through_a_pickle_into_another_process_and_folder(stock: Stock) -> None:
    """E4: nothing at module level of the entry point is in the way, and the job finds its run."""
    assert stock.pickled.code == 0, stock.pickled.err
    found = (stock.folder / "runs").glob("[!.]*")
    assert sorted(stock.pickled.out.splitlines()) == sorted(f"done already: {path}" for path in found)
