"""Token ids of one forward pass: rows of prompt and completion, or completions beside the prompts that they share.

Of G completions of one prompt the prompt need be computed once only: its keys and values are all that the completions
see of it. A ``RowBatch`` repeats it in every row, a ``SharedBatch`` does not. Both hold the completion tokens in the same
order, row after row, so nothing that follows a forward pass knows the difference.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Completion(NamedTuple):
    """One row to be scored. Rows with the same ``group`` have the same prompt."""

    group: int
    prompt_ids: list[int]
    token_ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True)
class RowBatch:
    """Rows of prompt + completion, padded on the right. Padding cannot reach a real token under causal attention."""

    input_ids: Tensor  # [rows, width] int64
    rows: Tensor  # [n] int64: row of each completion token
    positions: Tensor  # [n] int64: position in the row of each completion token

    @property
    def tokens(self) -> Tensor:
        """The completion tokens, [n]."""
        return self.input_ids[self.rows, self.positions]

    @classmethod
    def build(cls, completions: Sequence[Completion], device: torch.device) -> "RowBatch":
        input_ids = _padded([c.prompt_ids + c.token_ids for c in completions])
        rows, offsets = _token_places(completions)
        starts = np.array([len(c.prompt_ids) for c in completions])
        return cls(*(torch.from_numpy(array).to(device) for array in (input_ids, rows, starts[rows] + offsets)))


@dataclass(frozen=True)
class SharedBatch:
    """Prompts, padded on the left, and completions without them, padded on the right."""

    prompts: Tensor  # [prompts, prompt width] int64
    prompt_mask: Tensor | None  # [prompts, prompt width] int64: 0 on padding; None where there is none
    completions: Tensor  # [rows, width] int64
    owners: Tensor  # [rows] int64: prompt of each row
    copies: int | None  # rows per prompt, where all have as many, in the order of the prompts
    rows: Tensor  # [n] int64: row of each completion token
    positions: Tensor  # [n] int64: position of each completion token in its completion

    @property
    def tokens(self) -> Tensor:
        """The completion tokens, [n]."""
        return self.completions[self.rows, self.positions]

    @classmethod
    def build(cls, completions: Sequence[Completion], device: torch.device) -> "SharedBatch":
        """Rows of one group have to follow each other."""
        groups = list(dict.fromkeys(c.group for c in completions))
        index = {group: place for place, group in enumerate(groups)}
        owners = np.array([index[c.group] for c in completions])
        prompt_of = {c.group: c.prompt_ids for c in completions}
        prompts = [prompt_of[group] for group in groups]
        counts = np.bincount(owners)
        mask = _left_mask(prompts)
        rows, offsets = _token_places(completions)
        return cls(
            prompts=torch.from_numpy(_padded(prompts, left=True)).to(device),
            prompt_mask=None if mask is None else torch.from_numpy(mask).to(device),
            completions=torch.from_numpy(_padded([c.token_ids for c in completions])).to(device),
            owners=torch.from_numpy(owners).to(device),
            copies=int(counts[0]) if (counts == counts[0]).all() else None,
            rows=torch.from_numpy(rows).to(device),
            positions=torch.from_numpy(offsets).to(device),
        )


TokenBatch = RowBatch | SharedBatch


@dataclass(frozen=True)
class Cut:
    """How the rows of a step are shared out over forward passes."""

    parts: list[list[int]]
    num_tokens: int  # forwarded, padding included


def cut_rows(completions: Sequence[Completion], rows: Iterable[int], budget: int) -> Cut:
    """Rows of similar length together, as many as have a padded size within a budget of tokens; one at least."""
    shapes = {row: _Shape(row, 0, completions[row].num_tokens) for row in rows}
    order = [row for _, row in sorted((-shape.width, row) for row, shape in shapes.items())]
    return _cut(order, shapes, budget)


def cut_groups(completions: Sequence[Completion], rows: Iterable[int], budget: int) -> Cut:
    """Rows of a group together, groups of similar length; in each part the prompt of a group counts once."""
    shapes = {row: _Shape(c.group, len(c.prompt_ids), len(c.token_ids)) for row in rows for c in (completions[row],)}
    longest: dict[int, int] = {}
    for shape in shapes.values():
        longest[shape.group] = max(longest.get(shape.group, 0), shape.prompt_width + shape.width)
    order = [row for *_, row in sorted((-longest[shape.group], shape.group, row) for row, shape in shapes.items())]
    return _cut(order, shapes, budget)


class _Shape(NamedTuple):
    group: int
    prompt_width: int  # 0: the prompt is in the row
    width: int


def _cut(order: list[int], shapes: dict[int, _Shape], budget: int) -> Cut:
    parts: list[list[int]] = []
    total = size = prompt_width = width = 0
    groups: set[int] = set()
    for row in order:
        shape = shapes[row]
        prompts = len(groups) + (shape.group not in groups)
        wider, wider_prompt = max(width, shape.width), max(prompt_width, shape.prompt_width)
        grown = prompts * wider_prompt + (len(parts[-1]) + 1 if parts else 1) * wider
        if parts and grown <= budget:
            parts[-1].append(row)
            groups.add(shape.group)
            size, prompt_width, width = grown, wider_prompt, wider
        else:
            total += size
            parts.append([row])
            groups, prompt_width, width = {shape.group}, shape.prompt_width, shape.width
            size = prompt_width + width
    return Cut(parts, total + size)


def _padded(sequences: Sequence[list[int]], left: bool = False) -> NDArray[np.int64]:
    width = max(map(len, sequences))
    found = np.zeros((len(sequences), width), dtype=np.int64)
    for line, ids in enumerate(sequences):
        found[line, slice(width - len(ids), None) if left else slice(len(ids))] = ids
    return found


def _left_mask(sequences: Sequence[list[int]]) -> NDArray[np.int64] | None:
    lengths = np.array([len(ids) for ids in sequences])
    width = lengths.max()
    return None if (lengths == width).all() else (np.arange(width) >= width - lengths[:, None]).astype(np.int64)


def _token_places(completions: Sequence[Completion]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and offset in its completion of every completion token, each [n]."""
    lengths = np.array([len(c.token_ids) for c in completions])
    rows = np.repeat(np.arange(len(completions)), lengths)
    return rows, np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
