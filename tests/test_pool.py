"""Workers that fail: the run goes on where it can, and says why where it cannot."""

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import TESTS
from small_runs import LOCKSTEP, check_groups, events, metrics, small_config, small_trainer, status, trained_prompts

from grpo_exp import jsonl
from grpo_exp.config.schema import Backend
from grpo_exp.errors import Interrupted, RunFailed
from grpo_exp.folder import State
from grpo_exp.rollout.pool import WorkerPool
from grpo_exp.rollout.process import WorkerProcess, open_memory, spawn_workers
from grpo_exp.rollout.start import ENGINES
from grpo_exp.rollout.types import EngineSpec


@pytest.fixture
def use_engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have workers build one of the engines of engines.py."""

    def use(name: str) -> None:
        monkeypatch.setitem(ENGINES, Backend.hf, f"engines:{name}")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))

    return use


def workers() -> list[psutil.Process]:
    """Worker processes of this process that are alive."""
    children = psutil.Process().children()
    return [child for child in children if "grpo_exp.rollout.worker" in child.cmdline()]


class Watch:
    """A callback that acts after a step, and remembers when training began."""

    def __init__(self, step: int = -1, act: Any = None) -> None:
        self.step, self.act = step, act
        self.began_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began_s = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act()


def test_an_engine_that_raises_at_once_ends_the_run_with_its_traceback(tmp_path: Path, use_engine: Any) -> None:
    """D1: within 10 s after start-up."""
    use_engine("BrokenEngine")
    watch = Watch()
    with pytest.raises(RunFailed, match="failed 3 times in a row"):
        small_trainer(tmp_path, callbacks=[watch], eval_dataset=[]).train()
    assert time.monotonic() - watch.began_s < 10
    ended = status(tmp_path)
    assert (ended["state"], ended["exit_code"]) == ("failed", 1)
    assert 'raise RuntimeError("the engine broke")' in ended["reason"]
    assert len(events(tmp_path, "worker_error")) == 3
    assert not workers()


def test_an_engine_that_cannot_be_built_ends_the_run_at_once(tmp_path: Path, use_engine: Any) -> None:
    """D1: a start that fails for a reason is not tried again."""
    use_engine("NeverBuilt")
    with pytest.raises(RunFailed, match=r"could not start its engine\n(.|\n)*no such weights"):
        small_trainer(tmp_path).train()
    assert not jsonl.read(tmp_path / "events.jsonl")
    assert not workers()


def test_an_engine_that_raises_once_is_forgiven_and_the_failure_counted(tmp_path: Path, use_engine: Any) -> None:
    """D1: what was half done is sampled again, and trained once."""
    use_engine("RaisesOnce")
    overrides = "rollout.max_failures=1", "trainer.max_epochs=1", "trainer.max_steps=null", "task.num_train=16"
    assert small_trainer(tmp_path, LOCKSTEP, *overrides).train() is State.done
    assert len(events(tmp_path, "worker_error")) == 1
    assert "once only" in events(tmp_path, "worker_error")[0]["error"]
    assert sorted(trained_prompts(tmp_path)) == list(range(16))
    assert status(tmp_path)["groups"]["dropped_failed"] == 0


def test_a_failure_in_one_evaluation_does_not_count_against_the_next(tmp_path: Path, use_engine: Any) -> None:
    use_engine("StumblesInEvaluation")
    overrides = "rollout.max_retries=1", "trainer.eval_every=1"
    assert small_trainer(tmp_path, LOCKSTEP, *overrides).train() is State.done
    assert len(events(tmp_path, "worker_error")) == 5
    assert all("eval/accuracy" in row for row in metrics(tmp_path))


def test_no_failure_is_forgiven_where_none_is_to_be(tmp_path: Path, use_engine: Any) -> None:
    use_engine("RaisesOnce")
    with pytest.raises(RunFailed, match="once only"):
        small_trainer(tmp_path, LOCKSTEP, "rollout.max_failures=0").train()


def test_a_request_that_is_never_answered_is_dropped_and_the_others_are_trained(
    tmp_path: Path, use_engine: Any
) -> None:
    """D3: timed out, tried again by itself, dropped, counted, its place taken."""
    use_engine("NeverAnswersGroup2")
    overrides = "rollout.request_timeout_s=2", "rollout.max_retries=1", "rollout.max_failures=0", "task.num_eval=0"
    assert small_trainer(tmp_path, *overrides, "trainer.prompts_per_step=2").train() is State.done
    dropped = events(tmp_path, "failed_group")
    assert [event["group"] for event in dropped] == [2]
    assert "no answer in 2 s (rollout.request_timeout_s)" in dropped[0]["reason"]
    assert len(events(tmp_path, "worker_restart")) == 2
    ended = status(tmp_path)
    assert (ended["step"], ended["groups"]["trained"], ended["groups"]["dropped_failed"]) == (4, 8, 1)
    trained = [serial for row in jsonl.read(tmp_path / "trained.jsonl") for serial in row["groups"]]
    assert sorted(trained) == [0, 1, 3, 4, 5, 6, 7, 8]
    check_groups(tmp_path)
    assert max(row["staleness/max"] for row in metrics(tmp_path) if row["step"]) <= 1


def test_a_worker_that_is_killed_is_started_again_and_the_run_completes(tmp_path: Path) -> None:
    """SIGKILL of the worker after step 2."""
    watch = Watch(2, lambda: [worker.kill() for worker in workers()])
    trainer = small_trainer(tmp_path, "trainer.max_steps=6", callbacks=[watch])
    assert trainer.train() is State.done
    (restart,) = events(tmp_path, "worker_restart")
    assert "died (exit code -9)" in restart["reason"]
    rows = [row for row in metrics(tmp_path) if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert max(row["staleness/max"] for row in rows) <= 1
    assert status(tmp_path)["groups"] == {
        "started": 24, "trained": 24, "dropped_stale": 0, "dropped_failed": 0, "replaced": 0, "left_over": 0,
    }  # fmt: skip
    assert not workers()


def test_a_worker_that_dies_again_and_again_ends_the_run(tmp_path: Path, use_engine: Any) -> None:
    use_engine("Dies")
    with pytest.raises(RunFailed, match=r"failed 2 times in a row (.|\n)*died \(exit code 7\)"):
        small_trainer(tmp_path, "rollout.max_failures=1").train()
    assert status(tmp_path)["state"] == "failed"
    assert len(events(tmp_path, "worker_restart")) == 1
    assert not workers()


def test_a_worker_that_finds_its_server_gone_is_started_again_as_often_as_allowed(
    tmp_path: Path, use_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: what was right when the run began is a failure of the worker, not of the configuration."""
    use_engine("GoneForGood")
    monkeypatch.setenv("GONE", str(tmp_path / "gone"))
    with pytest.raises(RunFailed, match=r"failed 2 times in a row (.|\n)*rollout.urls=.*ConnectionRefusedError"):
        small_trainer(tmp_path, "rollout.max_failures=1", "trainer.eval_every=0").train()
    assert status(tmp_path)["state"] == "failed"
    assert len(events(tmp_path, "worker_restart")) == 1
    assert not workers()


def test_a_generator_that_keeps_its_old_weights_ends_the_run(tmp_path: Path, use_engine: Any) -> None:
    """B5: it says that it has loaded them; its checksum says that it has not."""
    use_engine("DropsUpdates")
    with pytest.raises(
        RunFailed, match=r"holds other weights than it was sent: version 1 with checksum \w{16}, not version 1"
    ):
        small_trainer(tmp_path, LOCKSTEP).train()
    assert status(tmp_path)["updates"] <= 1


def test_a_worker_that_does_not_read_keeps_nobody_waiting(tmp_path: Path) -> None:
    """D3: neither what is sent to it nor its end."""
    fd = open_memory()
    process = WorkerProcess(0, fd, tmp_path, 1)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        start = time.monotonic()
        for _ in range(20):
            process.send(("generate", list(range(300_000))))
        assert time.monotonic() - start < 5
        assert process.wait(0.0) is None
    finally:
        process.kill()
        os.close(fd)
    assert time.monotonic() - start < 7
    assert process.wait(0.0) == -signal.SIGKILL


def pool(path: Path, *overrides: str) -> WorkerPool:
    config = small_config(*overrides).rollout
    return WorkerPool(config, spawn_workers(config, path), path, lambda name, body: None)


NOWHERE = EngineSpec(
    "engines:NeverBuilt", "", {}, False, dict.fromkeys(("rollout", "rollout_head", "wire"), "fp32"), "cpu", 1, 1
)


def test_a_stop_ends_the_wait_for_workers_that_are_still_starting(tmp_path: Path) -> None:
    starting = pool(tmp_path)
    try:
        with pytest.raises(Interrupted):
            starting.initialise(NOWHERE, should_stop=lambda: True)
    finally:
        starting.close()
    assert not workers()


def test_a_worker_that_does_not_start_in_time_is_named(tmp_path: Path) -> None:
    late = pool(tmp_path, "rollout.startup_timeout_s=0.2", "rollout.num_workers=2")
    try:
        os.kill(late.members[1].process.pid, signal.SIGSTOP)
        with pytest.raises(RunFailed, match=r"generator worker .*1 did not start its engine in 0.2 s"):
            late.initialise(NOWHERE)
    finally:
        late.close()
    assert not workers()


def test_workers_end_with_their_pool_and_leave_no_descriptor(tmp_path: Path) -> None:
    gc.collect()  # what other tests left to be closed
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        pool(tmp_path, "rollout.num_workers=2").close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not workers()
