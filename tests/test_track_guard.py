"""A tracker may fail, hang or be slow in any call: the training notices nothing but a warning."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from grpo_exp.track import NullTracker, TrackedRun, guarded
from grpo_exp.track import guard as guard_module

RUN = TrackedRun(run_dir=Path("run"), name="run", config={})


class Recorder:
    """Notes its calls with the process and the thread that they came in."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.pids: set[int] = set()

    def _note(self, *call: object) -> None:
        self.calls.append(call)
        self.pids.add(os.getpid())

    def start(self, run: TrackedRun) -> None:
        self._note("start", run.name)

    def log(self, step: int, row: Mapping[str, float | None]) -> None:
        self._note("log", step, dict(row))

    def finish(self, exit_code: int) -> None:
        self._note("finish", exit_code)


class Failing(Recorder):
    def __init__(self, error: BaseException, methods: set[str]) -> None:
        super().__init__()
        self._error = error
        self._methods = methods

    def _note(self, *call: object) -> None:
        super()._note(*call)
        if call[0] in self._methods:
            raise self._error


class Hanging(Recorder):
    """Hangs in one method until it is abandoned."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method
        self._abandoned = threading.Event()

    def _note(self, *call: object) -> None:
        super()._note(*call)
        if call[0] == self._method:
            self._abandoned.wait(30)

    def abandon(self) -> None:
        self._abandoned.set()


def use(tracker: Recorder, limit_s: float = 5.0, steps: int = 3) -> list[str]:
    """A whole run. Returns the warnings."""
    warnings: list[str] = []
    main = threading.get_ident()

    def warn(text: str) -> None:
        assert threading.get_ident() == main
        warnings.append(text)

    guard = guarded(tracker, warn, limit_s)
    guard.start(RUN)
    for step in range(steps):
        guard.log(step, {"loss": 1.0})
    guard.finish(1)
    return warnings


def test_every_call_arrives_once_and_in_order() -> None:
    tracker = Recorder()
    assert use(tracker) == []
    assert tracker.calls == [("start", "run"), *[("log", step, {"loss": 1.0}) for step in range(3)], ("finish", 1)]


def test_a_row_is_taken_as_it_was_when_it_was_logged() -> None:
    tracker, row = Recorder(), {"loss": 1.0}
    guard = guarded(tracker)
    guard.start(RUN)
    guard.log(0, row)
    row["loss"] = 2.0
    guard.finish(0)
    assert tracker.calls[1] == ("log", 0, {"loss": 1.0})


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), SystemExit(3), KeyboardInterrupt(), BrokenPipeError(32, "pipe")]
)
def test_a_tracker_that_raises_everywhere_costs_one_warning_per_kind(error: BaseException) -> None:
    """F2, F8: neither training nor its exit code depends on the tracker."""
    warnings = use(Failing(error, {"start", "log", "finish"}))
    assert [text.split(" failed")[0] for text in warnings] == ["tracker: start", "tracker: finish"]
    assert all(type(error).__name__ in text and "training goes on" in text for text in warnings)


def test_a_tracker_that_could_not_start_gets_no_rows_but_the_exit_code() -> None:
    tracker = Failing(RuntimeError("broken"), {"start"})
    assert len(use(tracker)) == 1
    assert [call[0] for call in tracker.calls] == ["start", "finish"]


def test_a_row_that_fails_is_warned_of_once_and_the_next_are_tried() -> None:
    tracker = Failing(ValueError("bad row"), {"log"})
    assert use(tracker, steps=100) == ["tracker: log failed, training goes on: ValueError: bad row"]
    assert len(tracker.calls) == 102


@pytest.mark.parametrize("method", ["log", "finish"])
def test_a_tracker_that_hangs_holds_up_nothing_but_the_end_and_that_for_its_limit(method: str) -> None:
    """F8: ``finish`` has a time limit."""
    tracker = Hanging(method)
    before = time.monotonic()
    warnings = use(tracker, limit_s=0.3)
    assert time.monotonic() - before < 5
    assert warnings == ["the tracker did not finish within 0.3 s and is left behind"]
    assert tracker.calls[-1] == ("finish", 1)  # abandoned, it went on to the end


def test_a_tracker_that_hangs_at_the_start_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "START_S", 0.2)
    assert len(use(Hanging("start"), limit_s=0.2)) == 2


def test_a_tracker_that_falls_behind_loses_rows_but_never_memory_or_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "QUEUE_ROWS", 10)
    tracker = Hanging("log")
    warnings = use(tracker, limit_s=0.2, steps=1000)
    assert warnings[0].startswith("the tracker is 10 rows behind and misses rows from step 1")
    assert [call[0] for call in tracker.calls] == ["start", "log", "finish"]  # abandoned, it is spared the rest


def test_calls_before_the_start_and_after_the_end_do_nothing() -> None:
    tracker = Recorder()
    guard = guarded(tracker)
    guard.log(0, {})
    guard.finish(0)
    assert tracker.calls == []
    guard.start(RUN)
    guard.finish(0)
    guard.finish(1)
    guard.log(1, {})
    assert tracker.calls == [("start", "run"), ("finish", 0)]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking with threads is what is tested
def test_calls_of_a_forked_child_are_ignored() -> None:
    """F9: all calls come from the main process."""
    tracker = Recorder()
    guard = guarded(tracker)
    guard.start(RUN)
    child = os.fork()
    if child == 0:
        try:
            guard.log(1, {})
            guard.finish(1)
        finally:
            os._exit(len(tracker.calls))
    assert os.waitpid(child, 0)[1] >> 8 == 1  # the start that it inherited
    guard.finish(0)
    assert tracker.pids == {os.getpid()}


def test_the_null_tracker_does_nothing() -> None:
    guard = guarded(NullTracker())
    guard.start(RUN)
    guard.log(0, {"loss": None})
    guard.finish(0)


@pytest.mark.parametrize(("exit_code", "num_warnings"), [(0, 0), (143, 1)])
def test_an_artifact_has_more_time_where_the_run_is_done_and_none_where_it_is_being_stopped(
    exit_code: int, num_warnings: int
) -> None:
    class Uploading(Recorder):
        artifact_s = 30.0

        def finish(self, exit_code: int) -> None:
            time.sleep(0.5)
            super().finish(exit_code)

    tracker, warnings = Uploading(), list[str]()
    guard = guarded(tracker, warnings.append, limit_s=0.1)
    guard.start(RUN)
    guard.finish(exit_code)
    assert len(warnings) == num_warnings
    assert (("finish", 0) in tracker.calls) == (exit_code == 0)
