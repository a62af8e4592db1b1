"""The thorough check of a sync, once, after the first: do both sides give the same tokens the same log-probabilities?

Checksums say that the weights arrived. This says that the generator computes with them what the trainer does: the same
model, heads and norms, and log-probabilities after temperature.
"""

from typing import Any

import numpy as np
import torch

from .errors import RunFailed
from .policy import LogProbs, Policy
from .precision import Precision, dtype_name
from .rollout.source import RolloutSource
from .token_batch import Completion, RowBatch

MAX_TOKENS = 32
BOUNDS = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.5}
"""Mean absolute difference in nats by the coarsest dtype on either side: far above rounding, far below a wrong model."""


def check_first_sync(source: RolloutSource, policy: Policy, temperature: float, logprobs: LogProbs) -> dict[str, Any]:
    """One completion from every worker, scored by the trainer with ``logprobs``, its policy's pass.

    Returns:
        What the manifest says of it: number of tokens, those among them that the trainer itself has no finite value
        for (an overflow, which its first step deals with), mean and largest absolute difference of the others
        (None where there are none), and the bound.

    Raises:
        RunFailed: if they differ by more than rounding can explain.
        Interrupted: if the run was asked to stop.
    """
    own, mu = [], []
    for prompt_ids, rollout in source.first_completions(MAX_TOKENS):
        batch = RowBatch.build([Completion(0, prompt_ids, rollout.token_ids)], policy.device)
        with torch.no_grad():
            scored, _ = logprobs(batch, temperature)
        own.append(scored.cpu().numpy())
        mu.append(rollout.mu)
    trainer, generator = np.concatenate(own), np.concatenate(mu)
    finite = np.isfinite(trainer)
    gap = np.abs(trainer[finite] - generator[finite])
    bound = BOUNDS[coarsest(policy.precision)]
    found = {
        "tokens": len(trainer),
        "nonfinite": int((~finite).sum()),
        "abs_mean": None,
        "abs_max": None,
        "bound": bound,
    }
    if len(gap):
        found |= {"abs_mean": float(gap.mean()), "abs_max": float(gap.max())}
    if len(gap) and not gap.mean() <= bound:
        raise RunFailed(
            f"the generator's log-probabilities are not the trainer's, though it holds the trainer's weights: mean absolute"
            f" difference {gap.mean():.3g} nats over {len(gap)} tokens, more than rounding explains ({bound:g})"
        )
    return found


def coarsest(precision: Precision) -> str:
    """The coarsest dtype that either side computes in."""
    names = {
        dtype_name(dtype)
        for dtype in (precision.compute, precision.head, precision.rollout, precision.rollout_head, precision.wire)
    }
    names.add({"highest": "fp32", "high": "fp16", "medium": "bf16"}[precision.matmul])  # TF32 rounds as fp16 does
    return next(name for name in ("bf16", "fp16", "fp32") if name in names)
