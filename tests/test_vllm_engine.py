"""The engine of rollout=vllm in this process: what it samples, with which probabilities, and what a sync leaves in it."""

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import checkpoint

from grpo_exp.errors import RunFailed
from grpo_exp.precision import DTYPES
from grpo_exp.rollout.types import Generated, Shaping
from grpo_exp.sync.shm import checksum, tensors_in, unique_parameters

if find_spec("vllm") is None:
    pytest.skip("vllm is not installed: make setup-vllm", allow_module_level=True)

from vllm_engine import MAX_NEW, PROMPTS, Served, all_gaps, requests

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM warns of much that is its own

NAMES = ("fp32", "bf16", "fp16")
TOLERANCE = {"fp32": 1e-5, "bf16": 0.4, "fp16": 0.06}
"""Of one log-probability, in nats: rounding alone for the 16-bit dtypes."""


@pytest.fixture(scope="module")
def fp32() -> Iterator[Served]:
    yield from served("fp32")


@pytest.fixture(scope="module")
def bf16() -> Iterator[Served]:
    yield from served("bf16")


@pytest.fixture(scope="module")
def fp16() -> Iterator[Served]:
    yield from served("fp16")


@pytest.fixture(scope="module")
def untied() -> Iterator[Served]:
    yield from served("fp32", str(checkpoint(tied=False, head_dim=32)))


def served(*args: str) -> Iterator[Served]:
    one = Served(*args)
    yield one
    one.close()
    gc.collect()


@pytest.fixture
def any_dtype(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


every_dtype = pytest.mark.parametrize("any_dtype", NAMES, indirect=True)


def ids(generated: Generated) -> list[list[int]]:
    return [rollout.token_ids for rollout in generated.rollouts]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_mu_is_the_logprob_after_temperature(fp32: Served, temperature: float) -> None:
    """B2: whatever the lengths of the prompts."""
    made = requests(temperature=temperature)
    gaps = all_gaps(fp32, made, fp32.run(made))
    assert np.abs(gaps).max() < 1e-5
    assert fp32.engine.about["logprobs"] == "processed_logprobs"


def test_temperatures_may_differ_within_a_step(fp32: Served) -> None:
    made = [replace(request, temperature=t) for request, t in zip(requests(), (0.5, 1.0, 1.7, 0.8), strict=True)]
    assert np.abs(all_gaps(fp32, made, fp32.run(made))).max() < 1e-5


@every_dtype
def test_after_twenty_syncs_in_flight_the_engine_holds_the_cast_and_every_token_its_versions_logprob(
    any_dtype: Served,
) -> None:
    """B5, B6: completions that were in flight go on, with their cache recomputed."""
    engine, loads = any_dtype, []

    def sync_now_and_then(step: int) -> None:
        if step % 3 == 0 and len(loads) < 20:
            version = engine.next_version()
            loads.append(engine.sync(version))
            check_weights(engine, version, loads[-1])

    longest = 0
    while len(loads) < 20:
        made = requests()
        answers = engine.run(made, sync_now_and_then)
        assert np.abs(all_gaps(engine, made, answers)).max() < TOLERANCE[engine.dtype]
        longest = max(longest, *(len(set(r.versions.tolist())) for one in answers.values() for r in one.rollouts))
        for rollout in (rollout for one in answers.values() for rollout in one.rollouts):
            assert (np.diff(rollout.versions) >= 0).all()
    assert longest > 2, "no completion outlived a sync"
    assert len(set(loads)) == 20


@every_dtype
def test_after_twenty_syncs_between_completions_the_engine_holds_the_cast(any_dtype: Served) -> None:
    for _ in range(20):
        version = any_dtype.next_version()
        check_weights(any_dtype, version, any_dtype.sync(version))
    made = requests()
    answers = any_dtype.run(made)
    assert {v for one in answers.values() for r in one.rollouts for v in r.versions.tolist()} == {version}
    assert np.abs(all_gaps(any_dtype, made, answers)).max() < TOLERANCE[any_dtype.dtype]


def check_weights(served: Served, version: int, arrived: int) -> None:
    """Every weight, read back through the kernels that use it, against the trainer's cast."""
    from grpo_exp.rollout.vllm_weights import check_held

    dtype = DTYPES[served.dtype]
    cast = {name: tensor.to(dtype) for name, tensor in unique_parameters(served.models[version]).items()}
    check_held(served.worker.model_runner.get_model(), cast, version)
    assert arrived == checksum(cast.values())


@every_dtype
def test_the_dtypes_in_effect_are_those_that_were_asked_for(any_dtype: Served) -> None:
    """A7: weights, head, cache and wire, read from live objects."""
    sites = ("rollout", "rollout_head", "kv_cache", "wire")
    assert any_dtype.engine.observed() == dict.fromkeys(sites, any_dtype.dtype)
    rollouts = next(iter(any_dtype.run(requests()).values())).rollouts
    mu = torch.from_numpy(np.concatenate([rollout.mu for rollout in rollouts]))
    assert mu.dtype is torch.float32
    if any_dtype.dtype != "fp32":
        assert not torch.equal(mu.to(DTYPES[any_dtype.dtype]).to(mu), mu), "mu was rounded"


def test_a_long_prompt_is_not_served_from_the_cache_of_older_weights(fp32: Served) -> None:
    """B6: blocks of the cache are 128 tokens, so shorter prompts would never show it."""
    made = requests([[5 + i % 20 for i in range(300)]], num_completions=2)
    fp32.run(made)
    fp32.sync(fp32.next_version())
    assert np.abs(all_gaps(fp32, made, fp32.run(made))).max() < 1e-5


def test_each_sync_drops_the_cache_once_after_loading_and_a_drop_that_fails_is_an_error(
    fp32: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B6"""
    log: list[str] = []
    reset, rpc = fp32.engine.engine.reset_prefix_cache, fp32.engine.engine.collective_rpc

    def resetting(**kwargs: Any) -> bool:
        log.append("reset")
        return bool(reset(**kwargs))

    def calling(method: str, **kwargs: Any) -> Any:
        log.append(method)
        return rpc(method, **kwargs)

    monkeypatch.setattr(fp32.engine.engine, "reset_prefix_cache", resetting)
    monkeypatch.setattr(fp32.engine.engine, "collective_rpc", calling)
    fp32.sync(fp32.next_version())
    assert log == ["grpo_load", "reset", "grpo_dtypes"]
    monkeypatch.setattr(fp32.engine.engine, "reset_prefix_cache", lambda **kwargs: False)
    with pytest.raises(RunFailed, match="did not drop the cache"):
        fp32.sync(fp32.next_version())
    with pytest.raises(RuntimeError, match="no weights"):
        fp32.engine.add(requests()[0])
    monkeypatch.undo()
    fp32.sync(fp32.next_version())
    assert fp32.run(requests())


def test_an_update_that_is_silently_dropped_is_noticed_and_the_next_one_works(
    fp32: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5: the kernels are asked, not the loader."""
    version = fp32.engine.version
    monkeypatch.setattr(fp32.worker.model_runner, "reload_weights", lambda weights_iterator: list(weights_iterator))
    with pytest.raises(RunFailed, match=r"holds other weights than were sent for version \d+: model.embed_tokens"):
        fp32.sync(fp32.next_version())
    assert fp32.engine.version == version
    monkeypatch.undo()
    made = requests()
    assert np.abs(all_gaps(fp32, made, fp32.run(made))).max() < 1e-5
    version = fp32.next_version()
    check_weights(fp32, version, fp32.sync(version))


@pytest.mark.parametrize("num_loaded", [1, 9])
def test_an_error_half_way_leaves_the_old_version_serving_and_the_next_sync_working(
    fp32: Served, monkeypatch: pytest.MonkeyPatch, num_loaded: int
) -> None:
    """B7: also for what is in flight."""
    model, version = fp32.worker.model_runner.get_model(), fp32.engine.version
    load_weights, broken = model.load_weights, [True]

    def breaks_off(weights: Any) -> Any:
        def some() -> Iterator[Any]:
            for index, item in enumerate(weights):
                if broken and index == num_loaded:
                    broken.clear()
                    raise OSError("the wire is cut")
                yield item

        return load_weights(some())

    def fails_once(step: int) -> None:
        if step == 5:
            with pytest.raises(RunFailed, match="wire is cut"):
                fp32.sync(fp32.next_version())

    monkeypatch.setattr(model, "load_weights", breaks_off)
    made = requests()
    answers = fp32.run(made, fails_once)
    assert not broken
    assert {v for one in answers.values() for r in one.rollouts for v in r.versions.tolist()} == {version}
    assert np.abs(all_gaps(fp32, made, answers)).max() < 1e-5
    version = fp32.next_version()
    check_weights(fp32, version, fp32.sync(version))


def test_weights_with_other_names_change_nothing(fp32: Served) -> None:
    """B8: the names that are sent are just those that the engine's parameters are made of."""
    version = fp32.engine.version
    payload = fp32.sender.write(99, fp32.trained(1))
    first, *rest = payload.slots
    renamed = replace(payload, slots=(replace(first, name="model.embed_token.weight"), *rest))
    with pytest.raises(RunFailed, match=r"missing \['model.embed_tokens.weight'\], unknown \['model.embed_token.weig"):
        fp32.engine.load(renamed, fp32.fd)
    with pytest.raises(RunFailed, match=r"missing \['model.embed_tokens.weight'\], unknown \[\]"):
        fp32.engine.load(replace(payload, slots=tuple(rest), checksum=checksum_of(fp32, rest)), fp32.fd)
    assert fp32.engine.version == version
    assert fp32.run(requests())


def checksum_of(served: Served, slots: Any) -> int:
    import mmap

    payload = replace(served.sender.write(99, served.trained(1)), slots=tuple(slots))
    return checksum(tensors_in(mmap.mmap(served.fd, 0), payload).values())


def test_other_bytes_than_were_sent_change_nothing(fp32: Served) -> None:
    """B5"""
    version = fp32.engine.version
    payload = fp32.sender.write(99, fp32.trained(2))
    os.pwrite(fp32.fd, b"\x01\x02\x03\x04", payload.slots[-1].offset)
    with pytest.raises(RunFailed, match="other weights arrived than were sent for version 99"):
        fp32.engine.load(payload, fp32.fd)
    assert fp32.engine.version == version


@pytest.mark.parametrize("one", ["fp32", "untied"])
def test_head_and_embedding_are_the_trainers_whether_they_are_tied_or_not(
    one: str, request: pytest.FixtureRequest
) -> None:
    """B9: after one big step."""
    served: Served = request.getfixturevalue(one)
    version = served.next_version()
    model: Any = served.trained(version)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.square().mean().backward()
    optimizer.step()
    check_weights(served, version, served.sync(version))
    made = requests()
    assert np.abs(all_gaps(served, made, served.run(made))).max() < 2e-5
    engine = served.worker.model_runner.get_model()
    shared = engine.lm_head.weight.data_ptr() == engine.model.embed_tokens.weight.data_ptr()
    assert shared == (one == "fp32")


def test_a_tied_pair_may_be_sent_as_two(fp32: Served) -> None:
    """B9: one key or both."""
    from grpo_exp.rollout.vllm_weights import check_names

    weights = dict(unique_parameters(fp32.trained(1)))
    model = fp32.worker.model_runner.get_model()
    check_names(model, weights)
    check_names(model, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


def test_completions_of_one_prompt_differ_and_the_whole_repeats(fp32: Served) -> None:
    """B15: with a seed each, at temperature 1; so do two groups of the same prompt, whichever worker they go to."""
    same = [replace(request, prompt_ids=PROMPTS[1]) for request in requests()]
    answers = fp32.run(same)
    assert len({tuple(row) for row in ids(answers[0])}) > 1
    assert len({tuple(map(tuple, ids(one))) for one in answers.values()}) == len(same)
    assert {serial: ids(one) for serial, one in fp32.run(same).items()} == {s: ids(one) for s, one in answers.items()}


def test_what_is_decoded_together_does_not_change_what_is_sampled(fp32: Served) -> None:
    """B15"""
    together = fp32.run(requests())
    for request in requests():
        assert ids(fp32.run([request])[request.serial]) == ids(together[request.serial])


def test_requests_join_while_others_run(fp32: Served) -> None:
    long, short = requests(PROMPTS[:2], num_completions=1)
    long = replace(long, max_new_tokens=200, prompt_ids=[5, 5, 5, 5, 5], temperature=2.0)
    order: list[int] = []
    fp32.engine.add(long)
    for _ in range(3):
        order += [answer.serial for answer in fp32.engine.step()]
    fp32.engine.add(replace(short, max_new_tokens=4))
    while fp32.engine.num_running:
        order += [answer.serial for answer in fp32.engine.step()]
    assert order == [short.serial, long.serial]


def test_a_completion_ends_with_its_end_token_or_is_truncated(fp32: Served) -> None:
    fp32.sync(0)
    rollouts = [rollout for one in fp32.run(requests(num_completions=16)).values() for rollout in one.rollouts]
    assert {rollout.finished for rollout in rollouts} == {True, False}
    for rollout in rollouts:
        assert 2 not in rollout.token_ids[:-1]
        assert rollout.finished == (rollout.token_ids[-1] == 2)
        assert rollout.finished or len(rollout.token_ids) == MAX_NEW


def test_greedy_decoding_is_that_of_transformers(fp32: Served) -> None:
    fp32.sync(0)
    model: Any = fp32.models[0]
    for serial, one in fp32.run(requests(num_completions=1, temperature=0.0)).items():
        prompt = torch.tensor([PROMPTS[serial]])
        whole = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=MAX_NEW, do_sample=False)
        assert ids(one) == [whole[0, prompt.shape[1] :].tolist()]


def test_evaluation_may_shape_what_is_sampled(fp32: Served) -> None:
    greedy = fp32.run(requests(num_completions=1, temperature=0.0))
    first = fp32.run([replace(r, shaping=Shaping(top_k=1)) for r in requests(num_completions=1)])
    narrow = fp32.run([replace(r, shaping=Shaping(top_p=0.01)) for r in requests(num_completions=1)])
    assert {s: ids(one) for s, one in greedy.items()} == {s: ids(one) for s, one in first.items()}
    assert {s: ids(one) for s, one in greedy.items()} == {s: ids(one) for s, one in narrow.items()}


def test_the_engine_knows_no_text_and_lengths_that_disagree_are_a_problem(fp32: Served) -> None:
    """B12: ids in, ids out; what is missing is never padded."""
    from grpo_exp.rollout.vllm import rollout_of

    assert fp32.engine.engine.renderer.tokenizer is None
    fp32.engine.add(requests(PROMPTS[:1], num_completions=1)[0])
    outputs: list[Any] = []
    step = fp32.engine.engine.step
    while not outputs:
        outputs = step()
    fp32.engine.num_running, fp32.engine._open, fp32.engine._owner = 0, {}, {}
    (output,) = outputs[0].outputs
    assert Generated(0, [rollout_of(output)], 0).problem() is None
    del output.logprobs[-1]
    assert "log-probs" in (Generated(0, [rollout_of(output)], 0).problem() or "")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_syncs_leave_no_descriptor_and_no_mapping_behind(fp32: Served) -> None:
    def mappings() -> int:
        return sum("grpo_exp_weights" in line for line in Path("/proc/self/maps").read_text().splitlines())

    fp32.sync(1)
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), mappings()
    for version in range(2, 22):
        fp32.sync(version)
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), mappings()) == before


def test_heads_of_a_size_that_vllm_has_no_kernel_for_are_refused() -> None:
    from vllm_engine import spec

    from grpo_exp.errors import ConfigError
    from grpo_exp.rollout.vllm import VllmEngine

    with pytest.raises(ConfigError, match=r"attention heads have 32, 64, .* these have 8; rollout=hf takes any"):
        VllmEngine(spec(str(checkpoint()), "fp32"))
