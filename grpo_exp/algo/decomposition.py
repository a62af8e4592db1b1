"""The gap between generator and trainer, taken apart: how far the policy moved, and what is left with the same weights.

For a token sampled by the generator under version s and trained under version t, with log-probabilities in nats:

    d_tot = trainer(t) - mu = [trainer(t) - trainer(s)]  alpha: how far the policy moved
                            + [trainer(s) - mu]          beta: same weights, two engines and two sets of dtypes
    beta  = [trainer(s) - lowered]                       beta_dtype: the trainer, in its own dtypes and in the generator's
          + [lowered - alone]                            beta_batch: the same computation, batched and one by one
          + [alone - mu]                                 beta_engine: the rest: kernels, the KV cache, fused operations
"""

from dataclasses import dataclass

from torch import Tensor

from .mismatch import by_probability, drift_slope, pearson, to_floats


@dataclass(frozen=True)
class Scores:
    """Log-probabilities in nats of the same n tokens, sampled under version s: five computations, each [n].

    Attributes:
        mu: what the generator reported.
        own: the trainer as it trains, with the weights of s.
        lowered: the trainer's code with the weights of s rounded to the generator's dtypes and computing in them, in forward
            passes of the same shapes.
        alone: the same with every completion in a forward pass of its own.
        later: the trainer as it trains, with the weights of t, in the forward passes of ``own``.
    """

    mu: Tensor
    own: Tensor
    lowered: Tensor
    alone: Tensor
    later: Tensor


@dataclass(frozen=True)
class Parts:
    """Differences of log-probabilities in nats, float64 [n]: ``alpha + beta = total``, and beta's parts add up to beta."""

    total: Tensor
    alpha: Tensor
    beta: Tensor
    beta_dtype: Tensor
    beta_batch: Tensor
    beta_engine: Tensor


def decompose(scores: Scores) -> Parts:
    """The parts of every token's gap, in float64: differences of float32 values lose nothing there."""
    mu, own, lowered, alone, later = (
        value.double()  # see above
        for value in (scores.mu, scores.own, scores.lowered, scores.alone, scores.later)
    )
    return Parts(later - mu, later - own, own - mu, own - lowered, lowered - alone, alone - mu)


def phantom_clips(beta: Tensor, advantages: Tensor, clip: tuple[float, float]) -> Tensor:
    """Tokens that beta alone clips: exp(beta) is beyond the clip side that is active for the sign of A. Bool [n].

    Args:
        clip: ``clip_low`` and ``clip_high`` of the policy loss.
    """
    ratio = beta.exp()
    return ((advantages > 0) & (ratio > 1 + clip[1])) | ((advantages < 0) & (ratio < 1 - clip[0]))


def decomposition_metrics(
    parts: Parts, mu: Tensor, advantages: Tensor, sequence: Tensor, position: Tensor, clip: tuple[float, float]
) -> dict[str, float]:
    """Statistics of the parts over the tokens of a probe.

    Args:
        mu: log-probability that the generator reported, [n].
        advantages: of the completion of each token, [n].
        sequence: index of the sequence of each token, int64 [n].
        position: index of each token in its sequence, int64 [n].
        clip: ``clip_low`` and ``clip_high`` of the policy loss.

    Returns:
        For each part its ``mean``, ``sd`` (population) and ``abs_mean``; ``phantom_clip``, the share of tokens that beta
        alone clips; ``advantage_corr``, the correlation of beta and A over tokens, NaN where either is constant;
        ``drift_slope`` of beta in nats per 1000 tokens; the mean of ``|beta|`` by probability.
    """
    values: dict[str, Tensor] = {}
    for name, part in vars(parts).items():
        values |= {f"{name}_mean": part.mean(), f"{name}_sd": part.std(correction=0)}
        values[f"{name}_abs_mean"] = part.abs().mean()
    exact = mu.double()  # float64: as the parts
    values |= {
        "phantom_clip": phantom_clips(parts.beta, advantages, clip).to(exact).mean(),
        "advantage_corr": pearson(parts.beta, advantages.to(exact)),
        "drift_slope": drift_slope(parts.beta, sequence, position),
        **by_probability(parts.beta.abs(), exact),
    }
    return to_floats(values)


def alpha_of_stale(d_roll: Tensor, staleness: Tensor, beta_mean: float) -> float:
    """An estimate of the mean of alpha over trained tokens that are stale: the mean of their d less that of beta elsewhere.

    Alpha of a trained token could only be had with the weights that sampled it. NaN where no token is stale.

    Args:
        d_roll: ``old - mu`` of the trained tokens, [n].
        staleness: of each token in versions, int64 [n].
        beta_mean: the mean of beta over the tokens of a probe.
    """
    return float(d_roll.double()[staleness > 0].mean()) - beta_mean  # float64: a small difference of means
