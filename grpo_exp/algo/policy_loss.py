"""The policy losses by name, each a function of the tokens of some whole sequences and of the configuration.

``r = exp(new - p)`` with p the proximal log-probability: what the generator reported, or what a correction puts in its
place (:mod:`grpo_exp.algo.correction`). A NaN in a token reaches its loss and its gradient, and no other's unless they share
a sequence ratio.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_exp.config.schema import AlgoConfig, Loss

from . import loss
from .loss import PolicyLoss, clamp_log_ratio


@dataclass(frozen=True)
class Tokens:
    """The n tokens of some whole sequences. All are [n]; gradients flow into ``new`` only.

    Attributes:
        new: log-probability in nats under the weights being trained.
        proximal: the one that ``new`` is compared with in the ratio.
        mu: what the generator reported.
        advantages: of each token's sequence.
        sequence: index of each token's sequence, int64, in any order.
    """

    new: Tensor
    proximal: Tensor
    mu: Tensor
    advantages: Tensor
    sequence: Tensor


def ppo_clip(tokens: Tokens, algo: AlgoConfig) -> PolicyLoss:
    """PPO's clipped surrogate, and with ``algo.dual_clip`` its bound for negative advantages: :func:`loss.ppo_clip`."""
    found = loss.ppo_clip(
        tokens.new[:, None],
        tokens.proximal[:, None],
        tokens.advantages,
        torch.ones_like(tokens.new[:, None], dtype=torch.bool),
        algo.clip_low,
        algo.clip_high,
        algo.dual_clip,
    )
    return PolicyLoss(found.per_token[:, 0], found.ratio[:, 0], found.clipped[:, 0])


def gspo(tokens: Tokens, algo: AlgoConfig) -> PolicyLoss:
    """GSPO (arXiv 2507.18071): PPO's loss with one ratio for all T tokens of a sequence, ``exp(sum(new - p) / T)``."""
    log_ratio = _means(tokens.new - tokens.proximal.detach(), tokens.sequence)
    return ppo_clip(replace(tokens, new=log_ratio, proximal=torch.zeros_like(log_ratio)), algo)


def cispo(tokens: Tokens, algo: AlgoConfig) -> PolicyLoss:
    """CISPO (arXiv 2506.13585): REINFORCE with a truncated ratio, ``L = -sg(min(r, 1 + clip_high)) A new``.

    The gradient is ``-min(r, 1 + clip_high) A`` times that of ``new``: beyond the bound a token keeps the gradient that PPO
    takes from it. The value of L has no meaning of its own.
    """
    ratio = _ratio(tokens).detach()
    per_token = -ratio.clamp(max=1 + algo.clip_high) * tokens.advantages.detach() * tokens.new
    return PolicyLoss(per_token, ratio, ratio > 1 + algo.clip_high)


def dppo_tv(tokens: Tokens, algo: AlgoConfig) -> PolicyLoss:
    """DPPO with the binary total variation (arXiv 2602.04879): ``L = -r A`` for the tokens that are kept, else 0.

    Kept are those with ``p_new - p_mu <= clip_high`` where A > 0 and ``p_new - p_mu >= -clip_low`` where A < 0:
    differences of probabilities, which for rare tokens are small whatever their ratio is.
    """
    ratio, advantages = _ratio(tokens), tokens.advantages.detach()
    moved = tokens.new.detach().exp() - tokens.mu.exp()
    beyond = ((advantages > 0) & (moved > algo.clip_high)) | ((advantages < 0) & (moved < -algo.clip_low))
    # not by where(): a NaN in a rejected token must reach the loss
    return PolicyLoss(-ratio * advantages * (~beyond).to(ratio), ratio.detach(), beyond)


LOSSES: dict[Loss, Callable[[Tokens, AlgoConfig], PolicyLoss]] = {
    Loss.ppo_clip: ppo_clip,
    Loss.gspo: gspo,
    Loss.cispo: cispo,
    Loss.dppo_tv: dppo_tv,
}


def policy_loss(tokens: Tokens, algo: AlgoConfig) -> PolicyLoss:
    """The loss that ``algo.loss`` names, before any weighting; tensors are [n]."""
    return LOSSES[algo.loss](tokens, algo)


def _ratio(tokens: Tokens) -> Tensor:
    return clamp_log_ratio(tokens.new - tokens.proximal.detach()).exp()


def _means(values: Tensor, sequence: Tensor) -> Tensor:
    """For each token the mean over its sequence, summed in float64, [n]."""
    indices, place = torch.unique(sequence, return_inverse=True)
    sums = torch.zeros(len(indices), dtype=torch.float64, device=values.device)  # over thousands of tokens
    counts = torch.zeros_like(sums).index_add(0, place, torch.ones_like(values, dtype=sums.dtype))
    return (sums.index_add(0, place, values.to(sums)) / counts)[place].to(values)
