"""Reward functions in their own process: what they may return, and what happens when they misbehave."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_exp import tasks
from grpo_exp.config.schema import TaskConfig, TaskName
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.tasks import shortest
from grpo_exp.tasks.rewards import RewardResult, RewardRunner

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def collect(runner: RewardRunner, timeout_s: float = 30.0) -> list[RewardResult]:
    """The event loop of the trainer, until nothing is pending."""
    results: list[RewardResult] = []
    end_s = time.monotonic() + timeout_s
    while runner.pending:
        assert time.monotonic() < end_s, f"no end after {timeout_s} s, so far {results}"
        wait_s = runner.wait_s()
        wait(runner.connections(), min(1.0, 1.0 if wait_s is None else wait_s))
        results += runner.poll()
    return results


def load(runner: RewardRunner) -> None:
    """Start the process and wait until it has the functions."""
    runner.start()
    while not runner.ready:
        wait(runner.connections())
        assert runner.poll() == []


def submit(runner: RewardRunner, serial: int, count: int = 2, **columns: Any) -> None:
    row = {"prompt": f"prompt {serial}", **columns}
    runner.submit(
        serial, row, ["a" * (index + 1) for index in range(count)], [[5] * (index + 1) for index in range(count)]
    )


def rewards_of(*functions: Any, count: int = 2, **columns: Any) -> RewardResult:
    """What the functions give to one group of completions "a", "aa", "aaa"…"""
    with RewardRunner(functions, timeout_s=20.0) as runner:
        submit(runner, 0, count, **columns)
        (result,) = collect(runner)
    return result


def returning(*values: Any) -> Any:
    """A reward function that returns these values whatever it is given."""
    return lambda **columns: list(values)


def children() -> set[int]:
    """Process ids of the children of this process, dead ones that nobody has waited for included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Write a file and give its path."""

    def write(text: str, name: str = "rewards.py") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    before = children()
    yield
    assert children() <= before


@pytest.mark.parametrize("name", [TaskName.reverse, TaskName.sort, TaskName.shortest])
def test_shipped_tasks_are_rewarded_at_once_and_without_a_process(name: TaskName):
    task = tasks.build(TaskConfig(name=name))
    with RewardRunner(task.reward_funcs) as runner:
        for serial, row in enumerate(task.train[:3]):
            runner.submit(serial, row, ["", row.get("answer", "x")], [[2], [5, 6, 2]])
        assert runner.connections() == []
        assert runner.wait_s() == 0.0
        results = runner.poll()
    assert [result.serial for result in results] == [0, 1, 2]
    expected = [-1.0, -3.0] if name is TaskName.shortest else [0.0, 1.0]
    assert all(result.rewards == expected for result in results)


def test_a_function_is_given_lists_with_one_entry_per_completion():
    def check(**given: Any) -> list[bool]:
        expected = {
            "prompts": ["prompt 0"] * 2,
            "completions": ["a", "aa"],
            "completion_ids": [[5], [5, 5]],
            "answer": ["x", "x"],
        }
        return [given == expected] * 2

    assert rewards_of(check, answer="x").rewards == [1.0, 1.0]


def test_chat_messages_arrive_as_they_are():
    message = [{"role": "assistant", "content": "hi"}]
    with RewardRunner(
        [lambda completions, prompts, **_: [float(completions == [message] and prompts == [message])]]
    ) as runner:
        runner.submit(0, {"prompt": message}, [message], [[5]])
        assert collect(runner)[0].rewards == [1.0]


def test_bools_numpy_and_torch_values_count_as_numbers():
    def values(**columns: Any) -> list[Any]:
        import torch

        return [True, 2, np.float32(0.5), np.array(3), torch.tensor(4.0), torch.tensor([5])]

    def tensor(**columns: Any) -> Any:
        import torch

        return torch.arange(6)

    assert rewards_of(values, tensor, lambda **_: np.zeros(6), count=6).rewards == [1.0, 3.0, 2.5, 6.0, 8.0, 10.0]


def test_none_is_a_missing_reward_and_nan_an_invalid_one():
    """C3: None, NaN and inf all become NaN, and the last two are counted."""
    result = rewards_of(returning(1.0, None, 0.0, math.nan, math.inf, -math.inf), count=6)
    assert result.rewards == pytest.approx([1.0, math.nan, 0.0] + [math.nan] * 3, nan_ok=True)
    assert result.num_invalid == 3
    assert result.error is None


def test_a_group_without_any_reward_is_no_error():
    """C3"""
    result = rewards_of(returning(None, None))
    assert all(math.isnan(reward) for reward in result.rewards)
    assert (result.num_invalid, result.error) == (0, None)


def test_several_functions_are_summed_and_none_counts_as_nothing():
    """C3"""
    first, second = returning(1.0, None, None, 1.0), returning(2.0, 2.0, None, math.nan)
    result = rewards_of(first, second, count=4)
    assert result.rewards == pytest.approx([3.0, 2.0, math.nan, math.nan], nan_ok=True)
    assert result.num_invalid == 1


def test_async_functions_of_a_group_run_at_the_same_time():
    async def slow(completions: list[str], **columns: Any) -> list[float]:
        await asyncio.sleep(1.0)
        return [1.0] * len(completions)

    with RewardRunner([slow, slow, slow, returning(0.5, None)], timeout_s=2.5) as runner:
        submit(runner, 0)
        (result,) = collect(runner)
    assert (result.rewards, result.error) == ([3.5, 3.0], None)


def test_an_async_function_keeps_its_event_loop():
    """A client that was opened in one call can be used in the next."""
    loops: list[Any] = []

    async def same_loop(**columns: Any) -> list[bool]:
        loops.append(asyncio.get_running_loop())
        return [loops[0] is loops[-1], len(loops) == columns["call"][0]]

    with RewardRunner([same_loop]) as runner:
        for call in (1, 2):
            submit(runner, call, call=call)
        assert [result.rewards for result in collect(runner)] == [[1.0, 1.0]] * 2


def test_functions_of_a_script_without_a_main_guard_work(script: Any):
    path = script(
        "from grpo_exp.tasks.rewards import RewardRunner\n"
        "from multiprocessing.connection import wait\n"
        "SCALE = 3.0\n"
        "def scaled(completions, **columns):\n"
        "    return [SCALE * len(completion) for completion in completions]\n"
        "with RewardRunner([scaled, lambda completions, **columns: [1] * len(completions)]) as runner:\n"
        "    runner.submit(7, {'prompt': 'x'}, ['a', 'aa'], [[1], [1, 1]])\n"
        "    while not (results := runner.poll()):\n"
        "        wait(runner.connections())\n"
        "print(results[0].rewards)\n"
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("[4.0, 7.0]\n", "")


def test_a_function_in_a_file_can_import_its_neighbours(script: Any):
    script("WEIGHT = 2.0\n", "neighbour.py")
    path = script(
        "import neighbour\nclass Judge:\n    @staticmethod\n    def score(completions, **columns):\n"
        "        return [neighbour.WEIGHT] * len(completions)\n"
    )
    assert rewards_of(f"{path}:Judge.score").rewards == [2.0, 2.0]


def test_a_function_of_a_module_is_found_where_the_trainer_finds_it(script: Any, monkeypatch: pytest.MonkeyPatch):
    path = script("def score(completions, **columns):\n    return [0.25] * len(completions)\n", "judges.py")
    monkeypatch.syspath_prepend(path.parent)
    assert rewards_of("judges:score").rewards == [0.25, 0.25]


def test_the_process_holds_no_torch_and_reads_no_terminal():
    def look(**columns: Any) -> list[bool]:
        return ["torch" in sys.modules, sys.stdin.read() == ""]

    assert rewards_of(look).rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (1.0, "returned 1.0, not a list"),
        (None, "returned None, not a list"),
        ("ab", "returned 'ab', not a list"),
        ({"a": 1, "b": 2}, "not a list"),
        ([1.0, "2.0"], "returned '2.0' for completion 1, not a number"),
        ([1.0, 2j], "returned 2j for completion 1, not a number"),
        ([[1.0], [2.0]], "for completion 0, not a number"),
    ],
)
def test_what_is_not_one_number_per_completion_is_an_error(returned: Any, says: str):
    def odd(**columns: Any) -> Any:
        return returned

    result = rewards_of(odd)
    assert result.error is not None
    assert says in result.error
    assert "odd" in result.error
    assert "'prompt 0'" in result.error
    assert len(result.rewards) == 2
    assert all(math.isnan(reward) for reward in result.rewards)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_exception_is_reported_with_its_traceback_and_the_others_go_on(asynchronous: bool):
    """C5: the third call raises."""

    def judge(call: list[int], **columns: Any) -> list[float]:
        if call[0] == 2:
            raise KeyError("no such unit test")
        return [1.0, 2.0]

    async def judge_later(**columns: Any) -> list[float]:
        return judge(**columns)

    with RewardRunner([judge_later if asynchronous else judge]) as runner:
        for call in range(5):
            submit(runner, call, call=call)
        results = collect(runner)
    assert [result.error is None for result in results] == [True, True, False, True, True]
    error = results[2].error or ""
    for part in (
        "judge",
        "'prompt 2'",
        "group 2",
        "Traceback",
        'raise KeyError("no such unit test")',
        "test_rewards.py",
    ):
        assert part in error


def test_a_function_that_exits_is_an_error_like_another():
    result = rewards_of(lambda **columns: sys.exit("gone"))
    assert "SystemExit: gone" in (result.error or "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import no_such_module_at_all\n", "No module named 'no_such_module_at_all'"),
        ("", "there is no 'score' in"),
        ("score = 3\n", "is a int, not a function"),
        ("import os\nos._exit(5)\n", "exit code 5"),
        ("import sys\nsys.exit(5)\n", "SystemExit"),
    ],
)
def test_a_function_that_cannot_be_loaded_ends_the_run(script: Any, text: str, says: str):
    path = script(text)
    with RewardRunner([f"{path}:score"]) as runner:
        submit(runner, 0)
        with pytest.raises(RunFailed, match=r"rewards\.py:score.*could not be loaded") as caught:
            collect(runner)
    assert says in str(caught.value)


def test_a_function_that_cannot_be_sent_is_refused_at_once():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"reward_funcs='.*<lambda>'.*pickled"):
        RewardRunner([lambda **columns: [lock]])
    with pytest.raises(ConfigError, match="one function or more"):
        RewardRunner([])


@linux
def test_twenty_timeouts_leave_no_process_no_thread_and_no_file():
    """C5"""

    def hang(completions: list[str], last: list[bool], **columns: Any) -> list[float]:
        while not last[0]:
            time.sleep(0.01)
        return [1.0] * len(completions)

    with RewardRunner([hang], timeout_s=0.2) as runner:
        submit(runner, -1, last=True)
        collect(runner)
        before = (len(children()), threading.active_count(), len(os.listdir("/proc/self/fd")))
        for serial in range(21):
            submit(runner, serial, last=serial == 20)
        results = collect(runner, timeout_s=60.0)
        assert (len(children()), threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert [result.serial for result in results] == list(range(21))
    assert all(
        "took longer than 0.2 s" in (result.error or "") and "hang" in (result.error or "") for result in results[:20]
    )
    assert results[20].rewards == [1.0, 1.0]


def test_time_runs_for_a_group_only_while_it_is_worked_on(tmp_path: Path):
    """Five groups take longer than the limit together, and the caller comes back long after the last one is done."""
    done = tmp_path / "done"

    def slow(call: list[int], **columns: Any) -> list[float]:
        time.sleep(0.3)
        if call[0] == 4:
            done.touch()
        return [1.0, 1.0]

    with RewardRunner([slow], timeout_s=1.0) as runner:
        load(runner)
        for call in range(5):
            submit(runner, call, call=call)
        while not done.exists():
            time.sleep(0.1)
        time.sleep(1.2)
        assert [result.error for result in runner.poll()] == [None] * 5


@pytest.mark.parametrize(("end", "code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 11)", -11)])
def test_a_function_that_crashes_its_process_costs_one_group(script: Any, end: str, code: int):
    path = script(f"import os\ndef crash(call, **columns):\n    if call[0] == 1:\n        {end}\n    return [1, 1]\n")
    with RewardRunner([f"{path}:crash"]) as runner:
        for call in range(3):
            submit(runner, call, call=call)
        results = collect(runner)
    assert [result.serial for result in results] == [0, 1, 2]
    assert [result.error is None for result in results] == [True, False, True]
    assert f"ended the reward process with exit code {code} on group 1, prompt 'prompt 1'" in (results[1].error or "")


@linux
def test_a_timeout_also_ends_the_programs_that_the_function_started(tmp_path: Path):
    pid_file = tmp_path / "pid"

    def run_program(**columns: Any) -> list[float]:
        with subprocess.Popen(["sleep", "600"]) as program:
            pid_file.write_text(str(program.pid))
        return [1.0, 1.0]

    with RewardRunner([run_program], timeout_s=1.0) as runner:
        submit(runner, 0)
        assert "took longer" in (collect(runner)[0].error or "")
    wait_until_gone(int(pid_file.read_text()))


@linux
@pytest.mark.parametrize("hang", ["time.sleep(600)", "ctypes.PyDLL(None).sleep(600)"])
def test_the_process_dies_with_its_trainer_even_if_it_holds_the_interpreter_lock(script: Any, hang: str):
    path = script(
        "import ctypes, os, sys, time\n"
        "from grpo_exp.tasks.rewards import RewardRunner\n"
        "def hang(**columns):\n"
        "    print(os.getpid(), flush=True)\n"
        f"    {hang}\n"
        "runner = RewardRunner([hang])\n"
        "runner.submit(0, {'prompt': 'x'}, ['a'], [[1]])\n"
        "while True:\n"
        "    runner.poll()\n"
        "    time.sleep(0.01)\n"
    )
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        trainer.send_signal(signal.SIGKILL)
    wait_until_gone(pid)


def test_a_hanging_function_never_blocks_the_caller():
    """Groups larger than what the socket holds wait in the trainer, not in a blocked send."""

    def hang(first: list[bool], completions: list[str], **columns: Any) -> list[float]:
        if first[0]:
            time.sleep(600)
        return [float(len(completion)) for completion in completions]

    with RewardRunner([hang], timeout_s=1.0) as runner:
        load(runner)
        start_s = time.monotonic()
        for serial in range(5):
            runner.submit(serial, {"prompt": "x", "first": serial == 0}, ["a" * 2_000_000], [[1] * 10])
        assert time.monotonic() - start_s < 10.0
        results = collect(runner)
    assert "took longer" in (results[0].error or "")
    assert [result.rewards for result in results[1:]] == [[2_000_000.0]] * 4


@pytest.mark.parametrize("count", [2, 8])
def test_shuffled_rewards_are_the_same_ones_in_an_order_that_the_serial_fixes(count: int):
    def run(seed: int, serials: list[int]) -> dict[int, list[float]]:
        with RewardRunner([shortest.reward], shuffle=True, seed=seed) as runner:
            for serial in serials:
                submit(runner, serial, count)
            return {result.serial: result.rewards for result in collect(runner)}

    plain = [-float(index + 1) for index in range(count)]
    first, backwards, other = run(0, list(range(20))), run(0, list(range(19, -1, -1))), run(1, list(range(20)))
    assert first == backwards
    assert first != other
    assert all(sorted(rewards, reverse=True) == plain for rewards in first.values())
    assert any(rewards != plain for rewards in first.values())


def test_pending_counts_until_the_result_is_given_back():
    with RewardRunner([returning(1.0, 1.0)]) as runner:
        assert runner.pending == 0
        assert runner.connections() == []
        submit(runner, 0)
        submit(runner, 1)
        assert runner.pending == 2
        assert len(runner.connections()) == 1
        assert len(collect(runner)) == 2
        assert runner.pending == 0
        assert runner.wait_s() is None


def test_closing_forgets_what_is_pending_and_may_be_repeated():
    runner = RewardRunner([lambda **columns: time.sleep(600)])
    submit(runner, 0)
    runner.close()
    runner.close()
    assert (runner.pending, runner.connections(), runner.poll()) == (0, [], [])
