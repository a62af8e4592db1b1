"""Lengths of the completions of one optimizer step.

They describe what the generator produced, so they are taken over all completions of the step, whether or not
truncated ones are then masked in the loss.
"""

import math

from torch import Tensor


def completion_stats(lengths: Tensor, truncated: Tensor) -> dict[str, float]:
    """Statistics of completion lengths in tokens.

    Args:
        lengths: int [N].
        truncated: bool [N]; the completion met the length bound before it ended by itself.

    Returns:
        ``length_mean``, ``length_min``, ``length_max``; ``terminated_length_mean``, over the completions that are not
        truncated; ``truncated_frac``. NaN for what has no completion to be taken over.
    """
    exact = lengths.double()  # float64: sums of lengths above 2^24 are not exact in float32
    terminated = exact[~truncated]
    any_completion = lengths.numel() > 0
    return {
        "length_mean": exact.mean().item(),
        "length_min": exact.min().item() if any_completion else math.nan,
        "length_max": exact.max().item() if any_completion else math.nan,
        "terminated_length_mean": terminated.mean().item(),
        "truncated_frac": truncated.to(exact).mean().item(),
    }
