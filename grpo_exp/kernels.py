"""16-bit matrix products on a CPU that has no instructions for them.

PyTorch computes bf16 and fp16 products on such a CPU with a scalar loop, some thirty times slower than fp32. A matrix unit
multiplies 16-bit inputs exactly, sums in fp32 and rounds the result once to 16 bits; :class:`Fp32Accumulate` computes just
that through the fp32 BLAS: inputs and outputs have the 16-bit dtype that was asked for, the same values are rounded at the
same places, also in the backward pass. What a run uses is part of its manifest (``precision.kernels``).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

SIXTEEN_BIT = (torch.bfloat16, torch.float16)  # the dtypes this file is about


def has_native_matmul(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device multiplies matrices of this dtype with a kernel of its own."""
    if device.type != "cpu" or dtype not in SIXTEEN_BIT:
        return True
    # CPU kernels for bf16 and fp16 come from oneDNN, which says what this processor can do
    name = "bf16" if dtype == torch.bfloat16 else "fp16"  # a name in oneDNN's API, no choice of dtype
    supported: Callable[[], bool] = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")
    return supported()


def matmul_context(device: torch.device, *dtypes: torch.dtype) -> AbstractContextManager[object]:
    """The context in which matrix products of these dtypes are fast on this device."""
    slow = {dtype for dtype in dtypes if not has_native_matmul(dtype, device)}
    return Fp32Accumulate(slow) if slow else nullcontext()


def kernel_name(dtype: torch.dtype, device: torch.device) -> str:
    """How products of this dtype are computed, in words for the manifest."""
    return "native" if has_native_matmul(dtype, device) else "fp32 BLAS, rounded to 16 bits"


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in the inputs' dtype, for code that runs outside of a context (no autograd needed)."""
    if has_native_matmul(a.dtype, a.device):
        return a @ b
    return (a.float() @ b.float()).to(a.dtype)  # accumulates in fp32 as a matrix unit does


def fp32_unless_native(operand: Tensor) -> Tensor:
    """An operand as the device's own kernels multiply it: products of these are exact and summed in fp32."""
    native = has_native_matmul(operand.dtype, operand.device)
    return operand if native else operand.float()  # what this file is about


class Fp32Accumulate(TorchFunctionMode):
    """Route products of the given 16-bit dtypes through the fp32 BLAS; all else, and other dtypes, pass through.

    Under autocast the product takes the dtype of autocast, as torch's own rules say. Operands of different dtypes pass
    through as well: torch refuses to multiply them, and so it does here.
    """

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        count = _NUM_TENSORS.get(func)
        if count is None or "out" in kwargs:
            return func(*args, **kwargs)
        dtype = _product_dtype([*args[:count], *kwargs.values()])
        if dtype not in self.dtypes:
            return func(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            operands = [_rounded(value, dtype) for value in args[:count]]
            named = {name: _rounded(value, dtype) for name, value in kwargs.items()}
            result: Tensor = func(*operands, *args[count:], **named)
            return result.to(dtype)


def _product_dtype(values: list[Any]) -> torch.dtype | None:
    """The dtype in which torch would compute a product of these; None where it has its own opinion, such as an error."""
    dtypes = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    if torch.is_autocast_enabled("cpu"):
        # autocast casts everything but fp64, which it leaves alone
        return None if torch.float64 in dtypes else torch.get_autocast_dtype("cpu")
    return dtypes.pop() if len(dtypes) == 1 else None


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """A floating-point operand, rounded to the 16-bit dtype and held in fp32; anything else as it is."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype).float()  # exact products and fp32 sums are the point of this file
    return value


_NUM_TENSORS: dict[Callable[..., Any], int] = {
    F.linear: 3,
    torch.matmul: 2,
    Tensor.matmul: 2,
    Tensor.__matmul__: 2,
    torch.bmm: 2,
    Tensor.bmm: 2,
    F.scaled_dot_product_attention: 4,
}
"""Products, and how many leading arguments are their floating-point operands (an attention mask may be missing)."""
