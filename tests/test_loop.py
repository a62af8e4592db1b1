"""The loop of a worker whose engine takes in requests while others run."""

from collections import deque
from typing import Any

import pytest
from engines import completed

from grpo_exp.rollout.loop import JoiningLoop, Unanswered, WorkerLoop, loop_for
from grpo_exp.rollout.types import EngineSpec, Generated, Request
from grpo_exp.sync.shm import Payload

SPEC = EngineSpec("", "", {}, False, {}, "cpu", 1, batch_size=8)


class Joining:
    """Gives every request as many steps as it has new tokens."""

    def __init__(self) -> None:
        self.version, self.num_running = 0, 0
        self.left: dict[int, int] = {}
        self.requests: dict[int, Request] = {}
        self.log: list[Any] = []
        self.fails: set[int] = set()

    def load(self, payload: Payload, fd: int) -> int:
        self.log.append(("load", payload.version, sorted(self.left)))
        self.version = payload.version
        return 0

    def observed(self) -> dict[str, str]:
        return {"rollout": "fp32"}

    def add(self, request: Request) -> None:
        self.log.append(("add", request.serial))
        self.requests[request.serial], self.left[request.serial] = request, request.max_new_tokens
        self.num_running += request.num_completions

    def step(self) -> list[Generated | Unanswered]:
        ended = []
        for serial in list(self.left):
            self.left[serial] -= 1
            if self.left[serial] == 0:
                del self.left[serial]
                request = self.requests[serial]
                self.num_running -= request.num_completions
                failed = serial in self.fails
                ended.append(Unanswered(serial, "no") if failed else completed(request, self.version))
        return ended


class Loop:
    """A loop, what it sent, and the messages that are still to come in: one a step."""

    def __init__(self, in_flight: bool = True) -> None:
        self.engine, self.sent = Joining(), []
        made = loop_for(self.engine, SPEC, -1, in_flight, self.sent.append)
        assert isinstance(made, JoiningLoop)
        self.loop, self.coming = made, deque[tuple[str, Any]]()
        self.engine.version = 0

    def run(self, *messages: tuple[str, Any], steps: int = 50) -> None:
        self.coming.extend(messages)
        self.drain()
        for _ in range(steps):
            self.loop.work(self.drain)

    def drain(self) -> None:
        if self.coming:
            self.loop.handle(*self.coming.popleft())

    def answered(self) -> list[int]:
        return [generated.serial for kind, body in self.sent if kind == "generated" for generated in body]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.sent]


def request(serial: int, num_completions: int = 1, steps: int = 3, **changes: Any) -> Request:
    return Request(serial, [5], num_completions, steps, 1.0, 0, evaluation=serial < 0, **changes)


def sync(version: int) -> tuple[str, Payload]:
    return "sync", Payload(version, None, (), 0)  # type: ignore[arg-type]


def test_an_engine_without_steps_gets_the_loop_of_batches() -> None:
    class Batches:
        version = 0

    assert type(loop_for(Batches(), SPEC, -1, True, lambda message: None)) is WorkerLoop


def test_a_request_joins_while_another_runs() -> None:
    loop = Loop()
    loop.run(("generate", [request(0, steps=9)]), ("generate", [request(1, steps=2)]))
    assert loop.answered() == [1, 0]


def test_no_more_completions_run_than_a_batch_holds_unless_one_request_is_larger() -> None:
    loop = Loop()
    running = []
    step = loop.engine.step
    loop.engine.step = lambda: running.append(loop.engine.num_running) or step()  # type: ignore[method-assign]
    loop.run(("generate", [request(0, 5), request(1, 3), request(2, 4), request(3, 20)]))
    assert max(running) == 20
    assert set(running) == {8, 4, 20}
    assert sorted(loop.answered()) == [0, 1, 2, 3]


def test_evaluation_goes_first() -> None:
    loop = Loop()
    loop.run(("generate", [request(0, 8), request(-1, 8)]))
    assert loop.engine.log == [("add", -1), ("add", 0)]


def test_a_request_that_was_among_failures_runs_by_itself() -> None:
    """D3"""
    loop = Loop()
    loop.run(("generate", [request(0), request(1, alone=True), request(2)]))
    starts = [body for kind, body in loop.sent if kind in ("started", "generated")]
    order = [one if isinstance(one, int) else f"end {one.serial}" for body in starts for one in body]
    assert order == [0, "end 0", 1, "end 1", 2, "end 2"]


@pytest.mark.parametrize("in_flight", [True, False])
def test_weights_are_loaded_between_two_steps_or_when_nothing_runs(in_flight: bool) -> None:
    """B6: and until they are, nothing new begins."""
    loop = Loop(in_flight)
    loop.run(("generate", [request(0, steps=5)]), sync(1), ("generate", [request(1)]))
    expected = [("add", 0), ("load", 1, [0] if in_flight else []), ("add", 1)]
    assert loop.engine.log == expected


def test_a_load_that_fails_is_said_and_the_rest_goes_on() -> None:
    """B7"""
    loop = Loop()

    def broken(payload: Payload, fd: int) -> int:
        raise OSError("the wire is cut")

    loop.engine.load = broken  # type: ignore[method-assign]
    loop.run(("generate", [request(0)]), sync(1))
    assert "sync_failed" in loop.kinds()
    assert "generated" in loop.kinds()


def test_an_engine_without_weights_waits_for_them() -> None:
    loop = Loop()
    loop.engine.version = -1
    loop.run(("generate", [request(0)]), steps=3)
    assert loop.engine.log == []
    assert loop.loop.idle
    loop.run(sync(1))
    assert loop.engine.log == [("load", 1, []), ("add", 0)]


def test_what_is_observed_goes_ahead_of_the_first_answer_and_is_said_once() -> None:
    loop = Loop()
    loop.run(("generate", [request(0), request(1, steps=5)]))
    kinds = [kind for kind in loop.kinds() if kind in ("observed", "generated")]
    assert kinds == ["observed", "generated", "generated"]


def test_a_request_that_the_engine_gives_up_fails_alone() -> None:
    loop = Loop()
    loop.engine.fails = {1}
    loop.run(("generate", [request(0), request(1)]))
    assert ("failed", ([1], "no")) in loop.sent
    assert loop.answered() == [0]


def test_a_loop_with_nothing_to_do_is_idle() -> None:
    loop = Loop()
    assert loop.loop.idle
    loop.loop.handle("generate", [request(0)])
    assert not loop.loop.idle
    loop.run()
    assert loop.loop.idle
