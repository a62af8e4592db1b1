"""The ranks of a run and what they say to each other.

Two process groups: ``control`` (gloo, on the host) carries orders and objects, and waits as long as the leader waits for
completions; ``compute`` (nccl on GPUs, gloo on CPUs) reduces gradients, and gives up after ``distributed.timeout_s``.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RunFailed
from .launched import Launched

START_TIMEOUT = timedelta(minutes=10)
ORDER_TIMEOUT = timedelta(days=7)  # a rank that dies closes its connections, which ends the others at once


class Ranks:
    """This rank among all. One rank alone needs no process group: everything stays where it is."""

    met = False
    """Whether this process has met the others."""

    def __init__(self, launched: Launched) -> None:
        Ranks.met = True
        self.index, self.count = launched.rank, launched.num_ranks
        self.control: Any = None
        self.compute: Any = None
        if launched.by_launcher:
            dist.init_process_group("gloo", timeout=START_TIMEOUT)
            self.control = dist.new_group(backend="gloo", timeout=ORDER_TIMEOUT)

    def open_compute(self, device: torch.device, timeout_s: float) -> None:
        """The group that sums gradients; every rank calls this."""
        if self.control is not None:
            backend = "nccl" if device.type == "cuda" else "gloo"
            self.compute = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def backend(self) -> str:
        """In effect, for the audit."""
        return "none" if self.compute is None else str(dist.get_backend(self.compute))

    def counted(self, device: torch.device) -> int:
        """How many ranks take part in a sum: what is in effect, not what an environment says."""
        return int(self.sum(torch.ones((), dtype=torch.int64, device=device)))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, in its own memory."""
        if self.compute is not None:
            dist.all_reduce(tensor, group=self.compute)
        return tensor

    def broadcast(self, value: Any = None) -> Any:
        """The leader's value, on every rank."""
        if self.control is None:
            return value
        box = [value]
        self._say(dist.broadcast_object_list, box, src=0, group=self.control)
        return box[0]

    def scatter(self, values: Sequence[Any] | None = None) -> Any:
        """This rank's part of what the leader has for each."""
        if self.control is None:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        self._say(dist.scatter_object_list, box, None if values is None else list(values), src=0, group=self.control)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on the leader; nothing elsewhere."""
        if self.control is None:
            return [value]
        box: list[Any] | None = [None] * self.count if self.leads else None
        self._say(dist.gather_object, value, box, dst=0, group=self.control)
        return box or []

    def end(self, code: int) -> None:
        """The leader's last words; ranks that do not hear them any more have ended already."""
        try:
            self.broadcast(("end", (code,)))
        except RunFailed:
            pass
        self.close()

    def close(self) -> None:
        if self.control is not None and dist.is_initialized():
            dist.destroy_process_group()

    def _say(self, call: Any, *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except RuntimeError as error:
            raise RunFailed(f"rank {self.index} lost another rank: {str(error).splitlines()[0]}") from error
