"""What all ranks do together. The leader calls a method; the others, which :meth:`Team.follow`, are told to call it too."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..batch import MicroBatch
from ..checkpoint import Tensors, trained_parameters
from ..config.schema import Strategy
from ..errors import RunFailed
from ..optim import Optimizer, StepOutcome
from ..overflow import find_overflow
from ..parts import part, part_like, whole
from ..passes import PassRunner
from ..sync.shm import unique_parameters
from ..token_batch import TokenBatch
from .ranks import Ranks
from .shares import is_nothing, share

HOST = torch.device("cpu")


class Wrapped(Protocol):
    """The policy's pass in a wrapper that sums gradients over ranks."""

    wraps_every_pass: bool
    """No rank can make a pass without the others; else the last one of a step sums what all have left."""
    reduced: set[str]
    """Dtypes in which gradients were really summed."""

    @property
    def name(self) -> str: ...

    def logprobs(self, tokens: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]: ...


class Team:
    """The ranks of a run with what each holds: passes, optimizer, and the wrapper that sums gradients."""

    def __init__(
        self, strategy: Strategy, ranks: Ranks, passes: PassRunner, optimizer: Optimizer, wrapped: Wrapped
    ) -> None:
        self.strategy = strategy
        self.ranks, self.passes, self.optimizer, self.wrapped = ranks, passes, optimizer, wrapped
        self.device, self.model = passes.policy.device, passes.policy.model
        self.in_parts = wrapped.wraps_every_pass
        if self.in_parts:
            passes.logprobs = wrapped.logprobs

    def follow(self) -> int:
        """Do what the leader says until it says that it is over; returns the exit code it gives."""
        while True:
            name, arguments = self.ranks.broadcast()
            if name == "end":
                return int(arguments[0])
            getattr(self, f"_{name}")(*arguments)

    def _order(self, name: str, *arguments: Any) -> None:
        self.ranks.broadcast((name, arguments))

    # -- what the leader calls

    def prepare(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """:meth:`PassRunner.prepare`, each rank for its share."""
        self._order("prepare", None)
        shares = share(micro_batches, self.ranks.count)
        found = self._prepare([[_moved(mb, HOST) for mb in mine] for mine in shares])
        filled = {
            id(mb): replace(mb, **_there(prepared, self.device))
            for mine, parts in zip(shares, found, strict=True)
            for mb, prepared in zip(mine, parts, strict=True)
        }
        return [filled[id(micro_batch)] for micro_batch in micro_batches]

    def run(
        self,
        micro_batches: list[MicroBatch],
        scale: float,
        beside: Callable[[], AbstractContextManager[object]] = nullcontext,
        mean_weight: float = 1.0,
    ) -> list[dict[str, Tensor]]:
        """Passes over the micro-batches of a step; leaves the summed gradient on every rank, or each its part of it."""
        self._order("run", None, scale, mean_weight)
        shares = [[_moved(mb, HOST) for mb in mine] for mine in share(micro_batches, self.ranks.count)]
        return self._run(shares, scale, mean_weight, beside)

    def logprobs(self, tokens: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """:meth:`Policy.logprobs` without a gradient, outside of a step."""
        if not self.in_parts:
            return self.passes.policy.logprobs(tokens, temperature)
        self._order("logprobs", _moved(tokens, HOST), temperature)
        return self._logprobs(tokens, temperature)

    def step(self, lr: float) -> StepOutcome:
        """One optimizer step on every rank.

        Raises:
            RunFailed: if ranks did not all do the same.
        """
        self._order("step", lr)
        return self._step(lr)

    def zero_grad(self) -> None:
        self._order("zero_grad")
        self._zero_grad()

    def divide(self, divisor: float) -> None:
        """Divide the gradient."""
        self._order("divide", divisor)
        self._divide(divisor)

    def nonfinite_weights(self) -> list[str]:
        """Parameters that are not finite, on any rank."""
        if not self.in_parts:
            return self.optimizer.nonfinite_weights()
        self._order("nonfinite_weights")
        return self._nonfinite_weights()

    def find_overflow(self, micro_batches: list[MicroBatch], scale: float) -> dict[str, str]:
        """Where a step that was skipped first had a non-finite number. Ranks with parts look at the same passes."""
        if not self.in_parts:
            return find_overflow(self.passes, self.optimizer.nonfinite_grads(), micro_batches, scale)
        self._order("find_overflow", [_moved(micro_batch, HOST) for micro_batch in micro_batches], scale)
        return self._find_overflow(micro_batches, scale)

    def give_weights(self) -> None:
        """Before the leader asks for every parameter as a whole, one after the other."""
        if self.in_parts:
            self._order("give_weights")

    def tensors(self) -> Tensors:
        """Weights and moments as a whole, on the leader."""
        if self.in_parts:
            self._order("give_tensors")
        return Tensors.of(self.model, self.optimizer)

    def put(self, tensors: Tensors) -> None:
        """Give every rank what the leader read from a checkpoint, or its part of it."""
        self._order("put", None)
        self._put(tensors)

    def declared(self) -> dict[str, str]:
        """What :meth:`observed` has to find."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        return {"num_ranks": str(self.ranks.count), "wrapper": self.strategy.name, "backend": backend}

    def observed(self) -> dict[str, str]:
        """Wrapper, backend and number of ranks in effect."""
        self._order("observed")
        return self._observed()

    # -- what every rank does

    def _prepare(self, shares: list[list[MicroBatch]] | None) -> list[list[dict[str, Tensor | None]]]:
        mine = [_moved(micro_batch, self.device) for micro_batch in self.ranks.scatter(shares)]
        prepared = [self.passes.prepared(micro_batch) for micro_batch in mine]
        names = ("old", "reference")
        return self.ranks.gather(
            [{n: None if (t := getattr(mb, n)) is None else t.cpu() for n in names} for mb in prepared]
        )

    def _run(
        self,
        shares: list[list[MicroBatch]] | None,
        scale: float,
        mean_weight: float,
        beside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> list[dict[str, Tensor]]:
        mine = [_moved(micro_batch, self.device) for micro_batch in self.ranks.scatter(shares)]
        last = max(place for place, micro_batch in enumerate(mine) if micro_batch.has_gradient)
        seen = []
        for place, micro_batch in enumerate(mine):
            logprobs = self.wrapped.logprobs if place == last else None
            found = self.passes.run_micro_batch(micro_batch, scale, beside, mean_weight, logprobs)
            if not is_nothing(micro_batch):
                seen.append({name: value.cpu() for name, value in found.items()})
        parts = [found for rank in self.ranks.gather(seen) for found in rank]
        return [{name: value.to(self.device) for name, value in found.items()} for found in parts]

    @torch.no_grad()
    def _logprobs(self, tokens: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        return self.wrapped.logprobs(_moved(tokens, self.device), temperature)

    def _step(self, lr: float) -> StepOutcome:
        outcome = self.optimizer.step(lr)
        others = self.ranks.gather((outcome.applied, self.optimizer.loss_scale.scale))
        if len(set(others)) > 1:
            raise RunFailed(f"ranks came to different steps (applied, loss scale): {others}")
        return outcome

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _divide(self, divisor: float) -> None:
        torch._foreach_div_(self.optimizer.grads(), divisor)

    def _nonfinite_weights(self) -> list[str]:
        return self._named_by_any(self.optimizer.nonfinite_weights())

    def _find_overflow(self, micro_batches: list[MicroBatch], scale: float) -> dict[str, str]:
        bad = self._named_by_any(self.optimizer.nonfinite_grads())
        mine = [_moved(micro_batch, self.device) for micro_batch in micro_batches]
        return find_overflow(self.passes, bad, mine, scale, agreed=self.ranks.broadcast)

    def _named_by_any(self, names: list[str]) -> list[str]:
        """Parameters that some rank named, in the order of the model; nothing but on the leader."""
        named = {name for found in self.ranks.gather(names) for name in found}
        return [name for name, _ in self.optimizer.named if name in named]

    def _give_weights(self) -> None:
        for parameter in unique_parameters(self.model).values():
            whole(parameter)

    def _give_tensors(self) -> None:
        self._give_weights()
        for _ in self.optimizer.each_tensor():
            pass

    @torch.no_grad()
    def _put(self, tensors: Tensors | None) -> None:
        parameters = trained_parameters(self.model)
        for name, tensor in self._sent(None if tensors is None else tensors.weights):
            part(parameters[name]).copy_(part_like(parameters[name], tensor))
        for name, tensor in self._sent(None if tensors is None else tensors.moments):
            self.optimizer.load_tensor(name, tensor)
        self.optimizer.loss_scale.load_state_dict(self.ranks.broadcast(self.optimizer.loss_scale.state_dict()))

    def _sent(self, tensors: Mapping[str, Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """The leader's tensors one by one: what is on its way is never a second copy of the model."""
        known = None if tensors is None else [(name, t.shape, t.dtype) for name, t in tensors.items()]
        for name, shape, dtype in self.ranks.broadcast(known):
            own = torch.empty(shape, dtype=dtype) if tensors is None else tensors[name]
            sent = own.to(self.device, copy=True)
            dist.broadcast(sent, src=0, group=self.ranks.compute)
            yield name, sent

    def _observed(self) -> dict[str, str]:
        return {
            "num_ranks": str(self.ranks.counted(self.device)),
            "wrapper": self.wrapped.name,
            "backend": self.ranks.backend,
        }


def _moved(owner: Any, device: torch.device) -> Any:
    """A batch with all its tensors on a device."""
    there: dict[str, Any] = {name: value.to(device) for name, value in vars(owner).items() if isinstance(value, Tensor)}
    if isinstance(owner, MicroBatch):
        there["tokens"] = _moved(owner.tokens, device)
    return replace(owner, **there)


def _there(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors among some values, on a device."""
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
