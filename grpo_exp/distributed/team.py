"""What all ranks do together. The leader calls a method; the others, which :meth:`Team.follow`, are told to call it too."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..batch import MicroBatch
from ..config.schema import Strategy
from ..errors import RunFailed
from ..optim import Optimizer, StepOutcome
from ..passes import PassRunner
from .ranks import Ranks
from .shares import is_nothing, share
from .wrap import Replicas


class Team:
    """The ranks of a run with what each holds: passes, optimizer, and the wrapper that sums gradients."""

    def __init__(
        self, strategy: Strategy, ranks: Ranks, passes: PassRunner, optimizer: Optimizer, wrapped: Replicas
    ) -> None:
        self.strategy = strategy
        self.ranks, self.passes, self.optimizer, self.wrapped = ranks, passes, optimizer, wrapped
        self.device = passes.policy.device

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

    def run(
        self,
        micro_batches: list[MicroBatch],
        scale: float,
        beside: Callable[[], AbstractContextManager[object]] = nullcontext,
        mean_weight: float = 1.0,
    ) -> list[dict[str, Tensor]]:
        """Passes over the micro-batches of a step; leaves the summed gradient on every rank."""
        self._order("run", None, scale, mean_weight)
        shares = [[_moved(mb, torch.device("cpu")) for mb in part] for part in share(micro_batches, self.ranks.count)]
        return self._run(shares, scale, mean_weight, beside)

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

    def load(self) -> None:
        """Give the other ranks what the leader read from a checkpoint."""
        self._order("load")
        self._load()

    def declared(self) -> dict[str, str]:
        """What :meth:`observed` has to find."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        return {"num_ranks": str(self.ranks.count), "wrapper": self.strategy.name, "backend": backend}

    def observed(self) -> dict[str, str]:
        """Wrapper, backend and number of ranks in effect."""
        self._order("observed")
        return self._observed()

    # -- what every rank does

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
            logprobs = self.wrapped.logprobs if place == last else self.passes.policy.logprobs
            part = self.passes.run_micro_batch(micro_batch, scale, beside, mean_weight, logprobs)
            if not is_nothing(micro_batch):
                seen.append({name: value.cpu() for name, value in part.items()})
        parts = [part for rank in self.ranks.gather(seen) for part in rank]
        return [{name: value.to(self.device) for name, value in part.items()} for part in parts]

    def _step(self, lr: float) -> StepOutcome:
        outcome = self.optimizer.step(lr)
        others = self.ranks.gather((outcome.applied, self.optimizer.loss_scale.scale))
        if len(set(others)) > 1:
            raise RunFailed(f"ranks came to different steps (applied, loss scale): {others}")
        return outcome

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def _divide(self, divisor: float) -> None:
        torch._foreach_div_([p.grad for p in self.optimizer.params if p.grad is not None], divisor)

    @torch.no_grad()
    def _load(self) -> None:
        """Parameter by parameter: what is on its way is never a second copy of the model."""
        for parameter in self.passes.policy.model.parameters():
            dist.broadcast(parameter.detach(), src=0, group=self.ranks.compute)
        moments = self.optimizer.tensors() if self.ranks.leads else {}
        for name in self.ranks.broadcast(sorted(moments)):
            tensor = self.ranks.broadcast(moments[name].cpu() if self.ranks.leads else None)
            if not self.ranks.leads:
                moments[name] = tensor
        if not self.ranks.leads:
            self.optimizer.load_tensors(moments)
        self.optimizer.loss_scale.load_state_dict(self.ranks.broadcast(self.optimizer.loss_scale.state_dict()))

    def _observed(self) -> dict[str, str]:
        return {
            "num_ranks": str(self.ranks.counted(self.device)),
            "wrapper": self.wrapped.name,
            "backend": self.ranks.backend,
        }


def _moved(micro_batch: MicroBatch, device: torch.device) -> MicroBatch:
    return replace(
        micro_batch, tokens=replace(micro_batch.tokens, **_on(device, micro_batch.tokens)), **_on(device, micro_batch)
    )


def _on(device: torch.device, owner: object) -> dict[str, Any]:
    return {name: value.to(device) for name, value in vars(owner).items() if isinstance(value, Tensor)}
