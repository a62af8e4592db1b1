"""The embedded engine: what it samples, with which probabilities, and under which version."""

import os
import pickle
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import Family, build, checkpoint
from torch import nn

from grpo_exp.batch import build_batch
from grpo_exp.config.schema import AlgoConfig, LossScaleConfig
from grpo_exp.policy import Policy
from grpo_exp.precision import DTYPES, Precision
from grpo_exp.rollout.hf import HFEngine
from grpo_exp.rollout.loop import take_batch
from grpo_exp.rollout.process import open_memory
from grpo_exp.rollout.types import EngineSpec, Generated, Group, Request, Rollout
from grpo_exp.sync.shm import Sender

FP32 = torch.float32
PROMPTS = [[5], [6, 7, 8, 9, 10, 11, 12], [13, 14, 15], [5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10]]
MAX_NEW = 12


def policy(model: nn.Module) -> Policy:
    sites = dict.fromkeys(
        (
            "params",
            "compute",
            "head",
            "grad_reduce",
            "optimizer_state",
            "rollout",
            "rollout_head",
            "kv_cache",
            "wire",
            "reference",
        ),
        FP32,
    )
    return Policy(model, Precision(**sites, matmul="highest", loss_scale=LossScaleConfig(), reasons={}), chunk=64)


def spec(dtype: str = "fp32", family: Family = Family.qwen3) -> EngineSpec:
    dtypes = dict.fromkeys(("rollout", "rollout_head", "wire"), dtype)
    path = str(checkpoint(family))
    return EngineSpec("grpo_exp.rollout.hf:HFEngine", path, {}, False, dtypes, "cpu", num_threads=1, batch_size=64)


class Served:
    """An engine with a sender beside it."""

    def __init__(self, engine: HFEngine, fd: int) -> None:
        self.engine, self.fd = engine, fd
        dtype = DTYPES[engine.spec.dtypes["wire"]]
        self.sender = Sender(fd, dtype, dtype)

    def load(self, version: int, model: nn.Module) -> None:
        self.engine.load(self.sender.write(version, model), self.fd)


@pytest.fixture
def fd() -> Iterator[int]:
    opened = open_memory()
    yield opened
    os.close(opened)


@pytest.fixture
def served(fd: int) -> Served:
    ready = Served(HFEngine(spec()), fd)
    ready.load(0, build(seed=0))
    return ready


def requests(prompts: list[list[int]] = PROMPTS, num_completions: int = 4, temperature: float = 1.0) -> list[Request]:
    return [
        Request(serial, ids, num_completions, MAX_NEW, temperature, seed=1000 + serial)
        for serial, ids in enumerate(prompts)
    ]


def ids(generated: Generated) -> list[list[int]]:
    return [rollout.token_ids for rollout in generated.rollouts]


def by_serial(generated: Iterator[Generated]) -> dict[int, Generated]:
    return {one.serial: one for one in generated}


def trainer_logprobs(model: nn.Module, prompt: list[int], rollout: Rollout, temperature: float) -> np.ndarray:
    """The trainer's own pass over one completion."""
    group = Group(0, prompt, {}, [rollout], 0, [0.0])
    batch = build_batch([group], AlgoConfig(), MAX_NEW, 4096, torch.device("cpu"))
    with torch.no_grad():
        logprobs, _ = policy(model).logprobs(batch.micro_batches[0].tokens, temperature)
    return logprobs.numpy()


@pytest.mark.parametrize("family", [Family.qwen3, Family.llama])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_mu_is_the_trainers_logprob_whatever_the_lengths_of_the_prompts(
    fd: int, family: Family, temperature: float
) -> None:
    model, served = build(family), Served(HFEngine(spec(family=family)), fd)
    served.load(0, model)
    for serial, generated in by_serial(served.engine.generate(requests(temperature=temperature))).items():
        for rollout in generated.rollouts:
            expected = trainer_logprobs(model, PROMPTS[serial], rollout, temperature)
            np.testing.assert_allclose(rollout.mu, expected, rtol=0, atol=1e-5)
            assert rollout.mu.dtype == np.float32
        assert generated.problem() is None
        assert_same(pickle.loads(pickle.dumps(generated)), generated)


def assert_same(found: Generated, expected: Generated) -> None:
    assert (found.serial, found.version) == (expected.serial, expected.version)
    for ours, theirs in zip(found.rollouts, expected.rollouts, strict=True):
        assert (ours.token_ids, ours.finished) == (theirs.token_ids, theirs.finished)
        np.testing.assert_array_equal(ours.mu, theirs.mu)
        np.testing.assert_array_equal(ours.versions, theirs.versions)


@pytest.mark.parametrize(
    ("mu", "versions", "problem"),
    [
        ([-1.0, -2.0], [0, 0], None),
        ([-1.0], [0, 0], "2 tokens, 1 log-probs, 2 versions"),
        ([-1.0, np.nan], [0, 0], "a log-probability is not finite"),
    ],
)
def test_completions_whose_lengths_disagree_are_not_usable_also_after_a_pipe(
    mu: list[float], versions: list[int], problem: str | None
) -> None:
    """B12: never padded."""
    good = Rollout([3], np.array([-0.5], dtype=np.float32), np.array([0], dtype=np.int32), True)
    other = Rollout([3, 4], np.array(mu, dtype=np.float32), np.array(versions, dtype=np.int32), False)
    generated = Generated(7, [good, other, good], 0)
    sent = pickle.loads(pickle.dumps(generated))
    assert_same(sent, generated)
    assert generated.problem() == sent.problem() == problem


def test_temperatures_may_differ_within_a_batch(served: Served) -> None:
    mixed = [replace(request, temperature=t) for request, t in zip(requests(), (1.0, 0.5, 2.0, 0.0), strict=True)]
    for serial, generated in by_serial(served.engine.generate(mixed)).items():
        for rollout in generated.rollouts:
            expected = trainer_logprobs(build(), PROMPTS[serial], rollout, mixed[serial].temperature or 1.0)
            np.testing.assert_allclose(rollout.mu, expected, rtol=0, atol=1e-5)


def test_greedy_decoding_is_that_of_transformers(served: Served) -> None:
    greedy = by_serial(served.engine.generate(requests(num_completions=1, temperature=0.0)))
    for serial, prompt in enumerate(PROMPTS):
        whole = served.engine.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=MAX_NEW, do_sample=False
        )
        assert ids(greedy[serial]) == [whole[0, len(prompt) :].tolist()]


def test_a_completion_ends_with_its_end_token_or_is_truncated(served: Served) -> None:
    rollouts = [rollout for one in served.engine.generate(requests(num_completions=32)) for rollout in one.rollouts]
    end = served.engine.model.generation_config.eos_token_id
    assert {rollout.finished for rollout in rollouts} == {True, False}
    for rollout in rollouts:
        assert end not in rollout.token_ids[:-1]
        assert rollout.finished == (rollout.token_ids[-1] == end)
        assert rollout.finished or len(rollout.token_ids) == MAX_NEW


def test_requests_may_have_different_limits(served: Served) -> None:
    limited = [replace(request, max_new_tokens=limit) for request, limit in zip(requests(), (1, 3, 12, 2), strict=True)]
    for serial, generated in by_serial(served.engine.generate(limited)).items():
        assert all(len(rollout.token_ids) <= limited[serial].max_new_tokens for rollout in generated.rollouts)
        free = by_serial(served.engine.generate([requests()[serial]]))[serial]
        assert ids(generated) == [row[: limited[serial].max_new_tokens] for row in ids(free)]


def test_completions_of_one_prompt_differ(served: Served) -> None:
    """B15: with a seed, at temperature 1; so do two groups of the same prompt, whichever worker they go to."""
    same = [replace(request, prompt_ids=PROMPTS[1]) for request in requests()]
    generated = by_serial(served.engine.generate(same))
    assert len({tuple(row) for row in ids(generated[0])}) > 1
    assert len({tuple(map(tuple, ids(one))) for one in generated.values()}) == len(same)


def test_the_same_requests_give_the_same_completions(served: Served, fd: int) -> None:
    """B15: the whole repeated, also by another engine."""
    first, again = (by_serial(served.engine.generate(requests())) for _ in range(2))
    other = Served(HFEngine(spec()), fd)
    other.load(0, build(seed=0))
    elsewhere = by_serial(other.engine.generate(requests()))
    for serial, generated in first.items():
        assert ids(generated) == ids(again[serial]) == ids(elsewhere[serial])
        for one, two in zip(generated.rollouts, elsewhere[serial].rollouts, strict=True):
            np.testing.assert_array_equal(one.mu, two.mu)


def test_what_is_decoded_together_does_not_change_what_is_sampled(served: Served) -> None:
    """B15"""
    together = by_serial(served.engine.generate(requests()))
    for request in requests():
        alone = by_serial(served.engine.generate([request]))[request.serial]
        assert ids(alone) == ids(together[request.serial])
        for one, two in zip(alone.rollouts, together[request.serial].rollouts, strict=True):
            np.testing.assert_allclose(one.mu, two.mu, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", [0, 4])
def test_after_a_sync_in_flight_every_token_has_the_version_and_the_probability_of_the_weights_that_sampled_it(
    served: Served, position: int
) -> None:
    old, new = build(seed=0), build(seed=7)
    calls = 0

    def load_in_between() -> None:
        nonlocal calls
        if calls == position:
            served.load(5, new)
        calls += 1

    for serial, generated in by_serial(served.engine.generate(requests(), load_in_between)).items():
        assert generated.version == 0
        for rollout in generated.rollouts:
            cut = min(position + 1, len(rollout.token_ids))
            assert rollout.versions.tolist() == [0] * cut + [5] * (len(rollout.token_ids) - cut)
            before = trainer_logprobs(old, PROMPTS[serial], rollout, 1.0)
            after = trainer_logprobs(new, PROMPTS[serial], rollout, 1.0)
            np.testing.assert_allclose(rollout.mu[:cut], before[:cut], rtol=0, atol=1e-5)
            np.testing.assert_allclose(rollout.mu[cut:], after[cut:], rtol=0, atol=1e-5)
    assert calls > position + 1
    assert next(served.engine.generate(requests()[:1])).version == 5


def test_several_syncs_may_come_within_one_completion(served: Served) -> None:
    models = {0: build(seed=0)}

    def load_in_between() -> None:
        version = max(models) + 1
        models[version] = build(seed=version)
        served.load(version, models[version])

    for serial, generated in by_serial(served.engine.generate(requests(), load_in_between)).items():
        for rollout in generated.rollouts:
            assert rollout.versions.tolist() == list(range(len(rollout.token_ids)))
            for position, version in enumerate(rollout.versions):
                expected = trainer_logprobs(models[version], PROMPTS[serial], rollout, 1.0)[position]
                assert rollout.mu[position] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bit_rollouts_are_served_in_sixteen_bits_with_mu_in_fp32(fd: int, dtype: str) -> None:
    served = Served(HFEngine(spec(dtype)), fd)
    served.load(0, build())
    generated = next(served.engine.generate(requests()))
    assert generated.rollouts[0].mu.dtype == np.float32
    seen = served.engine.observed()
    assert [seen[site] for site in ("rollout", "rollout_head", "kv_cache")] == [dtype] * 3
    # more precise than the 16-bit dtype can write down: the log-softmax was not rounded
    mu = torch.from_numpy(np.concatenate([rollout.mu for rollout in generated.rollouts]))
    assert not torch.equal(mu.to(DTYPES[dtype]).to(FP32), mu)


def test_an_engine_without_weights_refuses_to_sample() -> None:
    with pytest.raises(RuntimeError, match="no weights"):
        next(HFEngine(spec()).generate(requests()))


def test_a_group_is_yielded_as_soon_as_its_completions_have_ended(served: Served) -> None:
    short = replace(requests()[1], max_new_tokens=1)
    order = [one.serial for one in served.engine.generate([requests()[0], short])]
    assert order == [1, 0]


def test_masks_come_from_lengths_and_not_from_token_values() -> None:
    """B11: padding that looks like an end token, an end token that looks like padding, neither at all."""
    rows = [[5, 6, 0], [5, 6, 7, 8, 9], [0], [7, 8]]
    rollouts = [Rollout(row, np.zeros(len(row), np.float32), np.zeros(len(row), np.int32), True) for row in rows]
    groups = [Group(0, [1, 1], {}, rollouts, 0, [0.0, 1.0, 0.5, 0.25])]
    batch = build_batch(groups, AlgoConfig(group_size=4), 5, 4096, torch.device("cpu"))
    mask = torch.zeros(4, 5, dtype=torch.long)
    for micro_batch in batch.micro_batches:
        mask[micro_batch.sequence, micro_batch.tokens.positions - 2] = 1
        expected = [rows[row][position - 2] for row, position in zip(
            micro_batch.sequence.tolist(), micro_batch.tokens.positions.tolist(), strict=True
        )]  # fmt: skip
        assert micro_batch.tokens.tokens.tolist() == expected
    assert ["".join(map(str, row)) for row in mask.tolist()] == ["11100", "11111", "10000", "11000"]
    assert batch.num_tokens == 11


def test_a_request_that_was_among_failures_is_decoded_by_itself() -> None:
    """D3: so that the one that is to blame takes no others with it."""
    first, second, third, fourth = requests()
    waiting = deque([first, second, replace(third, alone=True), fourth])
    taken = []
    while waiting:
        taken.append([request.serial for request in take_batch(waiting, batch_size=64)])
    assert taken == [[0, 1], [2], [3]]


def test_evaluation_comes_first_and_a_batch_holds_no_more_than_its_size() -> None:
    waiting = deque([*requests(), replace(requests()[0], serial=-1, evaluation=True)])
    taken = []
    while waiting:
        taken.append([request.serial for request in take_batch(waiting, batch_size=10)])
    assert taken == [[-1], [0, 1], [2, 3]]
