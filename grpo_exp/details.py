"""Of a step what does not fit in a row of numbers: some of its completions, and how far apart both sides were, by token."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .batch import StepBatch
from .metrics import Passes
from .track import Details, Sample

BINS = 64


def details_of(
    step: int, batch: StepBatch, passes: Passes, num_samples: int, decode: Callable[[Sequence[Any], Any], list[Any]]
) -> Details:
    """The first completion of the first groups, and a histogram of ``old - mu``.

    Args:
        decode: rows of the data set and token ids to text.
    """
    groups = batch.groups[:num_samples]
    texts = decode([group.row for group in groups], [group.rollouts[0].token_ids for group in groups])
    samples = [
        Sample(
            step=step,
            prompt=str(group.row["prompt"]),
            completion=text if isinstance(text, str) else text[-1]["content"],
            reward=None if math.isnan(group.rewards[0]) else group.rewards[0],
            num_tokens=len(group.rollouts[0].token_ids),
            finished=group.rollouts[0].finished,
        )
        for group, text in zip(groups, texts, strict=True)
    ]
    log_ratio = (passes.old - passes.mu).detach().cpu()
    log_ratio = log_ratio[log_ratio.isfinite()]
    if not len(log_ratio):
        return Details(samples, [0], [0.0, 1.0])
    counts, edges = torch.histogram(log_ratio, BINS)
    return Details(samples, [int(count) for count in counts.tolist()], edges.tolist())
