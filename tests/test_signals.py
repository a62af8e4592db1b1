"""One run on the command line, interrupted in every way and resumed after each, until it is done."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import check_groups, events, metrics, status, trained_prompts

from grpo_exp import jsonl
from grpo_exp.report.load import find_runs
from grpo_exp.run import StopSignal

NUM_PROMPTS, STALENESS = 120, 1
OVERRIDES = (
    "debug=smoke",
    "precision=fp32",
    "trainer.max_steps=null",
    "trainer.max_epochs=1",
    f"task.num_train={NUM_PROMPTS}",
    "trainer.prompts_per_step=2",
    "trainer.eval_every=0",
    "trainer.save_every=4",
)
LIMIT_S = 15.0


@dataclass
class Ending:
    """How one part of the run came to its end, and what it left behind."""

    exit_code: int
    took_s: float
    left: list[str]  # command lines of processes that outlived it
    status: dict[str, Any]
    state: str  # as a comparison shows it
    last_step: int  # of metrics.jsonl


def grpo_exp(*arguments: str) -> subprocess.Popen[bytes]:
    program = shutil.which("grpo-exp", path=str(Path(sys.executable).parent))
    assert program is not None
    return subprocess.Popen([program, *arguments], start_new_session=True, stderr=subprocess.DEVNULL)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"ended too soon, with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def last_step(run: Path) -> int:
    return max((row["step"] for row in metrics(run)), default=0)


def interrupt(process: subprocess.Popen[bytes], run: Path, send: Callable[[], None]) -> Ending:
    """Send a signal, and see within what time all is over."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert family, "it has started a worker"
    start = time.monotonic()
    send()
    exit_code = process.wait(LIMIT_S)
    _, alive = psutil.wait_procs(family, timeout=max(0.0, LIMIT_S - (time.monotonic() - start)))
    took_s = time.monotonic() - start
    left = [" ".join(child.cmdline()) for child in alive]
    return Ending(exit_code, took_s, left, status(run), find_runs([run])[0].state.value, last_step(run))


@dataclass
class Story:
    run: Path
    endings: dict[str, Ending]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    runs = tmp_path_factory.mktemp("runs")
    process = grpo_exp(*OVERRIDES, f"runs_dir={runs}")
    wait_until(lambda: list(runs.glob("*/logs/worker-0.log")), process)
    run = next(runs.glob("*/logs")).parent
    endings = {"start-up": interrupt(process, run, lambda: process.send_signal(signal.SIGTERM))}

    def part(send: Callable[[subprocess.Popen[bytes]], None]) -> Ending:
        before = last_step(run)
        process = grpo_exp("resume", str(run))
        wait_until(lambda: last_step(run) >= before + 6, process)
        return interrupt(process, run, lambda: send(process))

    endings["SIGTERM"] = part(lambda process: process.send_signal(signal.SIGTERM))
    endings["SIGINT"] = part(lambda process: os.killpg(process.pid, signal.SIGINT))  # as Ctrl-C does
    endings["SIGKILL"] = part(lambda process: process.kill())
    process = grpo_exp("resume", str(run))
    start = time.monotonic()
    exit_code = process.wait(120)
    endings["end"] = Ending(exit_code, time.monotonic() - start, [], status(run), "done", last_step(run))
    return Story(run, endings)


def test_the_first_signal_asks_a_run_that_trains_to_stop_and_the_second_ends_it() -> None:
    stop = StopSignal(training=True)
    stop._received(signal.SIGTERM, None)
    assert stop()
    with pytest.raises(KeyboardInterrupt):
        stop._received(signal.SIGINT, None)
    assert (stop.name, stop.exit_code) == ("SIGTERM", 143)


@pytest.mark.parametrize("how", ["start-up", "SIGTERM", "SIGINT", "SIGKILL"])
def test_no_process_outlives_the_run_whatever_ends_it(story: Story, how: str) -> None:
    assert story.endings[how].left == []
    assert story.endings[how].took_s < LIMIT_S


@pytest.mark.parametrize(("how", "number"), [("start-up", 15), ("SIGTERM", 15), ("SIGINT", 2)])
def test_status_and_exit_code_say_which_signal_it_was(story: Story, how: str, number: int) -> None:
    ending = story.endings[how]
    assert ending.exit_code == 128 + number
    assert ending.status["state"] == "preempted"
    assert ending.status["exit_code"] == 128 + number
    assert ending.status["reason"].startswith(signal.Signals(number).name)
    assert ending.status["traceback"] is None


def test_a_signal_before_torch_is_there_ends_the_run_with_nothing_done(story: Story) -> None:
    ending = story.endings["start-up"]
    assert (ending.status["step"], ending.last_step) == (0, 0)


def test_a_killed_run_is_shown_as_crashed(story: Story) -> None:
    ending = story.endings["SIGKILL"]
    assert ending.exit_code == -signal.SIGKILL
    assert (ending.status["state"], ending.state) == ("running", "crashed")


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_an_interrupted_run_leaves_a_checkpoint_of_its_last_step(story: Story, how: str) -> None:
    """E14"""
    ending = story.endings[how]
    assert ending.status["step"] == ending.last_step
    saved = {event["step"] for event in events(story.run, "checkpoint")}
    assert ending.last_step in saved


def test_the_resumed_run_comes_to_its_end(story: Story) -> None:
    """E14: in the same folder, each step once."""
    ending = story.endings["end"]
    assert ending.exit_code == 0
    assert (ending.status["state"], ending.status["reason"]) == ("done", "trainer.max_epochs")
    assert ending.status["step"] == NUM_PROMPTS // 2
    assert [row["step"] for row in metrics(story.run)] == list(range(NUM_PROMPTS // 2 + 1))


def test_every_prompt_was_trained_once_though_the_run_was_broken_four_times(story: Story) -> None:
    """D9"""
    assert sorted(trained_prompts(story.run)) == list(range(NUM_PROMPTS))
    check_groups(story.run)
    assert story.endings["end"].status["groups"]["started"] == NUM_PROMPTS


def test_the_first_step_after_a_resume_is_trained_on_fresh_rollouts(story: Story) -> None:
    """D10"""
    rows = {row["step"]: row for row in metrics(story.run)}
    resumed = [event["step"] for event in jsonl.read(story.run / "events.jsonl") if event["event"] == "resume"]
    assert len(resumed) == 3
    for step in resumed:
        assert rows[step + 1]["staleness/max"] == 0.0
    assert max(row["staleness/max"] for row in rows.values() if row["step"]) == STALENESS
