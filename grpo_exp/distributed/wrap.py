"""The policy's log-probability pass as a module, so that a wrapper's hooks see its forward and its backward pass."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ..policy import Policy
from ..precision import dtype_name
from ..token_batch import TokenBatch
from .ranks import Ranks


class Scorer(nn.Module):
    """``forward`` is :meth:`Policy.logprobs`: all parameters that it uses are below this module."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = [policy]  # in a list: it is no submodule

    def forward(self, tokens: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self._policy[0].logprobs(tokens, temperature)


class Replicas:
    """``distributed=ddp``: every rank holds the whole model; gradients are summed in ``precision.grad_reduce``."""

    wraps_every_pass = False  # the last one of a step sums what all have left

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.ranks, self.dtype = ranks, policy.precision.grad_reduce
        self.reduced: set[str] = set()  # dtypes in which gradients were really summed, for the audit
        self.module = DistributedDataParallel(
            Scorer(policy), process_group=ranks.compute, forward_sync_buffers=False, gradient_as_bucket_view=True
        )
        self.module.register_comm_hook(self, _sum)

    @property
    def name(self) -> str:
        """The wrapper in effect."""
        return "ddp" if isinstance(self.module, DistributedDataParallel) else type(self.module).__name__

    def logprobs(self, tokens: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """A pass whose backward pass sums the gradients of all ranks, with what passes before left in them."""
        found: tuple[Tensor, Tensor] = self.module(tokens, temperature)
        return found


def _sum(wrapped: Replicas, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Not the mean, which is torch's default: weights of the loss are normalised over the step of all ranks already."""
    buffer: Tensor = bucket.buffer()
    sent = buffer.to(wrapped.dtype)
    wrapped.reduced.add(dtype_name(sent.dtype))
    work = dist.all_reduce(sent, group=wrapped.ranks.compute, async_op=True)
    assert work is not None

    def take(future: torch.futures.Future[Any]) -> Tensor:
        return buffer if sent is buffer else buffer.copy_(sent)

    return cast(torch.futures.Future[Tensor], work.get_future().then(take))
