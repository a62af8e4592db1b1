"""The prompt of a group forwarded once for all of its completions.

The prompts are run first, with gradients, into a cache of keys and values; that cache is repeated for the completions,
which are run on top of it. For a model in which every layer attends to everything before it, hidden states and gradients
are those of prompt + completion in one row, up to the order of sums. Other models (sliding windows, recurrent states)
are noticed, and forward whole rows.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .token_batch import Completion, RowBatch, SharedBatch

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

TOLERANCE = 0.05
"""Of the states' norm, in the check of :func:`shares_prompts`: far above rounding in 16 bits, far below other positions."""


def shared_states(model: "PreTrainedModel", body: nn.Module, batch: SharedBatch) -> Tensor:
    """The hidden state that predicts each completion token, [n, hidden size]."""
    cache = _new_cache(model)
    of_prompts = _forward(body, batch.prompts, batch.prompt_mask, _positions(batch), cache)[:, -1]
    first = of_prompts[batch.owners]
    states = first[:, None]
    if batch.completions.shape[1] > 1:
        _repeat(cache, batch)
        ids = batch.completions[:, :-1]
        mask = None
        if batch.prompt_mask is not None:
            mask = torch.cat([batch.prompt_mask[batch.owners], torch.ones_like(ids)], dim=1)
        positions = _prompt_lengths(batch)[batch.owners, None] + torch.arange(ids.shape[1], device=ids.device)
        states = torch.cat([states, _forward(body, ids, mask, positions, cache)], dim=1)
    return states[batch.rows, batch.positions]


@torch.no_grad()
def shares_prompts(model: "PreTrainedModel", body: nn.Module) -> bool:
    """Whether :func:`shared_states` is right for a model: by its kinds of layers, and by trying it on a few tokens."""
    from transformers.cache_utils import DynamicLayer

    layers = _new_cache(model).layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return False
    prompts = [[1], [1, 2, 3]]
    completions = [Completion(row // 2, prompts[row // 2], [3 - row, row, 2]) for row in range(4)]
    rows = RowBatch.build(completions, model.device)
    expected = body(input_ids=rows.input_ids, use_cache=False).last_hidden_state[rows.rows, rows.positions - 1]
    try:
        found = shared_states(model, body, SharedBatch.build(completions, model.device))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # its own kind of cache, mask or positions
        return False
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())


def _new_cache(model: "PreTrainedModel") -> "DynamicCache":
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _forward(body: nn.Module, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: "DynamicCache") -> Tensor:
    output: Any = body(
        input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
    )
    states: Tensor = output.last_hidden_state
    return states


def _prompt_lengths(batch: SharedBatch) -> Tensor:
    if batch.prompt_mask is None:
        return batch.prompts.new_full((len(batch.prompts),), batch.prompts.shape[1])
    return batch.prompt_mask.sum(1)


def _positions(batch: SharedBatch) -> Tensor:
    """Positions of the prompt tokens, [prompts, width]; padding is at 0."""
    width = batch.prompts.shape[1]
    columns = torch.arange(width, device=batch.prompts.device)[None]
    return (columns - (width - _prompt_lengths(batch)[:, None])).clamp_(min=0)


def _repeat(cache: "DynamicCache", batch: SharedBatch) -> None:
    """Keys and values of each prompt for each of its rows."""
    if batch.copies is not None:
        cache.batch_repeat_interleave(batch.copies)
    else:
        cache.batch_select_indices(batch.owners)
