"""Weights from the trainer to a generator worker through shared memory, in the wire dtype, checked by a checksum.

The memory is an anonymous file whose descriptor the worker inherits: it has no name, so it cannot outlive the processes.
The trainer writes only after the worker has acknowledged the version before, and to the other half of the file: so the
version that is being served can be loaded again when the next one cannot.
"""

import mmap
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RunFailed
from ..precision import DTYPES, dtype_name

ALIGNMENT, PAGE = 64, 4096
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.")


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


def canonical_name(name: str) -> str:
    """A parameter's name in the checkpoint: without what wrappers put in front of it or in between."""
    before = ""
    while before != name:  # wrappers come in any order
        before = name
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "") if wrapper.startswith("_") else name.removeprefix(wrapper)
    return name.replace(".base_layer.", ".")


def unique_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by canonical name; of tied ones the first name only.

    Raises:
        RunFailed: if two parameters come to the same name.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():  # already leaves out the second name of a tied parameter
        clean = canonical_name(name)
        if clean in found:
            raise RunFailed(f"two parameters are called {clean} (one of them {name})")
        found[clean] = parameter.detach()
    return found


def checksum(tensors: Iterable[Tensor]) -> int:
    """CRC-32 of the bytes of some tensors in order."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data, total)
    return total


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Sender:
    """The trainer's side. ``fd`` is what workers inherit; it is theirs and its owner's to close."""

    def __init__(self, fd: int, wire: torch.dtype, rollout: torch.dtype) -> None:
        self.fd = fd
        self.wire, self.rollout = wire, rollout
        self._map: mmap.mmap | None = None
        self._half = 0

    def write(self, version: int, model: nn.Module) -> Payload:
        """Cast and copy every parameter; the result goes to the worker as a message."""
        cast = {name: tensor.to(self.wire) for name, tensor in unique_parameters(model).items()}
        sizes = [tensor.numel() * tensor.element_size() for tensor in cast.values()]
        half = max(PAGE, sum(_padded(size) for size in sizes))
        if self._map is None:
            os.ftruncate(self.fd, 2 * half)
            self._map = mmap.mmap(self.fd, 2 * half)
        slots, offset = [], half * self._half
        for (name, tensor), num_bytes in zip(cast.items(), sizes, strict=True):
            slots.append(Slot(name, tuple(tensor.shape), offset, num_bytes))
            offset += _padded(num_bytes)
        self._half = 1 - self._half
        for slot, tensor in zip(slots, cast.values(), strict=True):
            target = torch.frombuffer(self._map, dtype=self.wire, count=tensor.numel(), offset=slot.offset)
            target.copy_(tensor.reshape(-1))
        held = checksum(tensor.to(self.rollout) for tensor in cast.values())
        return Payload(version, self.wire, tuple(slots), held)


def read(fd: int, payload: Payload) -> Iterator[tuple[str, Tensor]]:
    """The worker's side: name and tensor, valid until the next write but one."""
    yield from tensors_in(mmap.mmap(fd, 0), payload).items()


def tensors_in(memory: mmap.mmap, payload: Payload) -> dict[str, Tensor]:
    """Views of mapped memory, by name."""
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
def load_into(model: nn.Module, payload: Payload, fd: int) -> int:
    """Copy a payload that fits into an engine's model and return the checksum of what the model then holds.

    Raises:
        RunFailed: if that is not what was sent.
    """
    expected = unique_parameters(model)
    for name, tensor in read(fd, payload):
        expected[name].copy_(tensor)
    held = checksum(expected[slot.name] for slot in payload.slots)
    if held != payload.checksum:
        raise RunFailed(
            f"the generator holds other weights than were sent for version {payload.version}"
            f" (wire {dtype_name(payload.dtype)}): checksum {held:08x}, expected {payload.checksum:08x}"
        )
    return held
