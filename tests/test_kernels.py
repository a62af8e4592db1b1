"""16-bit products through the fp32 BLAS: the same values as torch's own kernels, up to one rounding of each result."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_exp.kernels import Fp32Accumulate, has_native_matmul, kernel_name, matmul, matmul_context

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIXTEEN_BIT = [BF16, FP16]
Product = Callable[..., Tensor]

PRODUCTS: dict[str, tuple[Product, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(3, 7, 48), (32, 48), (32,)]),
    "linear without bias": (F.linear, [(7, 48), (32, 48)]),
    "matmul": (torch.matmul, [(2, 5, 48), (48, 6)]),
    "method matmul": (Tensor.matmul, [(5, 48), (48, 6)]),
    "@": (lambda a, b: a @ b, [(5, 48), (48, 6)]),
    "bmm": (torch.bmm, [(3, 5, 48), (3, 48, 4)]),
    "method bmm": (Tensor.bmm, [(3, 5, 48), (3, 48, 4)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [(2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16)],
    ),
    "attention over groups of heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [(2, 4, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16)],
    ),
    "attention with a mask": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        [(2, 4, 9, 16), (2, 4, 9, 16), (2, 4, 9, 16), (9, 9)],
    ),
    "by keyword": (lambda x, w: F.linear(input=x, weight=w), [(7, 48), (32, 48)]),
}


def leaves(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def forward_backward(product: Product, operands: list[Tensor]) -> list[Tensor]:
    """The product and the gradient of each operand."""
    result = product(*operands)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, operands, upstream)]


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, chained: bool) -> None:
    """One product: both are the same sum, rounded once, so they differ by one unit in the last place.

    Attention chains two products, and torch's own kernel rounds the probabilities in between: each is within one unit of
    the largest value of what is exact.
    """
    found, expected = found.detach().double(), expected.detach().double()
    largest = float(expected.abs().max())
    scale = torch.full_like(expected, 2 * largest) if chained else expected.abs().clamp(min=largest / 16)
    assert bool(((found - expected).abs() <= torch.finfo(dtype).eps * scale).all())


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients_are_those_of_torchs_own_kernel(name: str, dtype: torch.dtype):
    product, shapes = PRODUCTS[name]
    expected = forward_backward(product, leaves(shapes, dtype))
    with Fp32Accumulate({dtype}):
        found = forward_backward(product, leaves(shapes, dtype))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert_close(ours, theirs, dtype, chained="attention" in name)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("name", PRODUCTS)
def test_under_autocast_fp32_operands_are_lowered_as_torch_lowers_them(name: str, dtype: torch.dtype):
    product, shapes = PRODUCTS[name]
    with torch.autocast("cpu", dtype=dtype):
        expected = forward_backward(product, leaves(shapes, FP32))
    with torch.autocast("cpu", dtype=dtype), Fp32Accumulate({dtype}):
        found = forward_backward(product, leaves(shapes, FP32))
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.dtype == theirs.dtype == (FP32 if index else dtype)
        assert_close(ours, theirs, dtype, chained="attention" in name)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_the_result_is_the_exact_product_rounded_once(dtype: torch.dtype):
    a, b = leaves([(16, 256), (256, 16)], dtype)
    exact = a.double() @ b.double()
    with Fp32Accumulate({dtype}):
        error = ((a @ b).double() - exact).abs()
    assert bool((error <= torch.finfo(dtype).eps * exact.abs().clamp(min=1e-2) * 0.51).all())
    assert torch.equal(matmul(a, b), (a.float() @ b.float()).to(dtype)) or has_native_matmul(dtype, CPU)


def test_fp16_overflows_to_inf_and_bf16_does_not():
    big = [torch.full((2, 64), 200.0), torch.full((64, 2), 200.0)]  # the product is 2.56 million
    with Fp32Accumulate({BF16, FP16}):
        assert bool(torch.isinf(big[0].half() @ big[1].half()).all())
        assert bool(torch.isfinite(big[0].bfloat16() @ big[1].bfloat16()).all())
        with torch.autocast("cpu", dtype=FP16):
            assert bool(torch.isinf(big[0] @ big[1]).all())


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_gradients_are_rounded_to_16_bits_as_they_flow(dtype: torch.dtype):
    """A gradient too small for fp16 is lost in fp16, which is what a loss scale is for, and kept in bf16."""
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype), Fp32Accumulate({dtype}):
        loss = F.linear(torch.ones(1, 1), weight).float().sum()
    (loss * 1e-9).backward()
    assert weight.grad is not None
    assert (float(weight.grad) == 0.0) is (dtype == FP16)


def test_other_dtypes_are_left_alone():
    for dtype in (FP32, torch.float64, FP16):
        a, b = leaves([(5, 48), (48, 6)], dtype)
        expected = a @ b
        with Fp32Accumulate({BF16}):
            assert torch.equal(a @ b, expected)
    ids = torch.arange(6).view(2, 3)
    with Fp32Accumulate({BF16}):
        assert torch.equal(ids @ ids.T, ids.matmul(ids.T))


def test_fp64_is_left_alone_under_autocast_as_well():
    a, b = leaves([(5, 48), (48, 6)], torch.float64)
    with torch.autocast("cpu", dtype=BF16), Fp32Accumulate({BF16}):
        assert (a @ b).dtype == torch.float64


def test_operands_of_two_dtypes_are_refused_as_torch_refuses_them():
    """A14: a head in fp32 over bf16 states is an error here as it is on a GPU."""
    x, weight = torch.ones(2, 4, dtype=BF16), torch.ones(4, 4)
    with Fp32Accumulate({BF16}), pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, weight)
    with Fp32Accumulate({BF16}), pytest.raises(RuntimeError, match="dtype"):
        torch.matmul(weight, x.T)


def test_an_out_tensor_is_written():
    a, b = torch.ones(2, 4, dtype=BF16), torch.ones(4, 2, dtype=BF16)
    out = torch.zeros(2, 2, dtype=BF16)
    with Fp32Accumulate({BF16}):
        torch.matmul(a, b, out=out)
    assert torch.equal(out, torch.full((2, 2), 4.0, dtype=BF16))


@pytest.mark.parametrize("native", [True, False])
def test_the_context_and_the_manifest_follow_what_the_processor_can_do(native: bool, monkeypatch: pytest.MonkeyPatch):
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: native)
    for dtype in SIXTEEN_BIT:
        assert has_native_matmul(dtype, CPU) is native
        assert isinstance(matmul_context(CPU, dtype, FP32), Fp32Accumulate) is not native
        assert ("fp32" in kernel_name(dtype, CPU)) is not native
    assert not isinstance(matmul_context(CPU, FP32), Fp32Accumulate)
    assert kernel_name(FP32, CPU) == "native"


def test_a_gpu_has_kernels_of_its_own():
    assert all(has_native_matmul(dtype, torch.device("cuda")) for dtype in (*SIXTEEN_BIT, FP32))
    assert not isinstance(matmul_context(torch.device("cuda"), BF16), Fp32Accumulate)


@pytest.mark.parametrize("dtype", [*SIXTEEN_BIT, FP32])
def test_the_product_outside_of_a_context_keeps_its_dtype(dtype: torch.dtype):
    a, b = leaves([(5, 48), (48, 6)], dtype)
    assert matmul(a, b).dtype == dtype
    assert_close(matmul(a, b), a @ b, dtype, chained=False)
