"""Runs with rollout=vllm and rollout=vllm_server: they learn, they survive what kills an engine, they leave nothing behind."""

import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_runs import check_groups, events, metrics, small_trainer, status

from grpo_exp import jsonl
from grpo_exp.folder import State

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make setup-vllm", allow_module_level=True)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

VLLM = ("rollout=vllm", "rollout.vllm.kv_cache_gib=0.0625", "probe.every=0")
SERVER = ("rollout=vllm_server", "rollout.vllm.kv_cache_gib=0.0625", "probe.every=0", "trainer.eval_every=0")
LEARNS = (
    "trainer.max_steps=60", "trainer.prompts_per_step=16", "algo.group_size=8", "task.num_train=2048",
    "task.num_eval=64", "trainer.eval_every=0", "trainer.save_every=0",
)  # fmt: skip


def engines() -> list[psutil.Process]:
    """Everything below this process that is a worker, or vLLM's."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if child.is_running() and ("grpo_exp.rollout" in line or "VLLM::" in line):
            found.append(child)
    return found


def named(kind: str) -> list[psutil.Process]:
    return [process for process in engines() if kind in " ".join(process.cmdline())]


class After:
    """A callback that acts once after a step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


SHARED = Path("/dev/shm")


def shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """Named shared memory that some processes have mapped: not what is mapped still and has lost its name."""
    maps = [line for process in processes for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()]
    return {Path(line.split()[5]) for line in maps if "/dev/shm/" in line and not line.endswith("(deleted)")}


def gone(processes: list[psutil.Process], within_s: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_reward_rises(tmp_path: Path, precision: str) -> None:
    assert small_trainer(tmp_path, f"precision={precision}", *VLLM, *LEARNS).train() is State.done
    rows = [row for row in metrics(tmp_path) if "reward/mean" in row]
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.05
    observed = jsonl.read_json(tmp_path / "manifest.json")["precision"]["observed"]["first_step"]
    assert {observed[site] for site in ("rollout", "rollout_head", "kv_cache", "wire")} == {precision}
    assert not engines()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_in_fp32_the_first_step_has_no_mismatch_at_any_temperature(tmp_path: Path, temperature: float) -> None:
    """B2, and the acceptance test of the whole path."""
    overrides = (
        "trainer.max_steps=1", "rollout.max_staleness=0", f"rollout.temperature={temperature}", "task.num_eval=0",
        "trainer.prompts_per_step=16",
    )  # fmt: skip
    assert small_trainer(tmp_path, *VLLM, *overrides).train() is State.done
    (row,) = [row for row in metrics(tmp_path) if row["step"] == 1]
    assert abs(row["mismatch/mean"]) < 1e-4
    assert row["mismatch/abs_max"] < 1e-4
    assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-3)
    assert row["ratio/clip_frac"] == 0


def test_an_engine_that_is_killed_is_started_again_and_the_run_completes(tmp_path: Path) -> None:
    """kill -9: the engine core is in the worker's own process."""
    kill = After(2, lambda: [worker.kill() for worker in named("rollout.worker")])
    overrides = "trainer.max_steps=6", "trainer.prompts_per_step=16"
    assert small_trainer(tmp_path, *VLLM, *overrides, callbacks=[kill]).train() is State.done
    (restart,) = events(tmp_path, "worker_restart")
    assert "died (exit code -9)" in restart["reason"]
    check_groups(tmp_path)
    assert status(tmp_path)["groups"]["trained"] == 6 * 16
    assert not engines()


def test_two_workers_of_one_run_sample_differently_and_the_run_repeats(tmp_path: Path) -> None:
    """B15: in lockstep, where no clock has a say in which version samples what."""
    overrides = "rollout.num_workers=2", "rollout.max_staleness=0", "trainer.max_steps=3", "task.num_eval=0"
    runs = []
    for name in ("one", "two"):
        small_trainer(tmp_path / name, *VLLM, *overrides).train()
        runs.append([row["reward/mean"] for row in metrics(tmp_path / name) if row["step"]])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from small_runs import small_trainer
small_trainer(Path({path!r}), {overrides!r}, *{rest!r}).train()
"""


def up_and_training(run: subprocess.Popen[bytes], path: Path) -> tuple[list[psutil.Process], set[Path]]:
    """The processes of a run that has made a step, and the shared memory that they have mapped."""
    deadline = time.monotonic() + 300
    while not (path / "metrics.jsonl").is_file() or len(metrics(path)) < 2:
        assert run.poll() is None, (path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    processes = psutil.Process(run.pid).children(recursive=True)
    return processes, shared_memory(processes)


@pytest.mark.parametrize("backend", [VLLM, SERVER], ids=["vllm", "vllm_server"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_run_whatever_ends_it(tmp_path: Path, backend: tuple[str, ...], number: int) -> None:
    script = SCRIPT.format(
        tests=str(Path(__file__).parent), path=str(tmp_path), overrides="trainer.max_steps=100000", rest=backend
    )
    before = set(SHARED.iterdir())
    with (tmp_path / "log").open("wb") as log:
        run = subprocess.Popen([sys.executable, "-c", script], stdout=log, stderr=log)
    try:
        processes, memory = up_and_training(run, tmp_path)
        assert len(processes) > (3 if backend is SERVER else 0)
        assert not memory or backend is SERVER  # a server has it mapped only while it loads
        run.send_signal(number)
        run.wait(60)
    finally:
        run.kill()  # whatever failed: what goes on running would fail the tests that follow
        run.wait(60)
    assert gone(processes, 10)
    deadline = time.monotonic() + 10
    while (left := set(SHARED.iterdir()) - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.parametrize("victim", ["vllm_serve", "VLLM::EngineCore"])
def test_a_server_that_is_killed_is_started_again_and_the_run_completes(tmp_path: Path, victim: str) -> None:
    """kill -9 of the server, and of its engine core alone."""
    kill = After(2, lambda: [process.kill() for process in named(victim)])
    overrides = "trainer.max_steps=5", "rollout.request_timeout_s=60", "trainer.stall_timeout_s=400"
    assert small_trainer(tmp_path, *SERVER, *overrides, callbacks=[kill]).train() is State.done
    assert len(events(tmp_path, "worker_restart")) == 1
    check_groups(tmp_path)
    assert not engines()
