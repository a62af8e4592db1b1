"""Where a non-finite number first appeared, so that a skipped step says more than that it was skipped."""

from typing import Any

import torch
from torch import Tensor, nn

from .batch import MicroBatch
from .optim import Optimizer
from .policy import Policy


def find_overflow(policy: Policy, optimizer: Optimizer, micro_batches: list[MicroBatch], temperature: float) -> dict[str, str]:
    """The pass (forward or backward) and the module in which the first non-finite number of a step appeared.

    The forward pass is run again with a hook on every module; only when it is finite the gradients of the step that
    just failed are searched, the last module of the model first, as the backward pass goes.
    """
    for micro_batch in micro_batches:
        module = _first_nonfinite_output(policy, micro_batch, temperature)
        if module is not None:
            return {"where": "forward", "module": module}
    parameter = optimizer.first_nonfinite_grad()
    if parameter is None:
        return {"where": "gradient norm", "module": ""}
    return {"where": "backward", "module": parameter.rpartition(".")[0]}


@torch.no_grad()
def _first_nonfinite_output(policy: Policy, micro_batch: MicroBatch, temperature: float) -> str | None:
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else (output,)
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                    found.append(name)

        return hook

    # children report before their parents do, so the first name found is the innermost module
    handles = [module.register_forward_hook(watch(name)) for name, module in policy.model.named_modules() if name]
    try:
        logprobs, _ = policy.logprobs(micro_batch.tokens, temperature)
    finally:
        for handle in handles:
            handle.remove()
    if not found and not bool(logprobs.isfinite().all()):
        return "lm_head"
    return found[0] if found else None
