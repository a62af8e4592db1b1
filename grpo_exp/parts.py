"""Tensors that lie in parts on several ranks: torch's ``DTensor``, known by what it can do, since its import takes long.

For any other tensor each function gives it back as it is.
"""

from typing import Any

from torch import Tensor


def in_parts(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    own: Tensor = _distributed(tensor).to_local() if in_parts(tensor) else tensor
    return own


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor from the parts of all ranks, which have to ask for it together."""
    found: Tensor = _distributed(tensor).full_tensor() if in_parts(tensor) else tensor
    return found


def part_like(like: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole tensor, cut as another one is. Nothing is sent."""
    if not in_parts(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    cut = _distributed(like)
    return part(distribute_tensor(tensor.to(like.device), cut.device_mesh, cut.placements, src_data_rank=None))


def whole_like(like: Tensor, own: Tensor) -> Tensor:
    """All of a tensor of which this rank holds ``own``, cut as another one is; ranks have to ask for it together."""
    if not in_parts(like):
        return own
    cut = _distributed(like)
    joined = type(cut).from_local(own, cut.device_mesh, cut.placements, shape=like.shape, stride=like.stride())
    return whole(joined)


def _distributed(tensor: Tensor) -> Any:
    return tensor
