"""Weights from the trainer to a generator worker through shared memory, in the wire dtype, checked by a checksum.

The memory is an anonymous file whose descriptor the worker inherits: it has no name, so it cannot outlive the processes.
The trainer writes only after the worker has acknowledged the version before, and to the other half of the file: so the
version that is being served stays where it is, and can be loaded again when the next one cannot.
"""

import mmap
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ..errors import RunFailed
from ..lora import as_served
from ..parts import whole
from ..precision import DTYPES, dtype_name
from .names import canonical_name, is_adapter

ALIGNMENT, PAGE = 64, 4096
CHUNK = 1 << 19
"""Elements that are copied and then read once more for the checksum, while they are still in the processor's cache."""


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in the shared memory."""

    name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Payload:
    """One set of weights in shared memory: all a worker needs to load and verify it."""

    version: int
    dtype: torch.dtype
    slots: tuple[Slot, ...]
    checksum: int  # of the weights as the engine must hold them, in the rollout dtype

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": dtype_name(self.dtype)}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Payload":
        slots = tuple(Slot(s["name"], tuple(s["shape"]), s["offset"], s["num_bytes"]) for s in body["slots"])
        return cls(body["version"], DTYPES[body["dtype"]], slots, body["checksum"])


def unique_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by canonical name; of tied ones the first name only, and none of an adapter.

    Raises:
        RunFailed: if two parameters come to the same name.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():  # already leaves out the second name of a tied parameter
        if is_adapter(name):
            continue
        clean = canonical_name(name)
        if clean in found:
            raise RunFailed(f"two parameters are called {clean} (one of them {name})")
        found[clean] = parameter.detach()
    return found


class Checksum:
    """XXH3, 64 bits, of the bytes of some tensors in order: as quick as memory can be read."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._hash.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)

    @property
    def value(self) -> int:
        return self._hash.intdigest()


def checksum(tensors: Iterable[Tensor]) -> int:
    """The :class:`Checksum` of some tensors in order."""
    total = Checksum()
    for tensor in tensors:
        total.add(tensor)
    return total.value


@torch.no_grad()
def copy_and_check(source: Tensor, target: Tensor, total: Checksum, held: torch.dtype | None = None) -> None:
    """Copy into a tensor of the same shape or a flat one, cast to its dtype, and add what it holds then to a checksum.

    Args:
        held: the checksum is one of the target cast to this dtype.
    """
    if not target.is_contiguous():
        target.copy_(source)
        return total.add(target if held is None else target.to(held))
    source, target = source.detach().reshape(-1), target.detach().view(-1)
    if len(target) <= CHUNK:
        target.copy_(source)
        return total.add(target if held is None else target.to(held))
    for to, part in zip(torch.split(target, CHUNK), torch.split(source, CHUNK), strict=True):
        to.copy_(part)
        total.add(to if held is None else to.to(held))


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Sender:
    """The trainer's side. ``fd`` is what workers inherit; it is theirs and its owner's to close."""

    def __init__(self, fd: int, wire: torch.dtype, rollout: torch.dtype) -> None:
        self.fd = fd
        self.wire, self.rollout = wire, rollout
        self._halves: list[list[tuple[Slot, Tensor]]] = []
        self._half = 0

    def write(self, version: int, model: nn.Module) -> Payload:
        """Cast and copy every parameter; the result goes to the worker as a message.

        Weights in parts are put together, and adapters merged, one parameter after the other, in the order of
        :func:`unique_parameters`.
        """
        parameters = unique_parameters(model)
        if not self._halves:
            self._lay_out(parameters)
        places = self._halves[self._half]
        self._half = 1 - self._half
        held, total = None if self.rollout == self.wire else self.rollout, Checksum()
        for (_, target), (_, weight) in zip(places, as_served(model, parameters), strict=True):
            copy_and_check(whole(weight), target, total, held)
        return Payload(version, self.wire, tuple(slot for slot, _ in places), total.value)

    def _lay_out(self, parameters: Mapping[str, Tensor]) -> None:
        """Where each parameter goes, in both halves of the memory: the same for every version."""
        sizes = {name: tensor.numel() * self.wire.itemsize for name, tensor in parameters.items()}
        half = max(PAGE, sum(_padded(size) for size in sizes.values()))
        os.ftruncate(self.fd, 2 * half)
        memory = mmap.mmap(self.fd, 2 * half)
        for start in (0, half):
            places, offset = [], start
            for name, size in sizes.items():
                shape = tuple(parameters[name].shape)
                target = torch.frombuffer(memory, dtype=self.wire, count=size // self.wire.itemsize, offset=offset)
                places.append((Slot(name, shape, offset, size), target.view(shape)))
                offset += _padded(size)
            self._halves.append(places)


def tensors_in(memory: mmap.mmap, payload: Payload) -> dict[str, Tensor]:
    """Views of mapped memory, by name, on the worker's side: valid until the next write but one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # nobody writes here
        return {
            slot.name: torch.frombuffer(
                memory, dtype=payload.dtype, count=slot.num_bytes // payload.dtype.itemsize, offset=slot.offset
            ).view(slot.shape)
            for slot in payload.slots
        }


def check_fit(model: nn.Module, payload: Payload) -> None:
    """Whether a payload holds just the parameters of a model, by name and shape.

    Raises:
        RunFailed: listing names that are missing or unknown, or whose shapes differ.
    """
    expected: Mapping[str, Tensor] = unique_parameters(model)
    sent = {slot.name for slot in payload.slots}
    if sent != set(expected):
        missing, unknown = sorted(set(expected) - sent), sorted(sent - set(expected))
        raise RunFailed(f"weights do not fit the generator: missing {missing}, unknown {unknown}")
    wrong = [slot.name for slot in payload.slots if slot.shape != tuple(expected[slot.name].shape)]
    if wrong:
        raise RunFailed(f"weights do not fit the generator: other shapes for {wrong}")


@torch.no_grad()
def load_into(model: nn.Module, payload: Payload, memory: mmap.mmap) -> int:
    """Give an engine's model weights that fit and return the checksum of what it then holds.

    On a CPU, in the wire's own dtype, its parameters become views of the shared memory: the trainer leaves that half of it
    alone until this worker has loaded the version after. Elsewhere they are copied.

    Raises:
        RunFailed: if that is not what was sent.
    """
    sent, own, total = tensors_in(memory, payload), unique_parameters(model), Checksum()
    in_place = all(own[name].device.type == "cpu" and own[name].dtype == payload.dtype for name in sent)
    for name, tensor in sent.items():
        if in_place:
            total.add(tensor)
        else:
            copy_and_check(tensor, own[name], total)
    held = total.value
    if held != payload.checksum:
        raise RunFailed(
            f"the generator holds other weights than were sent for version {payload.version}"
            f" (wire {dtype_name(payload.dtype)}): checksum {held:016x}, expected {payload.checksum:016x}"
        )
    if in_place:
        for name, parameter in model.named_parameters():
            parameter.data = sent[canonical_name(name)]
    return held
