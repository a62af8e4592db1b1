"""Random numbers that depend on what is sampled and on nothing else.

The uniform for one token is a hash of (run seed, group, completion, position). So a run repeats, completions of a prompt
differ, and neither the batch a completion is decoded in nor the worker that decodes it changes what is drawn.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = 0xFFFFFFFFFFFFFFFF


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The SplitMix64 finaliser (Steele, Lea & Flood 2014): a bijection of 64-bit words that passes BigCrush in sequence."""
    with np.errstate(over="ignore"):
        x = x + _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers, order mattering: :func:`splitmix64` on plain integers, for single ones far quicker."""
    state = 0
    for part in parts:
        x = ((state ^ part) + 0x9E3779B97F4A7C15) & _WORD
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        state = x ^ (x >> 31)
    return state >> 1


def uniforms(seeds: list[int], num_positions: int) -> NDArray[np.float64]:
    """Uniforms in [0, 1): [len(seeds), num_positions]. 52 bits each: times a total near 1, none rounds up to that total."""
    base = splitmix64(np.array(seeds, dtype=np.uint64))[:, None]
    words = splitmix64(base ^ splitmix64(np.arange(num_positions, dtype=np.uint64))[None])
    return (words >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(log_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        log_p: [rows, vocabulary] normalised log-probabilities.
        uniform: [rows] float64 in [0, 1).

    Returns:
        [rows] int64; a token of probability zero is never drawn.
    """
    cumulative = log_p.double().exp().cumsum(-1)  # fp32 sums over a large vocabulary lose the tail
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=log_p.shape[-1] - 1)
