"""A long vector as a few thousand numbers that keep its angles: the count sketch (Charikar, Chen, Farach-Colton 2002).

Every entry is added, with a random sign, to one random bucket. Inner products of sketches with the same seed are unbiased
estimates of those of the vectors, and their variance is at most ``(|x|^2 |y|^2 + (x·y)^2) / size``. So of two vectors with
cosine c the cosine of the sketches has a standard error of about ``(1 - c^2) / sqrt(size)``: 0.016 for orthogonal ones at
the size used here, and 1 - c, which matters where they are nearly parallel, is known to 2 to 3 percent of itself.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

SIZE = 4096
SEED = 20240229
CHUNK = 1 << 22  # entries whose buckets are held at once


def count_sketch(parts: Iterable[Tensor], size: int = SIZE, seed: int = SEED) -> Tensor:
    """The sketch of the vector that some tensors make up in this order, [size] float64, on the CPU.

    Buckets depend on seed and position alone: tensors of the same shapes in the same order are projected alike.
    """
    generator = torch.Generator().manual_seed(seed)
    sketch = torch.zeros(size, dtype=torch.float64)  # sums over all parameters
    for part in parts:
        flat = part.detach().flatten()
        for start in range(0, len(flat), CHUNK):
            values = flat[start : start + CHUNK]
            drawn = torch.randint(2 * size, (len(values),), generator=generator)
            signed = values.to("cpu", sketch.dtype) * (2 * (drawn & 1) - 1)
            sketch.index_add_(0, drawn >> 1, signed)
    return sketch


def norm(parts: Iterable[Tensor]) -> float:
    """The exact L2 norm of the vector that some tensors make up."""
    squares = [part.detach().double().square().sum().cpu() for part in parts]  # float64: a sum over all parameters
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
