"""``distributed=fsdp2``: torch's ``fully_shard``, told to sum in the declared dtype and to say what it really did.

Every rank holds a part of each parameter, of its gradient and of its moments: rows, as even as they come. A layer's whole
weights are there while it computes, forward and backward, and are given back at once. accelerate is not asked: on a CPU it
leaves the model as it is without a word.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..policy import Policy
from ..precision import dtype_name
from ..token_batch import TokenBatch
from .ranks import Ranks
from .wrap import Scorer


class Shards:
    """The wrapper of a policy whose weights lie in parts on all ranks. All passes go through it, on every rank at once."""

    wraps_every_pass = True

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.ranks = ranks
        self.reduced: set[str] = set()  # dtypes in which gradients were really summed, for the audit
        self._mesh = DeviceMesh.from_group(ranks.compute, policy.device.type)
        # matmuls run under the policy's own autocast, as without shards: only the sum has a dtype of its own
        precision = MixedPrecisionPolicy(reduce_dtype=policy.precision.grad_reduce, cast_forward_inputs=False)
        scorer = Scorer(policy)
        for module in [*_layers(policy), scorer]:
            # the root's weights are given back too: they may be written to between a pass without gradient and the next one
            self._sum(fully_shard(module, mesh=self._mesh, mp_policy=precision, reshard_after_forward=True))
        self.module = scorer

    @property
    def name(self) -> str:
        """The wrapper in effect."""
        parts = [parameter for parameter in self.module.parameters() if isinstance(parameter, DTensor)]
        whole = any(not isinstance(parameter, DTensor) for parameter in self.module.parameters())
        sharded = all(part.device_mesh.size() == self.ranks.count and part.placements[0].is_shard() for part in parts)
        return "fsdp2" if sharded and not whole else "fsdp2, in part"

    def logprobs(self, tokens: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """A pass whose backward pass sums the gradients of all ranks into the parts that each of them holds."""
        found: tuple[Tensor, Tensor] = self.module(tokens, temperature)
        return found

    def _sum(self, module: FSDPModule) -> None:
        """Not the mean, which is torch's default: weights of the loss are normalised over the step of all ranks already."""
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_all_reduce_hook(lambda summed: self.reduced.add(dtype_name(summed.dtype)))


def _layers(policy: Policy) -> list[nn.Module]:
    """The model's repeated blocks, by what transformers says must not be torn apart; what is in none is the root's."""
    names = set(getattr(policy.model, "_no_split_modules", None) or ())
    return [module for module in policy.body.modules() if type(module).__name__ in names]
