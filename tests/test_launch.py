"""Sweeps on this machine: one process per run, frozen configs, every kind of end, and going on where it stopped.

Runs are real and as small as they can be; each scenario is played once and looked at by several tests.
"""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rich.console import Console
from run_folders import write_run
from small_runs import events, metrics, repeatable, small_trainer, status

from grpo_exp.config.compose import compose
from grpo_exp.errors import ConfigError
from grpo_exp.folder import RunFolder
from grpo_exp.launch import local
from grpo_exp.launch.board import Board
from grpo_exp.launch.ending import reason
from grpo_exp.launch.prepare import Action, Planned, check_all, decide, prepare_all

PROGRAM = str(Path(sys.executable).with_name("grpo-exp"))
SMALL = ("debug=smoke", "rollout=lockstep", "trainer.max_steps=2", "trainer.eval_every=0", "trainer.save_every=0")
PATIENCE_S = 90.0  # for what takes seconds on a machine that is not busy


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    wall_s: float


class Command:
    """A command line that goes on while the test looks."""

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
        self.start = time.monotonic()
        self.process = subprocess.Popen(
            [PROGRAM, *arguments],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def end(self) -> Ended:
        out, err = self.process.communicate(timeout=PATIENCE_S * 2)
        return Ended(self.process.returncode, out, err, time.monotonic() - self.start)


def command(*arguments: str, cwd: Path, **environment: str) -> Ended:
    return Command(*arguments, cwd=cwd, **environment).end()


def runs(folder: Path) -> dict[str, Path]:
    """Run folders by the part of their names that says what varied."""
    return {path.name.rpartition("_")[0]: path for path in sorted(folder.iterdir()) if not path.name.startswith(".")}


def wait_for(what: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def step(path: Path) -> int:
    return int(status(path)["step"]) if (path / "status.json").is_file() else 0


def processes(folder: Path) -> list[psutil.Process]:
    """Runs below a folder, whoever started them, with their children."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (
            any(str(folder) in part for part in process.info["cmdline"] or ())
            and "grpo_exp.run" in process.info["cmdline"]
        ):
            found += [process, *process.children(recursive=True)]
    return found


# -- a sweep of two precisions and two seeds, again, with a seed more, in the other order, and each arm alone


@dataclass(frozen=True)
class Story:
    folder: Path
    first: Ended
    again: Ended
    more: Ended
    other_order: Ended
    in_a_terminal: tuple[int, str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    sweep = ("-m", *SMALL, "precision=fp32,bf16", "hydra.launcher.n_jobs=2", "sweep.baseline='precision=fp32'")
    first = command(*sweep, "seed=0,1", cwd=folder)
    again = command(*sweep, "seed=0,1", cwd=folder)
    more = Command(*SMALL, "-m", "precision=fp32", "seed=0,1,2", cwd=folder)
    other = Command(*SMALL, "-m", "precision=bf16,fp32", "seed=0", "runs_dir=other", cwd=folder)
    ended = more.end(), other.end()
    alone = in_a_terminal([PROGRAM, *SMALL, "precision=fp32", "seed=0", "runs_dir=alone_fp32"], folder)
    small_trainer(folder / "alone_bf16" / "by_the_library", *SMALL[1:], "precision=bf16", "seed=0").train()
    return Story(folder, first, again, *ended, alone)


def test_every_run_of_a_sweep_has_a_process_and_a_folder_of_its_own(story: Story) -> None:
    """F12: the name says what varied."""
    assert story.first.code == 0, story.first.err
    found = runs(story.folder / "runs")
    assert set(found) - {"seed-2"} == {f"precision-{p}_seed-{s}" for p in ("fp32", "bf16") for s in (0, 1)}
    statuses = [status(path) for path in found.values()]
    assert {one["state"] for one in statuses} == {"done"}
    assert len({one["pid"] for one in statuses}) == len(found)
    for path in found.values():
        assert [row["step"] for row in metrics(path)] == [0, 1, 2]


def test_two_runs_go_on_at_a_time(story: Story) -> None:
    words = [line.partition(": ")[2] for line in story.first.err.splitlines()]
    assert words[:2] == ["started", "started"]
    assert sorted(words) == ["done"] * 4 + ["started"] * 4
    at_once = [words[:n].count("started") - words[:n].count("done") for n in range(len(words) + 1)]
    assert max(at_once) == 2


def test_the_manifest_knows_sweep_factors_choices_and_overrides(story: Story) -> None:
    """F12."""
    path = runs(story.folder / "runs")["precision-bf16_seed-1"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["sweep"]["factors"] == {"precision": "bf16", "seed": "1"}
    assert manifest["sweep"]["baseline"] == "precision=fp32"
    assert manifest["choices"]["precision"] == "bf16"
    assert "precision=bf16" in manifest["overrides"]
    assert manifest["run"]["config_hash"] == path.name.rpartition("_")[2]
    assert manifest["precision"]["observed"]["first_step"]["compute"] == "bf16"


def test_a_sweep_ends_with_the_comparison_on_standard_output(story: Story) -> None:
    assert "4 runs: 4 done" in story.first.out
    assert "precision=bf16" in story.first.out
    assert "minus the baseline precision=fp32" in story.first.out
    assert "Confound check\n  ok" in story.first.out


def test_the_same_command_again_skips_what_is_done_and_says_so(story: Story) -> None:
    assert story.again.code == 0
    assert [line.partition(": ")[2] for line in story.again.err.splitlines()] == ["done already"] * 4
    assert "4 runs: 4 done" in story.again.out
    assert story.again.wall_s < 15, "it takes seconds"


def test_one_seed_more_is_one_run_more(story: Story) -> None:
    assert story.more.code == 0, story.more.err
    words = [line.partition(": ")[2] for line in story.more.err.splitlines()]
    assert words == ["done already", "done already", "started", "done"]
    assert "3 runs: 3 done" in story.more.out


def test_neither_the_order_nor_the_company_of_an_arm_changes_its_metrics(story: Story) -> None:
    """E16: in lockstep, the same to the last bit, times and memory aside. One arm alone is run by the library."""
    assert story.other_order.code == 0, story.other_order.err
    for name in ("fp32", "bf16"):
        rows = [
            repeatable(metrics(runs(story.folder / "runs")[f"precision-{name}_seed-0"])),
            repeatable(metrics(runs(story.folder / "other")[f"precision-{name}"])),
            *(repeatable(metrics(path)) for path in (story.folder / f"alone_{name}").glob("[!.]*")),
        ]
        assert [len(row) for row in rows] == [3, 3, 3]
        assert rows[1:] == [rows[0], rows[0]]
    hashes = {path.name.rpartition("_")[2] for path in story.folder.glob("*/precision-fp32_seed-0_*")}
    assert {path.name.rpartition("_")[2] for path in story.folder.glob("alone_fp32/run_*")} == hashes


def test_arms_and_seeds_do_differ(story: Story) -> None:
    found = runs(story.folder / "runs")
    rows = {name: repeatable(metrics(path)) for name, path in found.items()}
    names = sorted(rows)
    assert all(rows[a] != rows[b] for a, b in pairwise(names))


def test_a_single_run_in_a_terminal_shows_a_live_bar_and_its_folder(story: Story) -> None:
    code, shown = story.in_a_terminal
    assert code == 0
    assert "run folder: " in shown
    assert "2/2" in shown
    assert "2 steps: eval/accuracy" in shown


def test_nothing_is_left_beside_the_run_folders(story: Story) -> None:
    """E5."""
    assert {path.name for path in story.folder.iterdir()} == {"runs", "other", "alone_fp32", "alone_bf16"}
    for name in ("runs", "other"):
        assert {path.name for path in (story.folder / name).iterdir() if path.name.startswith(".")} == {".lock"}


def test_no_placeholder_is_left_in_a_frozen_configuration(story: Story) -> None:
    """E13."""
    text = (runs(story.folder / "runs")["precision-fp32_seed-0"] / "config.yaml").read_text()
    assert "${" not in text
    assert "???" not in text


# -- one arm fails, is skipped, is mended and retried; and a config file is edited in the meantime

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


# -- runs and sweeps that are killed


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
    steps = {name: one["step"] for name, one in statuses.items()}

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


# -- other launchers


def _stock(folder: Path) -> Stock:
    write_task(folder / "start")
    one = (*SMALL, *JSONL, "task.reward=rewards.py:good", "runs_dir=../runs", "trainer.max_steps=1")
    line = ("-m", *one, "seed=0,1")
    basic = command(*line, "hydra/launcher=basic", "hydra.job.chdir=true", cwd=folder / "start")
    single = command(*one, "hydra.job.chdir=true", "hydra.run.dir=../hydra", cwd=folder / "start")
    plugin = folder / "plugins" / "hydra_plugins" / "pickling"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PICKLING)
    (folder / "elsewhere").mkdir()
    environment = {"PYTHONPATH": str(folder / "plugins"), "ELSEWHERE": str(folder / "elsewhere")}
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


PICKLING = '''
"""As submitit does: the task function goes through a pickle into another process."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict


@dataclass
class Conf:
    _target_: str = "hydra_plugins.pickling.PicklingLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="pickling", node=Conf)


class PicklingLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.hydra_context, self.config, self.task_function = hydra_context, config, task_function

    def launch(self, job_overrides, initial_job_idx):
        results = []
        for index, overrides in enumerate(job_overrides):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(index), index
            path = Path(os.environ["ELSEWHERE"]) / f"{index}.pkl"
            state = Singleton.get_state()
            path.write_bytes(cloudpickle.dumps((self.hydra_context, self.task_function, config, state)))
            script = "import sys; from hydra_plugins.pickling import run; run(sys.argv[1])"
            subprocess.run([sys.executable, "-c", script, str(path)], check=True, cwd=path.parent)
            results.append(JobReturn(status=JobStatus.COMPLETED))
        return results


def run(path):
    context, task_function, config, state = cloudpickle.loads(Path(path).read_bytes())
    setup_globals()
    Singleton.set_state(state)
    result = run_job(
        hydra_context=context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    result.return_value
'''


LISTING = '''
"""Says which jobs a sweep has, and runs none."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher


@dataclass
class Conf:
    _target_: str = "hydra_plugins.listing.ListingLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="listing", node=Conf)


class ListingLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        pass

    def launch(self, job_overrides, initial_job_idx):
        for overrides in job_overrides:
            print(*overrides)
        return []
'''


@pytest.mark.parametrize(
    ("line", "jobs"),
    [
        (
            "+sweeps=precision",
            [f"precision={p} seed={s} +sweeps=precision" for p in ("fp32", "bf16", "fp16") for s in range(3)],
        ),
        ("-m +sweeps=precision seed=7 precision=BFloat16", ["precision=bf16 seed=7 +sweeps=precision"]),
        (
            "-m +sweeps=split seed=0 precision=fp32,half",
            [f"precision={p} seed=0 +sweeps=split" for p in ("fp32", "fp16")],
        ),
        ("seed=0,1 -m tracker.tags=[a,b]", [f"seed={seed} tracker.tags=[a,b]" for seed in (0, 1)]),
        ("-m +experiment=sort debug=smoke", ["experiment=sort debug=smoke"]),
    ],
)
def test_a_sweep_has_the_jobs_that_its_file_and_the_command_line_say(
    line: str, jobs: list[str], tmp_path: Path
) -> None:
    """E9, E12: the command line wins over a named sweep, in factors too; a list is one value."""
    plugin = tmp_path / "hydra_plugins" / "listing"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(LISTING)
    ended = command(*line.split(), "hydra/launcher=listing", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == jobs
    assert {path.name for path in tmp_path.iterdir()} == {"hydra_plugins"}


# -- what is decided about a run that exists, and other small things


@pytest.mark.parametrize(
    ("state", "retry", "action", "note"),
    [
        ("created", False, Action.start, "new"),
        ("done", False, Action.skip, "done already"),
        ("done", True, Action.skip, "done already"),
        ("failed", False, Action.skip, "failed before"),
        ("failed", True, Action.resume, "failed before"),
        ("preempted", False, Action.resume, "was preempted"),
        ("running", False, Action.resume, "was crashed"),  # its process is gone
    ],
)
def test_a_run_that_exists_is_skipped_or_goes_on(
    state: str, retry: bool, action: Action, note: str, tmp_path: Path
) -> None:
    """F8: a run whose status says running but whose process is gone is resumed."""
    path = write_run(tmp_path, state=state, status={"pid": 2**22 + 1} if state == "running" else {})
    decided = decide(Planned(path, Action.start, "", []), retry)
    assert (decided.action, decided.note) == (action, note)


def test_a_run_that_another_process_holds_is_waited_for(tmp_path: Path) -> None:
    path = write_run(tmp_path, state="created")
    folder = RunFolder(path)
    folder.lock()
    assert decide(Planned(path, Action.start, "", []), False).action is Action.wait
    folder.close()
    assert decide(Planned(path, Action.start, "", []), False).action is Action.start


def test_planning_twice_finds_the_same_folders(tmp_path: Path) -> None:
    jobs = [compose([f"seed={seed}", f"runs_dir={tmp_path}"]) for seed in (0, 1, 0)]
    planned = prepare_all(jobs, check_all(jobs), retry_failed=False)
    assert len(planned) == 2, "the same configuration twice is one run"
    again = prepare_all(jobs, check_all(jobs), retry_failed=False)
    assert [plan.path for plan in again] == [plan.path for plan in planned]
    assert len(runs(tmp_path)) == 2


def test_a_folder_that_was_only_half_made_is_made_again(tmp_path: Path) -> None:
    jobs = [compose([f"runs_dir={tmp_path}"])]
    [planned] = prepare_all(jobs, check_all(jobs), retry_failed=False)
    (planned.path / "status.json").unlink()
    (planned.path / "config.yaml").write_text("")
    [again] = prepare_all(jobs, check_all(jobs), retry_failed=False)
    assert (again.path, again.action) == (planned.path, Action.start)
    assert yaml.safe_load((again.path / "config.yaml").read_text())["seed"] == 0


def test_the_same_run_prepared_by_many_processes_at_once_gets_one_folder(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom grpo_exp.config.compose import compose\n"
        "from grpo_exp.launch.prepare import check_all, prepare_all\n"
        "jobs = [compose([f'seed={seed}', f'runs_dir={sys.argv[1]}']) for seed in range(3)]\n"
        "jobs = jobs[int(sys.argv[2]) :]\n"
        "prepare_all(jobs, check_all(jobs), False)\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(n % 3)]) for n in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    hashes = [path.name.rpartition("_")[2] for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(hashes) == len(set(hashes)) == 3


def test_nothing_is_started_while_one_job_of_a_sweep_is_wrong(tmp_path: Path) -> None:
    jobs = [compose([f"algo.group_size={size}", f"runs_dir={tmp_path}/runs"]) for size in (4, 1, 0)]
    with pytest.raises(ConfigError) as caught:
        local.launch(jobs, 1, "none")
    assert str(caught.value).splitlines() == [
        f"algo.group_size={size}: allowed: 2 or more (an advantage compares completions of one prompt)"
        for size in (1, 0)
    ]
    assert list(tmp_path.iterdir()) == []


def board(tmp_path: Path, terminal: bool) -> str:
    """What is shown of a sweep of four: one was done before, one runs, one is killed, one waits."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=80, highlight=False, color_system=None)
    paths = [
        write_run(tmp_path, f"[{name}]", state=name, num_steps=3) for name in ("done", "running", "failed", "created")
    ]
    notes = (
        (Action.skip, "done already"),
        (Action.resume, "was preempted"),
        (Action.start, "new"),
        (Action.wait, "elsewhere"),
    )
    planned = [Planned(path, action, note, []) for path, (action, note) in zip(paths, notes, strict=True)]
    with Board(planned, console) as view:
        view.update({plan.path: plan for plan in planned[1:3]}, {})
        view.update({planned[1].path: planned[1]}, {paths[0]: 0, paths[2]: -9})
        view.update({}, {paths[0]: 0, paths[1]: 0, paths[2]: -9})
    return shown.getvalue()


def test_elsewhere_than_in_a_terminal_a_sweep_says_a_line_for_each_start_and_end(tmp_path: Path) -> None:
    assert board(tmp_path, terminal=False).splitlines() == [
        "[done]: done already",
        "[created]: elsewhere, its end is waited for",
        "[running]: goes on (was preempted)",
        "[failed]: started",
        "[failed]: ended with exit code -9",
        "[running]: done",
    ]


def test_in_a_terminal_a_sweep_is_a_live_table(tmp_path: Path) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", board(tmp_path, terminal=True))
    assert re.search(r"run +state +step", shown)
    assert re.search(r"\[running\] +running +3/3", shown)
    assert re.search(r"\[failed\] +failed +3/3", shown)
    assert re.search(r"\[created\] +waiting", shown)


def test_a_death_is_explained_by_its_signal(tmp_path: Path) -> None:
    path = write_run(tmp_path, state="running", num_steps=7)
    assert reason(path, -signal.SIGKILL) == "killed by SIGKILL (out of memory?) at step 7"
    assert reason(path, -signal.SIGSEGV) == "killed by SIGSEGV at step 7"
    assert reason(path, 1) == "exit code 1"
    assert reason(write_run(tmp_path, "other", state="failed", reason="too bad\nand more"), 1) == "too bad"


def test_a_second_ctrl_c_does_not_wait_for_checkpoints(tmp_path: Path) -> None:
    """A run that does not stop when asked would else be given its time; and the handlers are put back."""
    before = signal.getsignal(signal.SIGINT)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with local.Interruptible() as interrupted:
            signal.raise_signal(signal.SIGINT)
            again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
            again.start()
            start = time.monotonic()
            local._stop([local.Child(Planned(tmp_path, Action.start, "", []), process)], interrupted)
            again.join()
    assert time.monotonic() - start < local.GRACE_S / 2
    assert process.returncode == -signal.SIGKILL
    assert (interrupted.number, interrupted.count) == (signal.SIGINT, 2)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_is_stopped_before_it_goes_on_keeps_what_its_status_says(tmp_path: Path) -> None:
    """Here by a setting that a later version no longer knows: the step that was reached is still known."""
    path = write_run(tmp_path, state="preempted", num_steps=7, config={"trainer.unheard_of": 1})
    done = subprocess.run([sys.executable, "-m", "grpo_exp.run", str(path), "--resume"], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    one = status(path)
    assert (one["state"], one["step"], one["max_steps"], one["exit_code"]) == ("failed", 7, 7, 2)


def test_a_run_process_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    path = write_run(tmp_path, state="created")
    done = subprocess.run([sys.executable, "-m", "grpo_exp.run", str(path), "--tied", "1"], capture_output=True)
    assert done.returncode == 128 + signal.SIGTERM
    assert status(path)["state"] == "created"


def in_a_terminal(arguments: list[str], cwd: Path) -> tuple[int, str]:
    """Run a command in a pseudo-terminal; its exit code and what was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=os.environ | {"TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux says so when the other side is closed
            break
        shown += part
    os.close(ours)
    return process.wait(), shown.decode(errors="replace")
