"""A worker and its server over a network that is not to be trusted: what comes back is right, or the run is told why not."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import build, checkpoint
from vllm_fake import FakeVllm, Fault

from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.rollout.loop import JoiningEngine, JoiningLoop, Unanswered
from grpo_exp.rollout.process import open_memory
from grpo_exp.rollout.types import EngineSpec, Generated, Request
from grpo_exp.rollout.vllm_server import VllmServerEngine
from grpo_exp.sync.shm import Sender

OPTIONS = {
    "max_model_len": None, "kv_cache_gib": 0.0625, "enforce_eager": None, "token_variable": "TOKEN_OF_A_TEST",
    "http_retries": 3, "http_timeout_s": 5.0, "startup_timeout_s": 60.0, "sync": "shm", "sync_dir": "",
}  # fmt: skip
FP32 = torch.float32


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    server = FakeVllm(str(checkpoint()))
    yield server
    server.close()


def spec(url: str, **options: Any) -> EngineSpec:
    dtypes = dict.fromkeys(("rollout", "rollout_head", "wire"), "fp32")
    return EngineSpec("", str(checkpoint()), {}, False, dtypes, "cpu", 1, 64, OPTIONS | {"url": url} | options)


class Worker:
    """An engine and the trainer's side of its weights."""

    def __init__(self, url: str, **options: Any) -> None:
        self.engine = VllmServerEngine(spec(url, **options))
        self.fd = open_memory()
        self.sender = Sender(self.fd, FP32, FP32)

    def sync(self, version: int) -> int:
        return self.engine.load(self.sender.write(version, build(seed=version)), self.fd)

    def run(self, *requests: Request, sync_after_s: float | None = None) -> list[Generated | Unanswered]:
        for request in requests:
            self.engine.add(request)
        answers: list[Generated | Unanswered] = []
        start = time.monotonic()
        while self.engine.num_running:
            answers += self.engine.step()
            if sync_after_s is not None and time.monotonic() - start > sync_after_s:
                self.sync(self.engine.version + 1)
                sync_after_s = None
            assert time.monotonic() - start < 30
        return answers

    def close(self) -> None:
        self.engine.close()
        os.close(self.fd)


@pytest.fixture
def worker(fake: FakeVllm) -> Iterator[Worker]:
    made = Worker(fake.url)
    made.sync(0)
    yield made
    made.close()


def request(serial: int = 0, **changes: Any) -> Request:
    return replace(Request(serial, [5, 6, 7], 2, 4, 1.0, seed=1), **changes)


def check_right(answer: Generated | Unanswered, prompt: int = 3) -> Generated:
    """Every token and log-probability at its place, each under the version that the server had then."""
    assert isinstance(answer, Generated)
    assert answer.problem() is None
    for rollout in answer.rollouts:
        positions = np.arange(prompt, prompt + len(rollout.token_ids))
        assert rollout.token_ids == (10 + positions).tolist()
        np.testing.assert_array_equal(rollout.mu, (-rollout.versions - positions / 1000).astype(np.float32))
    return answer


def test_the_engine_takes_requests_while_others_run(worker: Worker) -> None:
    assert isinstance(worker.engine, JoiningEngine)
    assert worker.engine.about["logprobs"] == "processed_logprobs"
    answers = worker.run(*(request(serial) for serial in range(5)))
    assert sorted(check_right(answer).serial for answer in answers) == [0, 1, 2, 3, 4]


def test_a_sync_pauses_loads_drops_the_cache_and_resumes_in_this_order(fake: FakeVllm, worker: Worker) -> None:
    """B6"""
    fake.log.clear()
    worker.sync(1)
    assert fake.log == ["pause+clear", "load 1 with 0 running", "resume"]


def test_completions_in_flight_go_on_after_a_sync_each_token_under_its_version(fake: FakeVllm, worker: Worker) -> None:
    """B6: no decode step comes in between, and nothing is lost."""
    fake.pace_s = 0.01
    answers = worker.run(*(request(s, max_new_tokens=40) for s in range(3)), sync_after_s=0.15)
    assert fake.log[-2] == "load 1 with 0 running"
    for answer in answers:
        for rollout in check_right(answer).rollouts:
            assert len(rollout.token_ids) == 40
            assert sorted(set(rollout.versions.tolist())) == [0, 1]


@pytest.mark.parametrize("serving", [True, False])
def test_a_load_that_fails_leaves_the_old_version_serving_where_it_can_and_the_next_one_works(
    fake: FakeVllm, worker: Worker, serving: bool
) -> None:
    """B7: resume is sent all the same."""
    fake.load_error = {"error": "the wire is cut", "serving": serving}
    with pytest.raises(RunFailed, match="the wire is cut"):
        worker.sync(1)
    assert fake.log[-1] == "resume"
    assert worker.engine.version == (0 if serving else -1)
    fake.load_error = None
    worker.sync(2)
    assert check_right(worker.run(request())[0]).version == 2


def test_a_sync_whose_outcome_nobody_knows_lets_nothing_be_sampled_until_the_next_one(
    fake: FakeVllm, worker: Worker
) -> None:
    """B7, D11: an answer of 500 to an update is an error with the body of that answer."""
    fake.path = "/collective_rpc"
    fake.faults.append(Fault.status_500)
    with pytest.raises(RuntimeError, match="status 500: the engine is upset"):
        worker.sync(1)
    assert worker.engine.version == -1
    with pytest.raises(RuntimeError, match="no weights"):
        worker.engine.add(request())
    worker.sync(2)
    check_right(worker.run(request())[0])


@pytest.mark.parametrize("transport", ["shm", "file"])
def test_the_server_reads_just_what_the_trainer_wrote(fake: FakeVllm, tmp_path: Path, transport: str) -> None:
    made = Worker(fake.url, sync=transport, sync_dir=str(tmp_path / "sync"))
    for version in range(3):
        made.sync(version)
        assert fake.received == os.pread(made.fd, os.fstat(made.fd).st_size, 0)
    made.close()
    assert not list(tmp_path.glob("sync/*")), "the file is gone with the worker"


@pytest.mark.parametrize("fault", [f for f in Fault if f is not Fault.refused])
def test_what_a_retry_can_mend_is_mended(fake: FakeVllm, worker: Worker, fault: Fault) -> None:
    """D11: a reset among others; and every retry is told to the trainer."""
    fake.faults += [fault, fault]
    said: list[tuple[str, Any]] = []
    loop = JoiningLoop(worker.engine, worker.engine.spec, worker.fd, True, said.append)
    loop.handle("generate", [request()])
    while not loop.idle:
        loop.work(lambda: None)
    [[generated]] = [body for kind, body in said if kind == "generated"]
    check_right(generated)
    retries = [error for kind, body in said if kind == "retried" for error in body]
    assert len(retries) == (0 if fault is Fault.delayed else 2)


def test_an_answer_that_comes_too_late_is_asked_for_again(fake: FakeVllm) -> None:
    made = Worker(fake.url, http_timeout_s=0.3)
    made.sync(0)
    fake.faults.append(Fault.delayed)
    check_right(made.run(request())[0])
    made.close()


GIVEN_UP = {
    Fault.dropped: "RemoteDisconnected",
    Fault.status_500: "status 500: the engine is upset",
    Fault.garbage: "not JSON",
    Fault.another_form: "garbage: KeyError: 'index'",
    Fault.too_few_logprobs: "garbage: ValueError: 4 tokens, 3 log-probs",
}


@pytest.mark.parametrize("fault", GIVEN_UP)
def test_a_request_that_never_works_is_given_up_and_the_others_are_not(
    fake: FakeVllm, worker: Worker, fault: Fault
) -> None:
    """D3, D11: after rollout.http_retries, with the reason; so is one whose answers lack token ids or log-probs."""
    fake.faults += [fault] * 4
    (answer,) = worker.run(request())
    assert isinstance(answer, Unanswered)
    assert GIVEN_UP[fault] in answer.error
    check_right(worker.run(request(1))[0])


def test_what_the_server_refuses_is_not_asked_again(fake: FakeVllm, worker: Worker) -> None:
    fake.faults.append(Fault.refused)
    (answer,) = worker.run(request())
    assert isinstance(answer, Unanswered)
    assert "status 400: the prompt is too long" in answer.error


def test_a_server_that_is_gone_for_good_ends_the_worker_with_the_reason(fake: FakeVllm) -> None:
    """D11: within the limit."""
    made = Worker(fake.url, http_retries=1)
    made.sync(0)
    fake.close()
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"the server is gone: http://127.0.0.1:\d+/health: ConnectionRefusedError"):
        made.run(request())
    assert time.monotonic() - start < 5
    made.close()
    fake.__init__(str(checkpoint()))  # type: ignore[misc]  # for the fixture to close


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"dtype": "torch.bfloat16"}, "it serves dtype bfloat16"),
        ({"model": "/another/model"}, "it serves model /another/model"),
        ({"logprobs_mode": "raw_logprobs"}, "it serves logprobs_mode raw_logprobs"),
    ],
)
def test_a_server_that_serves_something_else_is_refused(fake: FakeVllm, changed: dict[str, str], expected: str) -> None:
    """A7, B2: before training, with the command that would be right."""
    fake.config |= changed
    with pytest.raises(ConfigError, match=expected) as error:
        VllmServerEngine(spec(fake.url))
    assert "vllm serve --model=" in str(error.value)
    assert "--logprobs-mode=processed_logprobs" in str(error.value)


def test_a_server_that_is_not_there_is_named(fake: FakeVllm) -> None:
    with pytest.raises(ConfigError, match=r"rollout.urls='http://127.0.0.1:9': .*ConnectionRefusedError"):
        VllmServerEngine(spec("http://127.0.0.1:9"))


def test_the_token_of_a_server_comes_from_the_environment(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    respond = fake.respond
    monkeypatch.setattr(fake, "respond", lambda *args: seen.append(args[-1]) or respond(*args))
    monkeypatch.setenv("TOKEN_OF_A_TEST", "open sesame")
    VllmServerEngine(spec(fake.url)).close()
    assert set(seen) == {"Bearer open sesame"}
