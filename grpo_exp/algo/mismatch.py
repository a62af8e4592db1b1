"""How far the generator's log-probabilities are from the trainer's, for the tokens of one optimizer step.

Everything is raw: no clipping, clamping or masking by a correction comes before it, so that a correction cannot hide
the mismatch it corrects. The average alone would: half the ratios at +0.5 nats and half at -0.5 have mean 0.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

RATIO_BAND = (0.9, 1.1)
PROBABILITIES = (0.01, 0.1, 0.5, 0.9)
"""Where bands of exp(mu) meet; a band holds its lower edge."""
BANDS = ("prob_0_1", "prob_1_10", "prob_10_50", "prob_50_90", "prob_90_100")
"""Names of these bands, in per cent."""
LAGS = ("lag_0", "lag_1", "lag_2", "lag_3up")
"""Names of the classes of staleness, in versions."""


def mismatch_metrics(
    mu: Tensor, old: Tensor, sequence: Tensor, position: Tensor, staleness: Tensor, clip: tuple[float, float]
) -> dict[str, float]:
    """Statistics of ``d = old - mu`` in nats, over all tokens of one optimizer step.

    Args:
        mu: log-probability that the generator reported for each token it sampled, [n].
        old: log-probability of the same tokens under the trainer's weights at the start of the step, [n].
        sequence: index of the sequence that each token belongs to, int64 [n], in any order.
        position: index of each token in its sequence, int64 [n].
        staleness: versions between the weights that sampled each token and those of ``old``, int64 [n].
        clip: ``clip_low`` and ``clip_high`` of the policy loss.

    Returns:
        ``mean``, ``sd`` (population), ``abs_mean``, ``abs_p95`` (linear interpolation) and ``abs_max`` of d;
        ``outside`` and ``outside_clip``, the shares of ratios ``exp(d)`` outside [0.9, 1.1] and outside the clip window;
        ``k1 = mean(mu - old)`` and ``k3 = mean(exp(d) - 1 - d)``, two estimates of KL(generator || trainer);
        ``seq_mean``, ``seq_sd`` and ``seq_abs_max`` of the sums of d over each of the N sequences;
        ``ess = (sum W)^2 / (N sum W^2)`` with W the exponentials of these sums, in (0, 1];
        ``ppl_trainer`` and ``ppl_generator``, the exponentials of the means of ``-old`` and ``-mu``;
        ``prob_pearson``, the correlation of ``exp(mu)`` and ``exp(old)``, NaN where either is constant;
        ``drift_slope``: see there; and by probability and by staleness the mean of ``|d|``, NaN where there is no token.
        All are NaN where there is no token, or where d of any token is NaN; the last ones only where that token counts.
    """
    mu, old = mu.detach().double(), old.detach().double()  # float64: small differences, summed over millions of tokens
    d = old - mu
    if not d.numel():
        d = mu = old = d.new_full((1,), math.nan)
        sequence, position, staleness = (sequence.new_zeros(1) for _ in range(3))
    size, sums = d.abs(), sequence_sums(d, sequence)
    values = {
        "mean": d.mean(),
        "sd": d.std(correction=0),
        "abs_mean": size.mean(),
        "abs_p95": _percentile(size, 0.95),
        "abs_max": size.max(),
        "outside": _outside(d, *RATIO_BAND),
        "outside_clip": _outside(d, 1 - clip[0], 1 + clip[1]),
        "k1": -d.mean(),
        "k3": (d.expm1() - d).mean(),
        "seq_mean": sums.mean(),
        "seq_sd": sums.std(correction=0),
        "seq_abs_max": sums.abs().max(),
        "ess": _effective_share(sums),
        "ppl_trainer": (-old).mean().exp(),
        "ppl_generator": (-mu).mean().exp(),
        "prob_pearson": pearson(mu.exp(), old.exp()),
        "drift_slope": drift_slope(d, sequence, position),
        **by_probability(size, mu),
        **_by_staleness(size, staleness),
    }
    return to_floats(values)


def sequence_sums(d: Tensor, sequence: Tensor) -> Tensor:
    """The sum over each sequence, [number of sequences]."""
    indices, place = torch.unique(sequence, return_inverse=True)
    return d.new_zeros(len(indices)).index_add(0, place, d)


def drift_slope(d: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
    """How fast the gap grows along a sequence, in nats per 1000 tokens.

    The least-squares slope, with an intercept, of ``S_t = d_1 + … + d_t`` against ``t``, over all tokens of all sequences
    at once. NaN where all tokens have the same position.
    """
    order = (sequence * (position.max() + 1) + position).argsort()
    d, t = d[order], (position[order] + 1).to(d)
    _, place, count = torch.unique_consecutive(sequence[order], return_inverse=True, return_counts=True)
    total = d.cumsum(0)
    ends = total[count.cumsum(0) - 1]
    running = total - torch.cat([ends.new_zeros(1), ends[:-1]])[place]  # less all the sequences that come first
    t = t - t.mean()
    return 1000 * (t * (running - running.mean())).sum() / t.square().sum()


def pearson(a: Tensor, b: Tensor) -> Tensor:
    """The correlation of two sets of values, NaN where either is constant."""
    constant = (a.max() == a.min()) | (b.max() == b.min())  # the mean of equal values may be off by a rounding
    a, b = a - a.mean(), b - b.mean()
    correlation = (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()
    return correlation.where(~constant, math.nan)


def by_probability(values: Tensor, mu: Tensor) -> dict[str, Tensor]:
    """Means by band of ``exp(mu)``: below .01, .01 to .1, .1 to .5, .5 to .9 and above .9; NaN in an empty one."""
    band = torch.bucketize(mu.exp(), mu.new_tensor(PROBABILITIES), right=True)
    return dict(zip(BANDS, _means_by(values, band, len(BANDS)), strict=True))


def _by_staleness(values: Tensor, staleness: Tensor) -> dict[str, Tensor]:
    return dict(zip(LAGS, _means_by(values, staleness.clamp(max=len(LAGS) - 1), len(LAGS)), strict=True))


def _means_by(values: Tensor, kind: Tensor, count: int) -> Tensor:
    """The mean over each of ``count`` kinds, [count]; NaN where there is none of it."""
    return torch.bincount(kind, values, minlength=count) / torch.bincount(kind, minlength=count)


def _outside(d: Tensor, low: float, high: float) -> Tensor:
    """The share of ratios that are beyond the bounds; NaN if any is."""
    inside = (d >= math.log(low)) & (d <= math.log(high))
    return (~inside).to(d).where(~d.isnan(), d).mean()


def _percentile(values: Tensor, share: float) -> Tensor:
    """Quantile with linear interpolation. ``torch.quantile`` refuses more than 2^24 values."""
    ordered = values.sort().values
    position = share * (len(ordered) - 1)
    between = torch.lerp(ordered[math.floor(position)], ordered[math.ceil(position)], position % 1)
    return between.where(~ordered[-1].isnan(), ordered[-1])  # NaN is sorted to the end


def _effective_share(log_weight: Tensor) -> Tensor:
    """Effective sample size of weights as a share of their number, in log space."""
    log_share = 2 * log_weight.logsumexp(0) - (2 * log_weight).logsumexp(0)
    return log_share.exp() / len(log_weight)


def to_floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Python floats, with one transfer from the device."""
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True))
