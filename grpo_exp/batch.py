"""From groups to what an optimizer step computes on: advantages, loss weights, micro-batches.

Everything that depends on the whole step (advantages, the loss's denominator) is fixed here, before the step is cut into
micro-batches; so the gradient cannot depend on the cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .algo.advantage import Advantages, group_advantages
from .algo.loss import sequence_weights
from .config.schema import AlgoConfig
from .policy import TokenBatch
from .rollout.types import Group, Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a step. Per token tensors are flat, [n], in the order of ``tokens.rows``."""

    tokens: TokenBatch
    mu: Tensor  # [n] float32
    advantages: Tensor  # [n]: of the token's sequence
    weights: Tensor  # [n]: the loss weight of the token's sequence
    sequence: Tensor  # [n] int64: index of the sequence in the step
    has_gradient: bool  # False: every advantage or weight is 0, so a forward pass for the metrics is all it takes


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
    groups: list[Group], algo: AlgoConfig, max_completion_tokens: int, tokens_per_micro_batch: int, device: torch.device
) -> StepBatch:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    prompts = [group.prompt_ids for group in groups for _ in group.rollouts]
    rewards = torch.tensor([group.rewards for group in groups], dtype=torch.float32)  # rewards are fp32 always
    advantages = group_advantages(rewards, algo.advantage, algo.advantage_eps)
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    included = advantages.valid.flatten()
    if algo.mask_truncated:
        included = included & torch.tensor([rollout.finished for rollout in rollouts])
    weights = sequence_weights(lengths, included, algo.normalization, max_completion_tokens)
    sizes = [len(prompt) + len(rollout.token_ids) for prompt, rollout in zip(prompts, rollouts, strict=True)]
    values = advantages.values.flatten()
    contributes = (values != 0) & (weights != 0)
    if not contributes.any():  # a gradient of zeros all the same: AdamW goes on with its momentum
        contributes = torch.ones_like(contributes)
    micro_batches = [
        _micro_batch(rows, prompts, rollouts, values, weights, device, has_gradient)
        for has_gradient in (True, False)
        for rows in cut(sizes, contributes.eq(has_gradient).nonzero()[:, 0].tolist(), tokens_per_micro_batch)
    ]
    return StepBatch(groups, rollouts, rewards, advantages, included, micro_batches)


def cut(sizes: Sequence[int], rows: Sequence[int], budget: int) -> list[list[int]]:
    """Some rows into micro-batches of similar length whose padded size stays within a budget of tokens; one row at least."""
    parts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-sizes[row], row)):
        # rows come longest first, so the first row of a part is its width
        if parts and (len(parts[-1]) + 1) * sizes[parts[-1][0]] <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _micro_batch(
    rows: list[int],
    prompts: list[list[int]],
    rollouts: list[Rollout],
    advantages: Tensor,
    weights: Tensor,
    device: torch.device,
    has_gradient: bool,
) -> MicroBatch:
    width = max(len(prompts[row]) + len(rollouts[row].token_ids) for row in rows)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    for line, row in enumerate(rows):
        ids = prompts[row] + rollouts[row].token_ids
        input_ids[line, : len(ids)] = ids
    lengths = np.array([len(rollouts[row].token_ids) for row in rows])
    starts = np.array([len(prompts[row]) for row in rows])
    lines = np.repeat(np.arange(len(rows)), lengths)
    offsets = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    sequence = torch.from_numpy(np.array(rows)[lines])
    return MicroBatch(
        tokens=TokenBatch(
            torch.from_numpy(input_ids).to(device),
            torch.from_numpy(lines).to(device),
            torch.from_numpy(starts[lines] + offsets).to(device),
        ),
        mu=torch.from_numpy(np.concatenate([rollouts[row].mu for row in rows])).to(device),
        advantages=advantages[sequence].to(device),
        weights=weights[sequence].to(device),
        sequence=sequence.to(device),
        has_gradient=has_gradient,
    )
