"""Starting and ending a generator worker. Imports no torch: workers start to import theirs while the trainer does.

A worker is ``python -m grpo_exp.rollout.worker``, not a fork and not a multiprocessing child, so a user's script needs no
``__main__`` guard. It inherits one end of a socket pair and the descriptor of the shared weights; when its parent dies,
however that happens, it dies too.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from ..config.schema import RolloutConfig


def open_memory() -> int:
    """A descriptor of an empty anonymous file in memory (an unlinked temporary file where there is no memfd)."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("grpo_exp_weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends (Linux); elsewhere a closed connection has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal_number)


class WorkerProcess:
    """One generator worker's process and the connection to it."""

    def __init__(self, index: int, weights_fd: int, log_dir: Path, num_threads: int) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = log_dir / f"worker-{index}.log"
        threads = str(num_threads)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_exp.rollout.worker", str(theirs.fileno()), str(weights_fd)],
                pass_fds=(theirs.fileno(), weights_fd),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
        theirs.close()
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def close(self, timeout_s: float = 3.0) -> None:
        """Ask it to end, and see that it does."""
        deadline = time.monotonic() + timeout_s
        try:
            self.connection.send(("stop", None))
        except OSError:
            pass  # it is dead already
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        self.kill()


@dataclass
class Spawned:
    """Worker processes that have been started and told nothing yet, and the descriptor of the weights they inherited."""

    weights_fd: int
    processes: list[WorkerProcess]

    def close(self) -> None:
        for process in self.processes:
            process.close(timeout_s=0.0)
        self.processes = []
        if self.weights_fd >= 0:
            os.close(self.weights_fd)
            self.weights_fd = -1


def spawn_workers(config: RolloutConfig, log_dir: Path) -> Spawned:
    """Start ``num_workers`` processes. Their imports take seconds, so this comes before the trainer's own."""
    fd = open_memory()
    return Spawned(fd, [WorkerProcess(index, fd, log_dir, config.num_threads) for index in range(config.num_workers)])
