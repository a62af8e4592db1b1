"""Sketches keep angles within the error that is stated, and depend on nothing but seed and position."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_exp.algo import sketch
from grpo_exp.algo.sketch import SIZE, count_sketch, norm


def cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(x @ y / (x.norm() * y.norm()))


@settings(max_examples=15, deadline=None)
@given(st.floats(-0.99, 0.99999), st.integers(0, 2**31))
def test_the_cosine_of_sketches_is_that_of_the_vectors_within_its_error(wanted: float, seed: int) -> None:
    """Four standard errors of (1 - c^2) / sqrt(size)."""
    generator = torch.Generator().manual_seed(seed)
    x, noise = torch.randn(2, 50_000, generator=generator, dtype=torch.float64)
    noise -= x * (x @ noise) / (x @ x)
    y = wanted * x + math.sqrt(1 - wanted**2) * noise * x.norm() / noise.norm()
    found = cosine(count_sketch([x]), count_sketch([y]))
    assert abs(found - wanted) < 4 * (1 - wanted**2) / math.sqrt(SIZE) + 1e-12


def test_vectors_of_a_few_large_entries_keep_their_angle_too() -> None:
    x, y = torch.zeros(2, 100_000)
    x[:3], y[1:4] = torch.tensor([3.0, 4.0, 1.0]), torch.tensor([4.0, 1.0, 5.0])
    assert abs(cosine(count_sketch([x]), count_sketch([y])) - cosine(x, y)) < 0.03


def test_a_sketch_is_linear_and_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 37, 11, generator=torch.Generator().manual_seed(0))
    whole = count_sketch([x, y])
    assert torch.allclose(count_sketch([2 * x, 2 * y]), 2 * whole)
    again = count_sketch([x, y])
    assert torch.equal(whole, again)
    assert not torch.equal(whole, count_sketch([x, y], seed=1))
    assert not torch.equal(whole, count_sketch([y, x]))
    monkeypatch.setattr(sketch, "CHUNK", 100)
    assert len(count_sketch([x, y])) == SIZE


def test_the_norm_is_exact() -> None:
    parts = [torch.full((3, 3), 2.0), torch.full((7,), -1.0)]
    assert norm(parts) == math.sqrt(9 * 4 + 7)
    assert norm([]) == 0.0
    tiny = torch.full((1000,), 1e-30)  # squares are beyond fp32
    assert norm([tiny]) == pytest.approx(1e-30 * math.sqrt(1000), rel=1e-6)
