"""Scoring with one trainer: the log-probability pass of a run, some completions at a time, no gradient."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import RunFailed
from ..policy import Policy
from ..precision import DtypeProbe, Precision, dtype_name
from ..token_batch import Completion, RowBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Scored:
    """``logprobs``: of every token of every completion, in order, [n] float32, nats."""

    logprobs: NDArray[np.float32]
    seconds: float


@torch.no_grad()
def score(
    model: "PreTrainedModel",
    precision: Precision,
    completions: Sequence[Completion],
    micro_batch: int,
    temperature: float,
    chunk: int,
) -> Scored:
    """Log-probabilities of completions under a model.

    Args:
        micro_batch: completions in one forward pass, in the order given; each is padded to the longest of them.
        chunk: positions whose logits are held at once.

    Raises:
        ConfigError: if the model cannot compute its head in the dtype of this precision.
        RunFailed: if the products were computed in another dtype than this precision says.
    """
    start = time.monotonic()
    policy = Policy(model, precision, chunk)
    probe = DtypeProbe(policy.body)
    parts = []
    try:
        for first in range(0, len(completions), micro_batch):
            batch = RowBatch.build(completions[first : first + micro_batch], policy.device)
            parts.append(policy.logprobs(batch, temperature)[0].float().cpu().numpy())  # mu is fp32 too
    finally:
        probe.close()
    found = {"compute": probe.observed(), "head": dtype_name(policy.logits_dtype or precision.head)}
    wrong = [f"{site} is {name}" for site, name in found.items() if name != dtype_name(getattr(precision, site))]
    if wrong:
        raise RunFailed(f"the trainer computes in another dtype than asked for: {', '.join(wrong)}")
    return Scored(np.concatenate(parts), time.monotonic() - start)
