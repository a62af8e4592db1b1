"""Real vLLM servers that a worker starts: what comes over HTTP is what transformers says, also through a faulty network."""

import os
import signal
import time
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from grpo_exp import assets
from grpo_exp.errors import ConfigError, RunFailed
from grpo_exp.precision import DTYPES
from grpo_exp.rollout.process import open_memory
from grpo_exp.rollout.types import EngineSpec, Generated
from grpo_exp.rollout.vllm_server import VllmServerEngine
from grpo_exp.sync.shm import Sender

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make setup-vllm", allow_module_level=True)

from small_runs import check_groups, small_trainer, status
from vllm_engine import Served, all_gaps, requests
from vllm_fake import Fault, FaultyProxy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TINY = str(assets.path("tiny"))
OPTIONS = {
    "max_model_len": None, "kv_cache_gib": 0.0625, "enforce_eager": None, "token_variable": "TOKEN_OF_A_TEST",
    "http_retries": 3, "http_timeout_s": 60.0, "startup_timeout_s": 300.0, "sync": "shm", "sync_dir": "",
}  # fmt: skip
TOLERANCE = {"fp32": 1e-5, "bf16": 0.4, "fp16": 0.06}


def spec(dtype: str, **options: Any) -> EngineSpec:
    dtypes = dict.fromkeys(("rollout", "rollout_head", "wire"), dtype)
    return EngineSpec("", TINY, {}, False, dtypes, "cpu", 1, 64, OPTIONS | options)


class ServedOverHttp(Served):
    """The same as :class:`Served`, with a server in the place of the engine in this process."""

    def __init__(self, dtype: str, **options: Any) -> None:
        self.path, self.dtype = TINY, dtype
        self.fd = open_memory()
        self.sender = Sender(self.fd, DTYPES[dtype], DTYPES[dtype])
        self.models = {}
        self.engine: Any = VllmServerEngine(spec(dtype, **options))
        self.sync(0)


@pytest.fixture(scope="module", params=["fp32", "bf16", "fp16"])
def served(request: pytest.FixtureRequest) -> Iterator[ServedOverHttp]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = ServedOverHttp(request.param)
    yield one
    one.close()


def only_fp32(served: ServedOverHttp) -> None:
    if served.dtype != "fp32":
        pytest.skip("once is enough")


def test_dtypes_and_log_probabilities_are_those_that_were_declared(served: ServedOverHttp) -> None:
    """A7, B2: at another temperature than 1."""
    sites = ("rollout", "rollout_head", "kv_cache", "wire")
    assert served.engine.observed() == dict.fromkeys(sites, served.dtype)
    assert served.engine.about["logprobs"] == "processed_logprobs"
    made = requests(temperature=0.7)
    assert np.abs(all_gaps(served, made, served.run(made))).max() < TOLERANCE[served.dtype]


def test_after_twenty_syncs_in_flight_every_token_has_its_versions_logprob(served: ServedOverHttp) -> None:
    """B5, B6: the server's kernels are read back at every sync, and what was in flight goes on."""
    loads: list[int] = []

    def sync_now_and_then(step: int) -> None:
        if len(loads) < 20 and step % 2:
            loads.append(served.sync(served.next_version()))

    longest = 0
    while len(loads) < 20:
        made = requests(max_new=64, temperature=1.5)
        answers = served.run(made, sync_now_and_then)
        assert np.abs(all_gaps(served, made, answers)).max() < TOLERANCE[served.dtype]
        longest = max(longest, *(len(set(r.versions.tolist())) for one in answers.values() for r in one.rollouts))
    assert longest > 1, "no completion outlived a sync"
    assert len(set(loads)) == 20


def test_after_syncs_between_completions_all_tokens_are_of_the_last_version(served: ServedOverHttp) -> None:
    for _ in range(20):
        served.sync(served.next_version())
    made = requests()
    answers = served.run(made)
    assert {v for one in answers.values() for r in one.rollouts for v in r.versions} == {served.engine.version}
    assert np.abs(all_gaps(served, made, answers)).max() < TOLERANCE[served.dtype]


def test_other_bytes_than_were_sent_change_nothing_and_the_next_sync_works(served: ServedOverHttp) -> None:
    """B5, B7"""
    only_fp32(served)
    version = served.engine.version
    payload = served.sender.write(9999, served.trained(1))
    os.pwrite(served.fd, b"\x01\x02\x03\x04", payload.slots[-1].offset)
    with pytest.raises(RunFailed, match="other weights arrived than were sent for version 9999"):
        served.engine.load(payload, served.fd)
    assert served.engine.version == version
    made = requests()
    assert np.abs(all_gaps(served, made, served.run(made))).max() < 1e-5
    served.sync(served.next_version())
    assert np.abs(all_gaps(served, made, served.run(made))).max() < 1e-5


def test_completions_of_one_prompt_differ_and_the_whole_repeats(served: ServedOverHttp) -> None:
    """B15"""
    only_fp32(served)
    first, again = served.run(requests()), served.run(requests())
    ids = {serial: [rollout.token_ids for rollout in one.rollouts] for serial, one in first.items()}
    assert ids == {serial: [rollout.token_ids for rollout in one.rollouts] for serial, one in again.items()}
    assert all(len({tuple(row) for row in rows}) > 1 for rows in ids.values())


def test_nobody_without_the_token_may_use_any_path(served: ServedOverHttp) -> None:
    only_fp32(served)
    for path in ("/health", "/v1/models", "/server_info"):
        with pytest.raises(HTTPError, match="401"):
            urlopen(served.engine.client.url + path, timeout=10)


def test_a_server_of_another_dtype_or_model_is_refused(served: ServedOverHttp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A7"""
    only_fp32(served)
    monkeypatch.setenv("TOKEN_OF_A_TEST", served.engine.client.token)
    with pytest.raises(ConfigError, match="it serves dtype float32; start it with"):
        VllmServerEngine(spec("bf16", url=served.engine.client.url))
    monkeypatch.setenv("TOKEN_OF_A_TEST", "a guess")
    with pytest.raises(ConfigError, match="status 401"):
        VllmServerEngine(spec("fp32", url=served.engine.client.url))


@pytest.mark.parametrize("fault", [Fault.dropped, Fault.delayed, Fault.status_500, Fault.garbage])
def test_what_comes_through_a_faulty_network_is_right(
    served: ServedOverHttp, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    only_fp32(served)
    monkeypatch.setenv("TOKEN_OF_A_TEST", served.engine.client.token)
    proxy = FaultyProxy(served.engine.client.url)
    try:
        through = ServedOverHttp("fp32", url=proxy.url, http_timeout_s=5.0)
        proxy.faults += [fault, fault]
        made = requests()
        answers = through.run(made)
        assert all(isinstance(answer, Generated) for answer in answers.values())
        assert not proxy.faults
        assert np.abs(all_gaps(through, made, answers)).max() < 1e-5
        through.close()
    finally:
        proxy.close()
        served.sync(served.next_version())


class KillsTheServer:
    """After the second step, for good: nobody starts it again."""

    def __init__(self, pid: int) -> None:
        self.pid, self.at = pid, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            os.kill(self.pid, signal.SIGKILL)
            self.at = time.monotonic()


def test_a_server_that_is_gone_for_good_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D11: a server that the run was given, which nobody starts again; within the limit, and there is a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = VllmServerEngine(spec("fp32"))
    assert given.server is not None
    kill = KillsTheServer(given.server.pid)
    monkeypatch.setenv("VLLM_API_KEY", given.client.token)
    overrides = (
        f"rollout.urls=[{given.client.url}]", "rollout.http_retries=1", "rollout.max_failures=2", "trainer.max_steps=1000",
        "trainer.save_every=1", "trainer.eval_every=0", "trainer.stall_timeout_s=120", "probe.every=0",
    )  # fmt: skip
    try:
        with pytest.raises(RunFailed, match="ConnectionRefusedError"):
            small_trainer(tmp_path, "rollout=vllm_server", *overrides, callbacks=[kill]).train()
        assert 0 < time.monotonic() - kill.at < 120
    finally:
        given.close()
    assert status(tmp_path)["state"] == "failed"
    assert "ConnectionRefusedError" in status(tmp_path)["reason"]
    assert any((tmp_path / "checkpoints").iterdir())
    check_groups(tmp_path)
