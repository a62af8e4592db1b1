"""Group-relative advantages: how much better a completion did than the others of its own group.

A group is the G rollouts of one prompt. A reward that is NaN or infinite is missing: its completion leaves the baseline
and gets advantage 0. Groups whose rewards are equal get exactly 0, which the standard deviation cannot be trusted for:
eight float32 rewards of 0.3 have one of 3e-8, and Adam would turn that into a full-size update.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_exp.config.schema import Advantage

# Rewards are equal when they differ by no more than a few float32 roundings of the largest, or by what remains of
# float64 terms that should have cancelled (0.1 + 0.2 - 0.3 is 6e-17).
EQUAL_RELATIVE = 8 * torch.finfo(torch.float32).eps  # the dtype in which rewards arrive
EQUAL_ABSOLUTE = 1e-12


@dataclass(frozen=True)
class Advantages:
    """Advantages of ``num_groups`` groups of ``G`` completions. No group is both ``zero_std`` and ``dropped``.

    Attributes:
        values: float32 [num_groups, G]; 0 where not ``valid``.
        valid: bool [num_groups, G]; the reward is finite and the group is kept. The rest is to be masked in the loss.
        zero_std: bool [num_groups]; the valid rewards are equal up to rounding, ``values`` is exactly 0.
        dropped: bool [num_groups]; fewer than two finite rewards, so there is no baseline.
    """

    values: Tensor
    valid: Tensor
    zero_std: Tensor
    dropped: Tensor


def group_advantages(rewards: Tensor, kind: Advantage, eps: float) -> Advantages:
    """Advantages of rewards [num_groups, G], over the finite rewards of each group.

    ``grpo`` (arXiv 2402.03300): ``(R - mean) / (std + eps)`` with the population standard deviation.
    ``dr_grpo`` (arXiv 2503.20783): ``R - mean``. ``rloo`` (arXiv 2402.14740): ``R_i - mean of the others``.
    ``eps`` has the unit of the reward and is used by ``grpo`` only.

    Raises:
        ValueError: ``rewards`` is not two-dimensional.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must have shape [num_groups, G], not {tuple(rewards.shape)}")
    finite = rewards.isfinite()
    count = finite.sum(dim=1, keepdim=True)
    dropped = count < 2
    valid = finite & ~dropped

    exact = rewards.double()  # float64: the squares of large float32 rewards overflow, the mean of equal ones rounds
    centred = exact - exact.where(finite, 0.0).sum(dim=1, keepdim=True) / count.clamp(min=1)
    match kind:
        case Advantage.grpo:
            variance = centred.where(finite, 0.0).square().sum(dim=1, keepdim=True) / count.clamp(min=1)
            values = centred / (variance.sqrt() + eps)
        case Advantage.dr_grpo:
            values = centred
        case Advantage.rloo:
            values = centred * (count / (count - 1).clamp(min=1))

    zero_std = _equal_up_to_rounding(exact, finite) & ~dropped
    kept = valid & ~zero_std
    values = values.where(kept, 0.0).float()  # float32: the loss and all that enters it, whatever the model's dtype
    return Advantages(values=values, valid=valid, zero_std=zero_std.squeeze(1), dropped=dropped.squeeze(1))


def overlong_penalty(lengths: Tensor, max_completion_tokens: int, overlong_tokens: int, penalty: float) -> Tensor:
    """What DAPO's soft punishment adds to the rewards of completions (arXiv 2503.14476), float32, in units of the reward.

    0 up to ``max_completion_tokens - overlong_tokens`` tokens, then falling linearly to ``-penalty`` at the bound.

    Args:
        lengths: tokens of each completion, int, any shape.
        overlong_tokens: width of the part that is punished; 0 punishes nothing.
    """
    if overlong_tokens == 0:
        return torch.zeros_like(lengths, dtype=torch.float32)  # as rewards are
    over = (lengths - (max_completion_tokens - overlong_tokens)).clamp(min=0)
    return -penalty * (over / overlong_tokens).float()  # as rewards are


def _equal_up_to_rounding(rewards: Tensor, finite: Tensor) -> Tensor:
    """Whether the finite rewards of each group of [num_groups, G] agree, as bool [num_groups, 1]."""
    highest = rewards.where(finite, -torch.inf).amax(dim=1, keepdim=True)
    lowest = rewards.where(finite, torch.inf).amin(dim=1, keepdim=True)
    magnitude = torch.maximum(highest.abs(), lowest.abs())
    return highest - lowest <= (EQUAL_RELATIVE * magnitude).clamp(min=EQUAL_ABSOLUTE)
