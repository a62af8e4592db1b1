"""What rollout=vllm and rollout=vllm_server are given and what they refuse: no engine is started, vllm need not be there."""

from pathlib import Path

import pytest
from small_runs import small_config

from grpo_exp.checks import find_problems, machine_problems
from grpo_exp.config.schema import Backend, Config
from grpo_exp.precision import resolve
from grpo_exp.rollout.start import engine_spec
from grpo_exp.rollout.types import EngineSpec
from grpo_exp.rollout.vllm import engine_arguments
from grpo_exp.rollout.vllm_local import server_arguments

VLLM = "rollout.backend=vllm"


def config(*overrides: str) -> Config:
    return small_config(*overrides)


def refused(*overrides: str) -> list[str]:
    return [str(problem) for problem in find_problems(config(*overrides))]


def spec(*overrides: str) -> EngineSpec:
    import torch

    made = config(VLLM, *overrides)
    return engine_spec(made, resolve(made.precision, "fp32", torch.device("cpu")), "cpu", Path("run"))


@pytest.mark.parametrize(("precision", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_the_dtype_is_a_plain_name_and_never_auto(precision: str, name: str) -> None:
    """A7"""
    arguments = engine_arguments(spec(f"precision={precision}"))
    assert type(arguments["dtype"]) is str
    assert arguments["dtype"] == name
    assert f"--dtype={name}" in server_arguments(spec(f"precision={precision}"))


def test_log_probabilities_are_those_after_temperature() -> None:
    """B2"""
    assert engine_arguments(spec())["logprobs_mode"] == "processed_logprobs"
    assert "--logprobs-mode=processed_logprobs" in server_arguments(spec())


def test_the_checkpoints_own_sampling_defaults_are_left_alone() -> None:
    assert engine_arguments(spec())["generation_config"] == "vllm"


def test_memory_is_given_and_compilation_follows_the_device() -> None:
    arguments = engine_arguments(spec("rollout.vllm.kv_cache_gib=0.5"))
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert arguments["enforce_eager"] is True
    assert engine_arguments(spec("rollout.vllm.enforce_eager=false"))["enforce_eager"] is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", "0.9"),
        ("top_k", "50"),
        ("min_p", "0.1"),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", "0.5"),
        ("frequency_penalty", "0.5"),
    ],
)
def test_what_biases_the_ratio_is_refused_for_training_and_allowed_for_evaluation(name: str, value: str) -> None:
    for backend in set(Backend) - {Backend.replay}:  # which samples nothing
        (problem,) = refused(f"rollout.backend={backend.name}", f"rollout.{name}={value}")
        assert problem.startswith(f"rollout.{name}={value}")
        assert "every ratio be biased" in problem
    assert refused(VLLM, f"rollout.evaluation.{name}={value}") == []
    (problem,) = refused(f"rollout.evaluation.{name}={value}")
    assert "rollout=hf samples from the whole distribution; rollout=vllm can do this" in problem


@pytest.mark.parametrize("value", ["0", "-1"])
def test_greedy_rollouts_are_refused(value: str) -> None:
    (problem,) = refused(VLLM, f"rollout.temperature={value}")
    assert "greedy rollouts have no log-probability to train on" in problem


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.temperature=2.5"], "rollout.temperature=2.5: allowed: up to 2"),
        (["rollout.evaluation.temperature=2.5"], "rollout.evaluation.temperature=2.5: allowed: up to 2"),
        (["rollout.evaluation.temperature=0"], "rollout.evaluation.temperature=0.0: allowed: null, or a number > 0"),
        (["rollout.evaluation.top_p=0"], "rollout.evaluation.top_p=0.0: allowed: a number above 0, up to 1"),
        (["rollout.num_workers=0"], "rollout.num_workers=0: allowed: 1 or more"),
        (["rollout.vllm.kv_cache_gib=0"], "rollout.vllm.kv_cache_gib=0.0"),
        (["rollout.vllm.max_model_len=1"], "rollout.vllm.max_model_len=1"),
        (["rollout.http_retries=-1"], "rollout.http_retries=-1"),
        (["model.init_kwargs.subfolder=x"], "model.init_kwargs.subfolder='x'"),
        (["rollout.sync=nccl"], "rollout.sync='nccl': allowed: auto, shm, file (not built"),
        (["rollout.sync=ipc"], "rollout.sync='ipc': allowed: auto, shm, file (not built"),
        (["rollout.sync=file"], "rollout.sync='file': allowed: auto, shm (rollout=vllm is on this machine"),
        (["rollout.urls=[http://127.0.0.1:1]"], "rollout.urls="),
    ],
)
def test_what_the_engine_cannot_do_is_refused(overrides: list[str], expected: str) -> None:
    (problem,) = refused(VLLM, *overrides)
    assert problem.startswith(expected)


@pytest.mark.parametrize("backend", ["vllm", "vllm_server"])
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["precision=bf16", "precision.rollout_head=fp32"], "precision.rollout_head='fp32': allowed: bf16"),
        (["precision=fp16", "precision.rollout_head=fp32"], "precision.rollout_head='fp32': allowed: fp16"),
        (["precision=bf16", "precision.kv_cache=fp32"], "precision.kv_cache='fp32': allowed: bf16"),
    ],
)
def test_sites_that_vllm_does_not_have_are_refused(backend: str, overrides: list[str], expected: str) -> None:
    (problem,) = refused(f"rollout.backend={backend}", *overrides)
    assert problem.startswith(expected)


@pytest.mark.parametrize("rollout", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_rollout_and_wire_may_be_any_dtype(rollout: str, wire: str) -> None:
    sites = f"precision.rollout={rollout}", f"precision.wire={wire}"
    assert refused(VLLM, *sites) == []
    made = spec(*sites)
    assert (made.dtypes["rollout"], made.dtypes["wire"]) == (rollout, wire)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.urls=[http://h:1,http://h:2]"], "rollout.num_workers=1: allowed: 2"),
        (["rollout.urls=[h:1]"], "rollout.urls="),
        (["rollout.urls=[http://far:1]", "rollout.sync=shm"], "rollout.sync='shm': allowed: auto, file"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(overrides: list[str], expected: str) -> None:
    (problem,) = refused("rollout.backend=vllm_server", *overrides)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("overrides", "transport"),
    [
        ([], "shm"),
        (["rollout.sync=file"], "file"),
        (["rollout.urls=[http://127.0.0.1:1]"], "shm"),
        (["rollout.urls=[http://far:1]"], "file"),
    ],
)
def test_the_transport_follows_where_the_server_is(overrides: list[str], transport: str) -> None:
    made = spec("rollout.backend=vllm_server", *overrides)
    assert made.options["sync"] == transport
    assert made.options["sync_dir"] == "run/sync"


def test_each_worker_has_a_server_of_its_own() -> None:
    urls = "rollout.urls=[http://a:1,http://b:2]"
    made = spec("rollout.backend=vllm_server", "rollout.num_workers=2", urls)
    assert [made.for_worker(index).options["url"] for index in range(2)] == ["http://a:1", "http://b:2"]
    assert "url" not in spec("rollout.backend=vllm_server").for_worker(0).options


def test_a_machine_without_vllm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_exp.checks.find_spec", lambda name: None)
    (problem,) = [str(problem) for problem in machine_problems(config(VLLM))]
    assert "make setup-vllm" in problem
    assert machine_problems(config("rollout.backend=vllm_server", "rollout.urls=[http://127.0.0.1:1]")) == []
