"""Other weights in the trainer's model for a while: older versions of the policy, or its weights in other dtypes.

What is swapped is which tensors the modules hold. The parameters, and with them ties, gradients, the optimizer and the hooks
of a wrapper (which torch drops where the data of a parameter change their dtype), stay what they are; buffers, which engines
do not get from the trainer either, are left alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from .batch import MicroBatch, StepBatch
from .errors import RunFailed
from .lora import as_served, without_adapters
from .parts import in_parts, part, whole
from .policy import LogProbs, Policy
from .sync.names import canonical_name, is_adapter
from .sync.shm import checksum, unique_parameters
from .token_batch import TokenBatch


@contextmanager
def swapped(model: nn.Module, weights: list[Tensor]) -> Iterator[None]:
    """Compute with other weights, one for each of ``model.parameters()`` in order, of any float dtype. Without gradients.

    Weights that lie in parts on several ranks change places with parts of the others, so these are of the same dtype.
    """
    parameters = list(model.parameters())
    if any(in_parts(parameter) for parameter in parameters):
        with _exchanged([part(p.detach()) for p in parameters], [part(other) for other in weights]):
            yield
        return
    others = {id(own): other.to(own.device) for own, other in zip(parameters, weights, strict=True)}
    places = [
        (module._parameters, name, p)
        for module in model.modules()
        for name, p in module._parameters.items()
        if p is not None
    ]
    try:
        for owner, name, parameter in places:
            owner[name] = nn.Parameter(others[id(parameter)], requires_grad=False)
        yield
    finally:
        for owner, name, parameter in places:
            owner[name] = parameter


@contextmanager
def _exchanged(own: list[Tensor], others: list[Tensor]) -> Iterator[None]:
    kept = [tensor.clone() for tensor in own]
    try:
        torch._foreach_copy_(own, others)
        yield
    finally:
        torch._foreach_copy_(own, kept)


def rounded(model: nn.Module, *dtypes: torch.dtype) -> list[Tensor]:
    """The weights as they are after a cast to each of the dtypes in turn, for :func:`swapped`.

    Adapters are merged first, as for a generator, and then add nothing.
    """
    served = dict(as_served(model, unique_parameters(model)))
    weights = [
        torch.zeros_like(p) if is_adapter(name) else served[canonical_name(name)].detach()
        for name, p in model.named_parameters()
    ]
    for dtype in dtypes:
        weights = [weight.to(dtype) for weight in weights]
    return weights


class Reference:
    """The frozen policy that the KL divergence is taken from: the base checkpoint, in a dtype of its own.

    Takes one more copy of the weights. It has to be made before a checkpoint is loaded, from the weights that the run began
    with; ``checksum`` shows after a resume that it was.
    """

    def __init__(
        self,
        policy: Policy,
        temperature: float,
        unwatched: Callable[[], AbstractContextManager[None]] = nullcontext,
        across: LogProbs | None = None,
    ) -> None:
        """Copy the weights that the policy has now.

        Args:
            unwatched: a context in which nobody takes the dtypes that are computed in for those of the policy.
            across: the policy's pass where its weights lie in parts on several ranks, which have to copy them together.
        """
        own = policy.precision
        self.temperature, self.unwatched = temperature, unwatched
        self.policy = copy(policy)
        self.policy.precision = replace(own, params=own.reference)
        self._pass = across or self.policy.logprobs
        self._is_adapted = own.adapter is not None  # then the base is the reference, and there is no copy of it
        base = unique_parameters(policy.model).values() if self._is_adapted else policy.model.parameters()
        self.weights = [p.detach().to(own.reference, copy=not self._is_adapted) for p in base]
        self.checksum = checksum(whole(weight) for weight in self.weights)

    @torch.no_grad()
    def logprobs(self, tokens: TokenBatch) -> Tensor:
        """Of the completion tokens of a batch, [n] float32, in nats."""
        model = self.policy.model
        as_reference = without_adapters(model) if self._is_adapted else swapped(model, self.weights)
        with self.unwatched(), as_reference:
            return self._pass(tokens, self.temperature)[0]


class OlderWeights:
    """The versions of the policy that tokens of the next steps may have been sampled under, in the memory of the host.

    Exact for every stale token: it is scored again under the weights that sampled it, in the trainer's dtypes. Takes
    ``max_staleness`` copies of the weights, and a forward pass over the stale micro-batches for each older version.
    """

    def __init__(self, policy: Policy, temperature: float, max_staleness: int) -> None:
        self.policy, self.temperature, self.max_staleness = policy, temperature, max_staleness
        self._weights: dict[int, list[Tensor]] = {}

    def score(self, batch: StepBatch, version: int) -> StepBatch:
        """The batch with ``same_weights`` filled in; and the weights of now, which are ``version``, kept for later steps.

        Raises:
            RunFailed: a token was sampled under a version that is not held any more.
        """
        if self.max_staleness == 0:
            return replace(batch, micro_batches=[_with_scores(mb) for mb in batch.micro_batches])
        scored = [_with_scores(micro_batch) for micro_batch in batch.micro_batches]
        lags: list[int] = torch.unique(torch.cat([micro_batch.staleness for micro_batch in scored])).tolist()
        for lag in (lag for lag in lags if lag > 0):
            if version - lag not in self._weights:
                raise RunFailed(f"beta removal: version {version - lag} is not held, only {sorted(self._weights)}")
            with swapped(self.policy.model, self._weights[version - lag]), torch.no_grad():
                for micro_batch in scored:
                    chosen = micro_batch.staleness == lag
                    if bool(chosen.any()):
                        logprobs, _ = self.policy.logprobs(micro_batch.tokens, self.temperature)
                        assert micro_batch.same_weights is not None
                        micro_batch.same_weights[chosen] = logprobs[chosen]
        self._keep(version)
        return replace(batch, micro_batches=scored)

    def _keep(self, version: int) -> None:
        """No copy is made of a version that is held already: a skipped step left it as it is."""
        if version not in self._weights:
            self._weights[version] = [p.detach().to("cpu", copy=True) for p in self.policy.model.parameters()]
        self._weights = {held: w for held, w in self._weights.items() if held > version - self.max_staleness}


def _with_scores(micro_batch: MicroBatch) -> MicroBatch:
    return replace(micro_batch, same_weights=torch.zeros_like(micro_batch.mu))
