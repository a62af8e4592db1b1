"""The micro-batches of a step shared out over ranks: about as many tokens for each, just as many passes.

Normalisation, advantages and everything else of the whole step are in the micro-batches already, so who computes which
changes no gradient. Every rank makes as many passes of every kind, so that calls in which all take part meet; a rank that
has none left makes it over a token with weight 0.
"""

from dataclasses import replace
from typing import Any

import torch

from ..batch import MicroBatch
from ..token_batch import Completion, RowBatch, SharedBatch

NOBODY = -1
"""The sequence of a token that belongs to none: its pass counts for nothing."""


def share(micro_batches: list[MicroBatch], num_ranks: int) -> list[list[MicroBatch]]:
    """For each rank its micro-batches, in the order of passes; those with a gradient come last."""
    kinds: dict[tuple[bool, str, bool], list[MicroBatch]] = {}
    for micro_batch in micro_batches:
        kinds.setdefault(_kind(micro_batch), []).append(micro_batch)
    shares: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for kind in sorted(kinds):
        group = sorted(kinds[kind], key=_num_tokens, reverse=True)
        for start in range(0, len(group), num_ranks):
            # a round: one for each rank, the largest to whoever has least
            order = sorted(range(num_ranks), key=loads.__getitem__)
            for place, rank in enumerate(order):
                chosen = group[start + place] if start + place < len(group) else _nothing(group[0])
                shares[rank].append(chosen)
                loads[rank] += _num_tokens(chosen)
    return shares


def is_nothing(micro_batch: MicroBatch) -> bool:
    return int(micro_batch.sequence[0]) == NOBODY


def _kind(micro_batch: MicroBatch) -> tuple[bool, str, bool]:
    """What decides how many times a pass calls the model, and whether it goes back."""
    tokens = micro_batch.tokens
    return micro_batch.has_gradient, type(tokens).__name__, _is_long(micro_batch)


def _is_long(micro_batch: MicroBatch) -> bool:
    tokens = micro_batch.tokens
    return isinstance(tokens, SharedBatch) and tokens.completions.shape[1] > 1


def _num_tokens(micro_batch: MicroBatch) -> int:
    tokens = micro_batch.tokens
    if isinstance(tokens, SharedBatch):
        return tokens.prompts.numel() + tokens.completions.numel()
    return tokens.input_ids.numel()


def _nothing(like: MicroBatch) -> MicroBatch:
    """One completion with weight 0, of the same kind."""
    completions = [Completion(0, [0], [0] * (1 + _is_long(like)))]
    build = SharedBatch.build if isinstance(like.tokens, SharedBatch) else RowBatch.build
    tokens = build(completions, like.mu.device)
    num = len(tokens.rows)
    empty: dict[str, Any] = {
        name: torch.zeros(num, dtype=value.dtype, device=value.device)
        for name, value in vars(like).items()
        if isinstance(value, torch.Tensor)
    }
    empty["sequence"].fill_(NOBODY)
    return replace(like, tokens=tokens, **empty)
