"""How far the generator's log-probabilities are from the trainer's, for the tokens of one optimizer step.

Everything is raw: no clipping, clamping or masking by a correction comes before it, so that a correction cannot hide
the mismatch it corrects. The average alone would: half the ratios at +0.5 nats and half at -0.5 have mean 0.
"""

import math

import torch
from torch import Tensor

RATIO_BAND = (0.9, 1.1)


def mismatch_metrics(mu: Tensor, old: Tensor, sequence: Tensor) -> dict[str, float]:
    """Statistics of ``d = old - mu`` in nats, over all tokens of one optimizer step.

    Args:
        mu: log-probability that the generator reported for each token it sampled, [n].
        old: log-probability of the same tokens under the trainer's weights at the start of the step, [n].
        sequence: index of the sequence that each token belongs to, int64 [n], in any order.

    Returns:
        ``mean``, ``sd`` (population), ``abs_mean``, ``abs_p95`` (linear interpolation) and ``abs_max`` of d;
        ``k1 = mean(mu - old)`` and ``k3 = mean(exp(d) - 1 - d)``, two estimates of KL(generator || trainer);
        ``ess = (sum W)^2 / (N sum W^2)`` with ``W = exp(sum of d)`` of each of the N sequences, in (0, 1];
        ``outside``, the share of ratios ``exp(d)`` outside [0.9, 1.1].
        All are NaN where there is no token, or where d of any token is NaN.
    """
    mu, old = mu.detach().double(), old.detach().double()  # float64: small differences, summed over millions of tokens
    d = old - mu
    if not d.numel():
        d, sequence = d.new_full((1,), math.nan), sequence.new_zeros(1)
    inside = (d >= math.log(RATIO_BAND[0])) & (d <= math.log(RATIO_BAND[1]))
    size = d.abs()
    values = {
        "mean": d.mean(),
        "sd": d.std(correction=0),
        "abs_mean": size.mean(),
        "abs_p95": _percentile(size, 0.95),
        "abs_max": size.max(),
        "k1": -d.mean(),
        "k3": (d.expm1() - d).mean(),
        "ess": _effective_share(d, sequence),
        "outside": (~inside).to(d).where(~d.isnan(), d).mean(),
    }
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))


def _percentile(values: Tensor, share: float) -> Tensor:
    """Quantile with linear interpolation. ``torch.quantile`` refuses more than 2^24 values."""
    ordered = values.sort().values
    position = share * (len(ordered) - 1)
    between = torch.lerp(ordered[math.floor(position)], ordered[math.ceil(position)], position % 1)
    return between.where(~ordered[-1].isnan(), ordered[-1])  # NaN is sorted to the end


def _effective_share(d: Tensor, sequence: Tensor) -> Tensor:
    """Effective sample size of the sequence weights as a share of their number, in log space."""
    indices, position = torch.unique(sequence, return_inverse=True)
    log_weight = d.new_zeros(len(indices)).index_add(0, position, d)
    log_share = 2 * log_weight.logsumexp(0) - (2 * log_weight).logsumexp(0)
    return log_share.exp() / len(indices)
