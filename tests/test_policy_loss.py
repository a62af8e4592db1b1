"""Every policy loss against a plain float64 oracle on ragged batches: value, gradient and clip, token by token."""

import ast
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import grpo_exp.algo
from grpo_exp.algo.policy_loss import LOSSES, Tokens, policy_loss
from grpo_exp.config.schema import AlgoConfig, Loss

EDGES = (0.8, 1.28, 3.0)
ALGOS = {
    "ppo_clip": AlgoConfig(clip_low=0.2, clip_high=0.28),
    "dual_clip": AlgoConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "gspo": AlgoConfig(loss=Loss.gspo, clip_low=0.2, clip_high=0.28),
    "cispo": AlgoConfig(loss=Loss.cispo, clip_high=0.28),
    "dppo_tv": AlgoConfig(loss=Loss.dppo_tv, clip_low=0.15, clip_high=0.1),
}


def ragged_tokens(lengths: list[int], seed: int) -> Tokens:
    """Sequences of these lengths, their tokens in no order, none near an edge: there rounding would decide."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(lengths), generator=generator)
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[order]
    shape = (sum(lengths),)
    mu = -4 * torch.rand(shape, generator=generator)
    proximal = mu + 0.2 * torch.randn(shape, generator=generator)
    log_ratio = 0.5 * torch.randn(shape, generator=generator)
    for edge in EDGES:
        log_ratio = log_ratio + 1e-3 * ((log_ratio - math.log(edge)).abs() < 1e-4)
    advantages = torch.randn(len(lengths), generator=generator)
    return Tokens(proximal + log_ratio, proximal, mu, advantages[sequence], sequence)


@dataclass(frozen=True)
class Token:
    """One token as Python floats, with the log-ratios of all tokens of its sequence."""

    new: float
    proximal: float
    mu: float
    advantage: float
    log_ratios: list[float]


def bounded_exp(value: float) -> float:
    return math.exp(max(-20.0, min(20.0, value)))


def clipped_oracle(ratio: float, advantage: float, algo: AlgoConfig) -> tuple[float, float, bool]:
    """Loss of PPO's form, its derivative by the logarithm of the ratio, and whether it was clipped."""
    low, high = 1 - algo.clip_low, 1 + algo.clip_high
    plain, bounded = -ratio * advantage, -min(max(ratio, low), high) * advantage
    value, slope = (plain, plain) if plain >= bounded else (bounded, 0.0)
    if algo.dual_clip is not None and advantage < 0 and value > -algo.dual_clip * advantage:
        value, slope = -algo.dual_clip * advantage, 0.0
    return value, slope, ratio > high if advantage > 0 else advantage < 0 and ratio < low


def ppo_oracle(token: Token, algo: AlgoConfig) -> tuple[float, float, bool]:
    return clipped_oracle(bounded_exp(token.new - token.proximal), token.advantage, algo)


def gspo_oracle(token: Token, algo: AlgoConfig) -> tuple[float, float, bool]:
    """All T tokens have the loss, each of them depends on a T-th of every log-ratio: the derivatives add up to one."""
    return clipped_oracle(bounded_exp(math.fsum(token.log_ratios) / len(token.log_ratios)), token.advantage, algo)


def cispo_oracle(token: Token, algo: AlgoConfig) -> tuple[float, float, bool]:
    ratio = bounded_exp(token.new - token.proximal)
    weight = min(ratio, 1 + algo.clip_high)
    return -weight * token.advantage * token.new, -weight * token.advantage, ratio > 1 + algo.clip_high


def dppo_tv_oracle(token: Token, algo: AlgoConfig) -> tuple[float, float, bool]:
    moved = math.exp(token.new) - math.exp(token.mu)
    beyond = moved > algo.clip_high if token.advantage > 0 else token.advantage < 0 and moved < -algo.clip_low
    value = 0.0 if beyond else -bounded_exp(token.new - token.proximal) * token.advantage
    return value, value, beyond


Oracle = Callable[[Token, AlgoConfig], tuple[float, float, bool]]
ORACLES: dict[Loss, Oracle] = {
    Loss.ppo_clip: ppo_oracle,
    Loss.gspo: gspo_oracle,
    Loss.cispo: cispo_oracle,
    Loss.dppo_tv: dppo_tv_oracle,
}


def test_every_loss_has_a_function_and_an_oracle() -> None:
    assert set(LOSSES) == set(ORACLES) == set(Loss)
    assert {algo.loss for algo in ALGOS.values()} == set(Loss)


@pytest.mark.parametrize("name", ALGOS)
@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 2**31 - 1))
def test_a_loss_equals_the_written_out_formula(name: str, lengths: list[int], seed: int) -> None:
    algo, tokens = ALGOS[name], ragged_tokens(lengths, seed)
    new = tokens.new.clone().requires_grad_()
    found = policy_loss(Tokens(new, tokens.proximal, tokens.mu, tokens.advantages, tokens.sequence), algo)
    (gradient,) = torch.autograd.grad(found.per_token.sum(), new)
    log_ratios: dict[int, list[float]] = {}
    columns = [tensor.tolist() for tensor in (tokens.new, tokens.proximal, tokens.mu, tokens.advantages)]
    for value, proximal, index in zip(columns[0], columns[1], tokens.sequence.tolist(), strict=True):
        log_ratios.setdefault(index, []).append(value - proximal)
    expected = [
        ORACLES[algo.loss](Token(*values, log_ratios[index]), algo)
        for values, index in zip(zip(*columns, strict=True), tokens.sequence.tolist(), strict=True)
    ]
    values, slopes, clips = zip(*expected, strict=True)
    assert found.per_token.tolist() == pytest.approx(list(values), rel=1e-6, abs=1e-6)
    assert gradient.tolist() == pytest.approx(list(slopes), rel=1e-6, abs=1e-6)
    assert found.clipped.tolist() == list(clips)
    assert not found.ratio.requires_grad


@pytest.mark.parametrize("name", ALGOS)
def test_equal_log_probabilities_give_a_ratio_of_exactly_one_and_clip_nothing(name: str) -> None:
    tokens = ragged_tokens([3, 1, 5], seed=1)
    same = Tokens(tokens.mu.clone().requires_grad_(), tokens.mu, tokens.mu, tokens.advantages, tokens.sequence)
    found = policy_loss(same, ALGOS[name])
    assert found.ratio.eq(1.0).all()
    assert not found.clipped.any()
    (gradient,) = torch.autograd.grad(found.per_token.sum(), same.new)
    torch.testing.assert_close(gradient, -tokens.advantages, rtol=1e-6, atol=0.0)  # all are the policy gradient there


@pytest.mark.parametrize("name", ALGOS)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("broken", ["new", "proximal"])
def test_a_nan_reaches_loss_and_gradient(name: str, advantage: float, broken: str) -> None:
    values: dict[str, Tensor] = {key: torch.tensor([-1.0, -2.0]) for key in ("new", "proximal", "mu")}
    values[broken][0] = math.nan
    new = values.pop("new").requires_grad_()
    tokens = Tokens(new, **values, advantages=torch.full((2,), advantage), sequence=torch.tensor([0, 1]))
    found = policy_loss(tokens, ALGOS[name])
    (gradient,) = torch.autograd.grad(found.per_token.sum(), new)
    assert gradient.isnan().tolist() == [True, False]
    assert found.per_token.isnan().tolist() == [True, False]


@pytest.mark.parametrize("name", ALGOS)
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_an_extreme_ratio_stays_finite(name: str, log_ratio: float) -> None:
    new = torch.tensor([log_ratio], requires_grad=True)
    for advantage in (-1.0, 1.0):
        tokens = Tokens(
            new, torch.zeros(1), torch.zeros(1), torch.tensor([advantage]), torch.zeros(1, dtype=torch.int64)
        )
        found = policy_loss(tokens, ALGOS[name])
        (gradient,) = torch.autograd.grad(found.per_token.sum(), new)
        assert found.per_token.isfinite().all()
        assert gradient.isfinite().all()


def test_the_algorithms_import_torch_and_nothing_of_the_project_but_types() -> None:
    """Pure functions on tensors, to be read and tested by themselves."""
    for path in Path(grpo_exp.algo.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("grpo_exp")):
                assert node.level == 1 or node.module == "grpo_exp.config.schema", path
            elif isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                )
                assert {name.split(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}, path
