"""Keeps a tracker from ever ending, hanging or slowing down the training.

    training thread                          tracker thread (daemon)
    start ── waits, for at most START_S ──►  tracker.start
    log   ── puts the row in a queue ─────►  tracker.log        a full queue drops the row
    finish ─ waits, for at most limit_s ──►  tracker.finish

What the tracker raises becomes a warning, the first of each kind, handed out in the training thread by its next call.
Python raises a signal's exception in the main thread, so it cannot cut a call of the tracker in two.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Protocol, runtime_checkable

from grpo_exp.track.base import Details, TrackedRun, Tracker

START_S = 120.0  # the tracker has shorter limits of its own: this one is for when they fail
FINISH_S = 20.0
ABANDON_S = 2.0
QUEUE_ROWS = 10_000


@runtime_checkable
class Abandonable(Protocol):
    """A tracker that can be made to give up a call that hangs in the other thread."""

    def abandon(self) -> None: ...


def log_warning(text: str) -> None:
    logging.getLogger("grpo_exp.track").warning(text)


def guarded(tracker: Tracker, on_warning: Callable[[str], None] = log_warning, limit_s: float = FINISH_S) -> Tracker:
    """``tracker`` behind a thread of its own, safe to call at any time.

    Args:
        tracker: not yet started.
        on_warning: is called in the thread that calls the tracker.
        limit_s: seconds that ``finish`` may take; a tracker with ``artifact_s`` has so many more for a run that is done.

    Calls from another process than the one that started it (a forked child) do nothing.
    """
    return _Guarded(tracker, on_warning, limit_s)


class _Guarded:
    def __init__(self, tracker: Tracker, on_warning: Callable[[str], None], limit_s: float) -> None:
        self._tracker = tracker
        self._on_warning = on_warning
        self._limit_s = limit_s
        self.details_every: int = getattr(tracker, "details_every", 0)  # a tracker may know of none
        self._artifact_s: float = getattr(tracker, "artifact_s", 0.0)
        # SimpleQueue, because a signal handler may use it while the thread that it interrupts does.
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._warnings: SimpleQueue[str] = SimpleQueue()
        self._kinds: set[str] = set()
        self._thread: threading.Thread | None = None
        self._pid = -1
        self._takes_rows = False

    def start(self, run: TrackedRun) -> None:
        self._pid = os.getpid()
        tried = threading.Event()

        def start() -> None:
            self._takes_rows = self._try("start", lambda: self._tracker.start(run))
            tried.set()

        self._calls.put(start)
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._thread.start()
        if not tried.wait(START_S):
            self._warn("start is slow", f"the tracker has not started within {START_S:g} s; training goes on")
        self._hand_out_warnings()

    def details(self, step: int, details: Details) -> None:
        if self._thread is not None and self._pid == os.getpid() and self._calls.qsize() < QUEUE_ROWS:
            self._calls.put(lambda: self._details(step, details))

    def log(self, step: int, row: Mapping[str, float | None]) -> None:
        if self._thread is None or self._pid != os.getpid():
            return
        if self._calls.qsize() < QUEUE_ROWS:
            copy = dict(row)
            self._calls.put(lambda: self._log(step, copy))
        else:
            self._warn("rows dropped", f"the tracker is {QUEUE_ROWS} rows behind and misses rows from step {step} on")
        self._hand_out_warnings()

    def finish(self, exit_code: int) -> None:
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._calls.put(lambda: self._finish(exit_code))
        self._calls.put(None)
        limit_s = self._limit_s + (self._artifact_s if exit_code == 0 else 0.0)
        thread.join(limit_s)
        if thread.is_alive():
            self._warn("finish is slow", f"the tracker did not finish within {limit_s:g} s and is left behind")
            if isinstance(self._tracker, Abandonable):
                self._takes_rows = False  # what is queued would only fail, row by row
                self._try("abandon", self._tracker.abandon)
                thread.join(ABANDON_S)
        self._hand_out_warnings()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _log(self, step: int, row: Mapping[str, float | None]) -> None:
        if self._takes_rows:
            self._try("log", lambda: self._tracker.log(step, row))

    def _details(self, step: int, details: Details) -> None:
        if self._takes_rows:
            self._try("details", lambda: self._tracker.details(step, details))

    def _finish(self, exit_code: int) -> None:
        """Also of a tracker that failed to start: what it did begin must not end as a success by itself."""
        self._try("finish", lambda: self._tracker.finish(exit_code))

    def _try(self, name: str, call: Callable[[], None]) -> bool:
        try:
            call()
        except BaseException as error:  # even SystemExit: it would end this thread, and with it the tracker
            kind = type(error).__name__
            text = f"{kind}: {error}" if str(error) else kind
            self._warn(f"{name} {kind}", f"tracker: {name} failed, training goes on: {text}")
            return False
        return True

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._warnings.put(text)

    def _hand_out_warnings(self) -> None:
        while True:
            try:
                text = self._warnings.get_nowait()
            except Empty:
                return
            self._on_warning(text)
