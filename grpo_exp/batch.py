"""From groups to what an optimizer step computes on: advantages, loss weights, micro-batches.

Everything that depends on the whole step (advantages, the loss's denominator) is fixed here, before the step is cut into
micro-batches; so the gradient cannot depend on the cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .algo.advantage import Advantages, group_advantages, overlong_penalty
from .algo.loss import sequence_weights
from .config.schema import AlgoConfig
from .rollout.types import Group, Rollout
from .token_batch import Completion, RowBatch, SharedBatch, TokenBatch, cut_groups, cut_rows


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a step. Per token tensors are flat, [n], in the order of ``tokens.rows``."""

    tokens: TokenBatch
    mu: Tensor  # [n] float32
    advantages: Tensor  # [n]: of the token's sequence
    weights: Tensor  # [n]: the loss weight of the token's sequence
    sequence: Tensor  # [n] int64: index of the sequence in the step
    position: Tensor  # [n] int64: index of the token in its completion
    staleness: Tensor  # [n] int64: version that is trained minus version that sampled the token
    has_gradient: bool  # False: nothing of it is in the loss, so a forward pass for the metrics is all it takes
    same_weights: Tensor | None = (
        None  # [n]: of stale tokens, the trainer's log-prob under the weights that sampled them
    )
    old: Tensor | None = None  # [n]: log-prob at the start of the step; None: that of the pass itself, the only one
    reference: Tensor | None = None  # [n]: log-prob under the base checkpoint


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step."""

    groups: list[Group]
    rollouts: list[Rollout]
    rewards: Tensor  # [groups, G] float32, NaN: missing
    advantages: Advantages
    included: Tensor  # [sequences] bool: counted in the loss
    micro_batches: list[MicroBatch]

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def trainable(self) -> bool:
        """Whether any sequence has a valid reward in a group that has a baseline."""
        return bool(self.included.any())


def build_batch(
    groups: list[Group],
    algo: AlgoConfig,
    max_completion_tokens: int,
    tokens_per_micro_batch: int,
    device: torch.device,
    share_prompts: bool = False,
    version: int = 0,
) -> StepBatch:
    """Cut a step into micro-batches.

    Args:
        share_prompts: compute the prompt of a group once where that forwards fewer tokens, padding included.
        version: the policy version that is trained.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    completions = [Completion(n, g.prompt_ids, r.token_ids) for n, g in enumerate(groups) for r in g.rollouts]
    rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float32)  # rewards are fp32 always
    advantages = advantages_of(groups, algo, max_completion_tokens)
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    included = advantages.valid.flatten()
    if algo.mask_truncated:
        included = included & torch.tensor([rollout.finished for rollout in rollouts])
    weights = sequence_weights(lengths, included, algo.normalization, max_completion_tokens)
    values = advantages.values.flatten()
    contributes = weights != 0 if algo.penalises else (values != 0) & (weights != 0)
    if not contributes.any():  # a gradient of zeros all the same: AdamW goes on with its momentum
        contributes = torch.ones_like(contributes)
    micro_batches = []
    for has_gradient in (True, False):
        rows = contributes.eq(has_gradient).nonzero()[:, 0].tolist()
        for part, tokens in _token_batches(completions, rows, tokens_per_micro_batch, device, share_prompts):
            sequence = torch.tensor(part)[tokens.rows.cpu()]
            versions = np.concatenate([rollouts[row].versions for row in part])
            position = np.concatenate([np.arange(len(rollouts[row].token_ids)) for row in part])
            micro_batch = MicroBatch(
                tokens=tokens,
                mu=torch.from_numpy(np.concatenate([rollouts[row].mu for row in part])).to(device),
                advantages=values[sequence].to(device),
                weights=weights[sequence].to(device),
                sequence=sequence.to(device),
                position=torch.from_numpy(position).to(device),
                staleness=version - torch.from_numpy(versions.astype(np.int64)).to(device),
                has_gradient=has_gradient,
            )
            micro_batches.append(micro_batch)
    return StepBatch(groups, rollouts, rewards, advantages, included, micro_batches)


def advantages_of(groups: list[Group], algo: AlgoConfig, max_completion_tokens: int) -> Advantages:
    """Of groups with as many completions each, from their rewards less what is taken off for length."""
    rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float32)  # rewards are fp32 always
    lengths = torch.tensor([[len(rollout.token_ids) for rollout in group.rollouts] for group in groups])
    rewards += overlong_penalty(lengths, max_completion_tokens, algo.overlong_tokens, algo.overlong_penalty)
    return group_advantages(rewards, algo.advantage, algo.advantage_eps)


def _token_batches(
    completions: Sequence[Completion], rows: list[int], budget: int, device: torch.device, share_prompts: bool
) -> Iterator[tuple[list[int], TokenBatch]]:
    """The rows of a step cut into forward passes, the cheaper way."""
    repeated = cut_rows(completions, rows, budget)
    shared = cut_groups(completions, rows, budget) if share_prompts else repeated
    build = SharedBatch.build if shared.num_tokens < repeated.num_tokens else RowBatch.build
    for part in min(repeated, shared, key=lambda cut: cut.num_tokens).parts:
        yield part, build([completions[row] for row in part], device)
