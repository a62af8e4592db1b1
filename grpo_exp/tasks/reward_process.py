"""The process that runs the user's reward functions, so that one that hangs or crashes can be ended for certain.

:class:`RewardChild` is the trainer's hold on it, :func:`main` what runs in it. The two are joined by a socket pair; the
process ends when the trainer's end is closed, also in the middle of a function, however the trainer died.
"""

import asyncio
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import CodeType
from typing import Any

from grpo_exp.tasks import import_path
from grpo_exp.tasks.evaluate import evaluate
from grpo_exp.tasks.messages import Answer, Broken, Group, Ready, Started

# The child looks modules up where the trainer does, in the same order.
_START = (
    "import sys, os; sys.path[:] = sys.argv[2].split(os.pathsep); "
    "from grpo_exp.tasks.reward_process import main; main(int(sys.argv[1]))"
)


class RewardChild:
    """One running reward process. ``functions`` is a pickled list of callables and import paths.

    The process has a session of its own: Ctrl-C on the terminal is the trainer's affair, and :meth:`kill` also ends
    whatever programs a reward function has started.
    """

    def __init__(self, functions: bytes) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", _START, str(theirs.fileno()), os.pathsep.join(sys.path)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        # What fits into the socket's buffer is sent without waiting for the process to read it.
        self.buffer_bytes = ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
        self.connection: Connection[bytes, Answer] = Connection(ours.detach())
        self.started_s = time.monotonic()
        self.ready = False
        self.ended = False
        self.send(functions)

    def send(self, data: bytes) -> None:
        try:
            self.connection.send_bytes(data)
        except ConnectionError:
            self.ended = True

    def receive(self) -> list[Answer]:
        """Everything that has arrived, without waiting; sets ``ended`` when the process is gone."""
        answers: list[Answer] = []
        try:
            while self.connection.poll():
                answers.append(self.connection.recv())
        except (EOFError, ConnectionError):
            self.ended = True
        return answers

    def kill(self) -> int:
        """End the process and all it started; returns its exit code, minus the signal where one ended it."""
        self.connection.close()
        if self.ended:  # it is dying by itself: let it, so that the exit code tells why
            try:
                self.process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                pass  # it only closed its end of the socket
        self._kill_group()
        return self.process.wait()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # nothing of it is left


def main(fd: int) -> None:
    """Serve groups from the socket ``fd`` until it is closed."""
    os.set_inheritable(fd, False)  # a program that a reward function starts must not keep the socket open
    die_with_trainer(fd)
    connection: Connection[Answer, Group] = Connection(fd)
    try:
        serve(connection)
    except (EOFError, ConnectionError):
        pass  # the trainer is done


def serve(connection: "Connection[Answer, Group]") -> None:
    data = connection.recv_bytes()
    try:
        functions = [resolve(function) for function in pickle.loads(data)]
    except BaseException:
        connection.send(Broken(traceback.format_exc()))
        return
    connection.send(Ready())
    with asyncio.Runner() as runner:
        while True:
            group = connection.recv()
            connection.send(Started(group.serial, time.monotonic()))
            connection.send(evaluate(functions, group, runner))


def code_of_file(filename: str, arguments: tuple[Any, ...]) -> CodeType:
    """A code object that knows its file, so that a traceback can quote the lines of a function sent by value."""
    return CodeType(*arguments).replace(co_filename=filename)


def resolve(function: Callable[..., Any] | str) -> Callable[..., Any]:
    return import_path.load(function) if isinstance(function, str) else function


def die_with_trainer(fd: int) -> None:
    """End this process with the trainer even while a function runs, and with it all the function started.

    A thread sees the socket close. It cannot run while a function holds the interpreter lock for good (a regular
    expression that backtracks for ever), so on Linux the kernel is asked to kill this process too.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        try:
            ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        except (OSError, AttributeError):
            pass  # a C library without prctl: the thread remains
    threading.Thread(target=wait_for_hangup, args=(fd,), daemon=True).start()


def wait_for_hangup(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is reported whatever is asked for
    gone = select.POLLHUP | select.POLLERR | select.POLLNVAL
    while not any(event & gone for _, event in poll.poll()):
        time.sleep(0.1)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
