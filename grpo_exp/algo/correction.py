"""Corrections: what is done about the gap between the policy that sampled a token and the one that is trained on it.

A correction has three parts, each of which can be off. The proximal log-probability is what ``new`` is compared with in the
ratio. The weight makes up for the rest, ``d = proximal - mu``, on the loss. A mask leaves whole sequences out, by
``old - mu``. All of it is detached, and nothing of it enters the loss's denominator, which is fixed before.

A NaN is never compared away: it stays in the weight, reaches the loss, and the step is skipped and counted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_exp.config.schema import CorrectionConfig, Proximal, Weight

from .loss import clamp_log_ratio


@dataclass(frozen=True)
class Correction:
    """One correction of n tokens. Tensors are [n], without gradient.

    Attributes:
        proximal: log-probability in nats below ``new`` in the ratio.
        weight: factor of the token's loss; exactly 0 where it is rejected.
        log_raw: logarithm of the weight before any clamp, bound or mask, in nats; of its sequence for sequence weights.
            Where there is no weight, that of the plain token weight: ``proximal - mu``, or ``old - mu`` where that is 0.
        kept: bool; neither the weight nor a mask rejected the token.
    """

    proximal: Tensor
    weight: Tensor
    log_raw: Tensor
    kept: Tensor


@torch.no_grad()
def correct(
    mu: Tensor,
    old: Tensor,
    same_weights: Tensor | None,
    staleness: Tensor,
    sequence: Tensor,
    config: CorrectionConfig,
) -> Correction:
    """The correction of the tokens of some whole sequences.

    Args:
        mu: log-probability that the generator reported, [n].
        old: the trainer's under the weights at the start of the step, [n].
        same_weights: the trainer's under the weights that sampled the token, [n]; read for ``beta_removal`` only, and only
            where ``staleness`` is not 0: elsewhere it is ``old``.
        staleness: trained version minus the version that sampled the token, int [n].
        sequence: index of the sequence of each token, int64 [n]. A sequence must not be split over calls.
    """
    proximal = _proximal(mu, old, same_weights, staleness, config.proximal)
    d_roll = old - mu
    log_raw = d_roll if config.proximal is Proximal.rollout else proximal - mu
    if config.weight in (Weight.seq_tis, Weight.seq_mis):
        log_raw = _sums(log_raw, sequence)
    weight, rejected = _weight(log_raw, config)
    for dropped in _dropped(d_roll, sequence, config):
        rejected = rejected | dropped
    # not by where(): a NaN in a rejected token must reach the loss
    return Correction(proximal, weight * (~rejected).to(weight), log_raw, ~rejected)


def _sums(values: Tensor, sequence: Tensor) -> Tensor:
    """For each token the sum over its sequence, float64 [n]."""
    indices, place = torch.unique(sequence, return_inverse=True)
    sums = torch.zeros(len(indices), dtype=torch.float64, device=values.device)  # over thousands of tokens
    return sums.index_add(0, place, values.to(sums))[place]


def _proximal(mu: Tensor, old: Tensor, same_weights: Tensor | None, staleness: Tensor, kind: Proximal) -> Tensor:
    match kind:
        case Proximal.rollout:
            return mu
        case Proximal.recompute:
            return old
        case Proximal.interpolate:
            # the proximal policy is one version behind the one that is trained
            share = ((staleness - 1) / staleness.clamp(min=1)).clamp(0, 1).to(mu)
            return mu + share * (old - mu)
        case Proximal.beta_removal:
            assert same_weights is not None, "beta removal needs the stale tokens scored under their own weights"
            return torch.where(staleness == 0, old, same_weights)


def _weight(log_raw: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """The weight with its upper bound, and whether a bound rejects it."""
    raw = clamp_log_ratio(log_raw).exp().float()  # float32: the loss and all that enters it
    none = torch.zeros_like(raw, dtype=torch.bool)
    match config.weight:
        case Weight.none:
            return torch.ones_like(raw), none
        case Weight.token:
            return raw, none
        case Weight.token_tis | Weight.seq_tis:
            assert config.weight_high is not None
            return raw.clamp(max=config.weight_high), none
        case Weight.token_icepop | Weight.seq_mis:
            assert config.weight_high is not None
            return raw, (raw > config.weight_high) | (raw < (config.weight_low or 0.0))


def _dropped(d_roll: Tensor, sequence: Tensor, config: CorrectionConfig) -> list[Tensor]:
    """What the masks leave out: whole sequences, each as bool [n]."""
    found = []
    if config.geo_low is not None and config.geo_high is not None:
        geometric = (_sums(d_roll, sequence) / _sums(torch.ones_like(d_roll), sequence)).exp()
        found.append((geometric < config.geo_low) | (geometric > config.geo_high))
    if config.veto is not None:
        found.append(_sums(d_roll.exp() < config.veto, sequence) > 0)
    return found


def correction_metrics(correction: Correction, sequence: Tensor) -> dict[str, float]:
    """What the correction of one optimizer step did, over all of its tokens.

    Args:
        sequence: index of the sequence that each token belongs to, int64 [n].

    Returns:
        ``raw_mean``, ``raw_sd`` (population), ``raw_min``, ``raw_max`` of the weights before any clamp, bound or mask;
        ``weight_mean``, ``weight_sd``, ``weight_max`` of those that were used; ``ess = (sum w)^2 / (n sum w^2)`` of
        these; ``kept``, the share of tokens that are not rejected; ``kept_sequences``, the share of sequences with such a
        token; ``nonfinite``, the number of tokens whose raw weight is NaN or beyond float32.
    """
    raw, weight = correction.log_raw.double().exp(), correction.weight.double()  # float64: sums over many tokens
    num_sequences = len(torch.unique(sequence))
    values = {
        "raw_mean": raw.mean(),
        "raw_sd": raw.std(correction=0),
        "raw_min": raw.min(),
        "raw_max": raw.max(),
        "weight_mean": weight.mean(),
        "weight_sd": weight.std(correction=0),
        "weight_max": weight.max(),
        "ess": weight.sum().square() / (len(weight) * weight.square().sum()),
        "kept": correction.kept.double().mean(),  # float64: as above
        "kept_sequences": weight.new_tensor(len(torch.unique(sequence[correction.kept])) / num_sequences),
        "nonfinite": (~correction.log_raw.float().exp().isfinite()).sum().to(weight),  # float32: the weights' dtype
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
