"""The thread that deals with completions while the trainer computes: at work inside the block, asleep outside."""

import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait

import pytest

from grpo_exp.errors import RunFailed
from grpo_exp.rollout.background import Background


class Pump:
    """Waits for news that never come, as :meth:`RolloutSource.pump` does; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.threads: set[int] = set()
        self.error: BaseException | None = None

    def __call__(self, awake: int) -> None:
        self.calls += 1
        self.threads.add(threading.get_ident())
        if self.error is not None:
            raise self.error
        wait([awake], 60.0)


def wait_for(pump: Pump, calls: int) -> None:
    while pump.calls < calls:
        time.sleep(0.001)


@pytest.fixture
def pump() -> Pump:
    return Pump()


@pytest.fixture
def background(pump: Pump) -> Iterator[Background]:
    found = Background(pump)
    yield found
    found.close()


def test_it_pumps_inside_the_block_only_and_ends_at_once(background: Background, pump: Pump) -> None:
    for _ in range(50):
        before, start = pump.calls, time.monotonic()
        with background.at_work():
            wait_for(pump, before + 1)
        assert time.monotonic() - start < 10.0, "it does not sit out the time that the pump would wait"
        after = pump.calls
        time.sleep(0.002)
        assert pump.calls == after
    assert len(pump.threads) == 1, "one thread for all blocks: processes that it started live as long as it does"
    assert pump.threads != {threading.get_ident()}


def test_what_the_pump_raises_is_raised_at_the_end_of_the_block(background: Background, pump: Pump) -> None:
    pump.error = RunFailed("a worker died once too often")
    with pytest.raises(RunFailed, match="once too often"), background.at_work():
        wait_for(pump, 1)


def test_an_error_of_the_block_itself_is_not_held_up(background: Background, pump: Pump) -> None:
    with pytest.raises(KeyError), background.at_work():
        raise KeyError("x")
    with background.at_work():
        pass


def test_a_block_that_ends_before_the_thread_wakes_leaves_nothing_behind(background: Background) -> None:
    for _ in range(300):
        with background.at_work():
            pass


def test_closing_ends_the_thread_and_its_descriptors(pump: Pump) -> None:
    before = len(os.listdir("/proc/self/fd"))
    background = Background(pump)
    with background.at_work():
        pass
    background.close()
    background.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert "rollouts" not in {thread.name for thread in threading.enumerate()}
