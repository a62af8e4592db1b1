"""Starting and ending a generator worker. Imports no torch: workers start to import theirs while the trainer does.

A worker is ``python -m grpo_exp.rollout.worker``, not a fork and not a multiprocessing child, so a user's script needs no
``__main__`` guard. It inherits one end of a socket pair and the descriptor of the shared weights; when its parent dies,
however that happens, it dies too.
"""

import ctypes
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..config.schema import Backend, RolloutConfig

ENGINE_MODULES = {backend: f"grpo_exp.rollout.{backend.value}" for backend in Backend}
"""What a worker imports first, while nobody knows yet which model it is for."""

ENVIRONMENTS = {
    Backend.hf: {},
    Backend.vllm: {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker's process is the engine's: nothing is left when it dies
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all workers, and the trainer, would be bound to the first core
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    },
    Backend.vllm_server: {},
    Backend.replay: {},
}
"""What has to be set before an engine's package is imported; what the user has set wins."""


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
    """One generator worker's process and the connection to it.

    What is sent goes through a thread, so that a worker that hangs, or is still busy with its imports, never keeps the
    trainer waiting at a full pipe.
    """

    def __init__(
        self, index: int, weights_fd: int, log_dir: Path, num_threads: int, backend: Backend = Backend.hf
    ) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = log_dir / f"worker-{index}.log"
        fds, threads = (theirs.fileno(), weights_fd), str(num_threads)
        own = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        worker = [sys.executable, "-P", "-m", "grpo_exp.rollout.worker", *map(str, fds), ENGINE_MODULES[backend]]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                worker,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENTS[backend] | dict(os.environ) | own,
            )
        theirs.close()
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, daemon=True)
        self._sender.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: tuple[str, Any]) -> None:
        """Never waits. That a worker is gone shows when something is received from it."""
        self._outgoing.put(pickle.dumps(message))

    def _send_all(self) -> None:
        while (data := self._outgoing.get()) is not None:
            try:
                self.connection.send_bytes(data)
            except OSError:
                return

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code, minus the signal where one ended it; None if it still lives after that time."""
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it at once; nothing happens if it has ended."""
        self._process.kill()
        self._process.wait()
        self._outgoing.put(None)
        self._sender.join(1.0)  # its write fails, as nobody is left to read
        self.connection.close()


@dataclass
class Spawned:
    """Worker processes that have been started and told nothing yet, and the descriptor of the weights they inherited."""

    weights_fd: int
    processes: list[WorkerProcess]

    def close(self) -> None:
        end_all(self.processes, timeout_s=0.0)
        self.processes = []
        if self.weights_fd >= 0:
            os.close(self.weights_fd)
            self.weights_fd = -1


def end_all(processes: Iterable[WorkerProcess], timeout_s: float = 3.0) -> None:
    """Ask processes to end, and see that they do within that time, all together."""
    processes = list(processes)
    for process in processes:
        process.send(("stop", None))
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.wait(deadline - time.monotonic())
        process.kill()


def spawn_workers(config: RolloutConfig, log_dir: Path) -> Spawned:
    """Start ``num_workers`` processes. Their imports take seconds, so this comes before the trainer's own."""
    fd = open_memory()
    return Spawned(
        fd,
        [WorkerProcess(index, fd, log_dir, config.num_threads, config.backend) for index in range(config.num_workers)],
    )
