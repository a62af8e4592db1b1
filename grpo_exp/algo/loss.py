"""The clipped policy loss, and the weights that turn losses per token into the loss of one optimizer step.

The two are apart on purpose. The loss of a step is ``sum_i weights_i * sum_t per_token_it``, with the weights computed
once for all its sequences: micro-batches and ranks then only add up, and the gradient cannot depend on how the step
was cut. Which tokens count comes from lengths, never from token values, since the padding id may be a real token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_exp.config.schema import Normalization

MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32 and far outside any clip window


def completion_mask(lengths: Tensor, width: int) -> Tensor:
    """True on the first ``lengths`` positions of each row: int [N] to bool [N, width].

    Raises:
        ValueError: a length does not fit in ``width``.
    """
    if lengths.numel() and int(lengths.max()) > width:
        raise ValueError(f"a completion of {int(lengths.max())} tokens does not fit in a width of {width}")
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def sequence_weights(
    lengths: Tensor, included: Tensor, normalization: Normalization, max_completion_tokens: int
) -> Tensor:
    """The weight of every token of each sequence of one optimizer step, float32 [N].

    ``sequence_mean`` (GRPO, arXiv 2402.03300): ``1 / (num_sequences * length)``. ``token_mean`` (DAPO, arXiv
    2503.14476): ``1 / tokens of the step``. ``constant`` (Dr. GRPO, arXiv 2503.20783): ``1 / (num_sequences *
    max_completion_tokens)``.

    Args:
        lengths: completion tokens of every sequence of the step, int [N], over all micro-batches and ranks.
        included: bool [N]. False takes a sequence out of numerator and denominator: it was excluded by the
            configuration or has no valid reward. A sequence that a correction rejects stays included.
        normalization: the denominator.
        max_completion_tokens: the bound of the run, used by ``constant`` only.

    Returns:
        Weights, 0 where not included; all 0 where none is.
    """
    lengths = lengths.double()  # float64: token counts above 2^24 are not exact in float32
    num_sequences = included.sum().clamp(min=1)
    match normalization:
        case Normalization.sequence_mean:
            denominator = num_sequences * lengths.clamp(min=1)
        case Normalization.token_mean:
            denominator = lengths.where(included, 0.0).sum().clamp(min=1)
        case Normalization.constant:
            denominator = num_sequences * max_completion_tokens
    return (included / denominator).float()  # float32: the loss and all that enters it


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss before any weighting. All three are [N, T] and 0 (False) outside the mask.

    Attributes:
        per_token: loss to be minimised, with gradient.
        ratio: ``exp(new - old)`` after the clamp of the log-ratio and before clipping, without gradient.
        clipped: the ratio is beyond the clip side that is active for the sign of the advantage: above
            ``1 + clip_high`` for a positive one, below ``1 - clip_low`` for a negative one.
    """

    per_token: Tensor
    ratio: Tensor
    clipped: Tensor


def ppo_clip(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    """PPO's clipped surrogate (arXiv 1707.06347): ``L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    With ``dual_clip = c > 1`` (arXiv 1912.09729) the loss of a negative advantage is at most ``-c A``.

    Args:
        new: log-probabilities in nats of the sampled tokens under the weights being trained, [N, T].
        old: the same under the weights that define the ratio, [N, T]; no gradient flows into it.
        advantages: [N], one for all tokens of a sequence.
        mask: bool [N, T]. Outside it every input may hold anything, NaN included. Inside it a NaN reaches both the
            loss and the gradient.
        clip_low: how far the ratio may fall below 1.
        clip_high: how far the ratio may rise above 1.
        dual_clip: the bound ``c``, or None.
    """
    log_ratio = clamp_log_ratio((new - old.detach()).where(mask, 0.0))
    advantage = advantages.detach().unsqueeze(1).where(mask, 0.0)
    ratio = log_ratio.exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip is not None:
        gain = torch.maximum(gain, dual_clip * advantage).where(advantage < 0, gain)

    seen = ratio.detach()
    clipped = ((advantage > 0) & (seen > 1 + clip_high)) | ((advantage < 0) & (seen < 1 - clip_low))
    return PolicyLoss(per_token=-gain, ratio=seen.where(mask, 0.0), clipped=clipped)


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamp to ±MAX_LOG_RATIO. The gradient of ``clamp`` at NaN is 0, which would hide the NaN from the optimizer."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).where(~log_ratio.isnan(), log_ratio)
