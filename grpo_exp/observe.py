"""What dtypes are in effect, read from live objects: the other side of what precision was declared."""

import torch
from torch import nn

from .device import num_ranks
from .optim import Optimizer
from .policy import Policy
from .precision import DtypeProbe, dtype_name, observed_dtypes


def observed_at_startup(model: nn.Module, optimizer: Optimizer, generator: dict[str, str]) -> dict[str, str]:
    """Sites that can be seen before anything was trained. ``generator`` is what the workers reported."""
    return {
        "params": observed_dtypes(model.parameters()),
        "matmul": torch.get_float32_matmul_precision(),
        "loss_scale": optimizer.loss_scale.mode_in_effect,
        "num_ranks": str(num_ranks()),
        **generator,
    }


def observed_after_step(
    policy: Policy, optimizer: Optimizer, probe: DtypeProbe, generator: dict[str, str]
) -> dict[str, str]:
    """Every site, while the gradients of the first applied step are still there."""
    return observed_at_startup(policy.model, optimizer, generator) | {
        "compute": probe.observed(),
        "head": "none" if policy.logits_dtype is None else dtype_name(policy.logits_dtype),
        "grad_reduce": observed_dtypes(p.grad for p in optimizer.params),
        "optimizer_state": observed_dtypes(optimizer.moments()),
    }
