"""Dealing with what workers send while the trainer computes: a thread that is at work between two given points only.

A backward pass runs outside of Python's lock, so receiving completions, decoding them and having them rewarded fits in
beside it. Outside of :meth:`Background.at_work` the thread sleeps, so nothing of the source needs a lock. It lives
as long as the run: a process that it starts in place of a dead worker would die with it.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Background:
    """Calls ``pump`` again and again while it is at work.

    Args:
        pump: waits for news, also on the descriptor it is given, and deals with them.
    """

    def __init__(self, pump: Callable[[int], None]) -> None:
        self._pump = pump
        self._on, self._off = threading.Event(), threading.Event()
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Pump until the end of the block.

        Raises:
            RunFailed, …: at the end of the block, whatever ``pump`` raised.
        """
        if self._thread is None:
            self._awake, self._wake = os.pipe()
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()
        self._off.clear()
        self._on.set()
        try:
            yield
        finally:
            self._on.clear()
            os.write(self._wake, b"\0")  # it may be waiting for news
            self._off.wait()
            os.read(self._awake, 1)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread. Can be called again."""
        if self._thread is None:
            return
        self._closed = True
        self._on.set()
        self._thread.join()
        self._thread = None
        os.close(self._awake)
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            self._on.wait()
            if self._closed:
                return
            try:
                while self._on.is_set():
                    self._pump(self._awake)
            except BaseException as error:  # the trainer's thread raises it
                self._error = error
                self._on.clear()
            self._off.set()
