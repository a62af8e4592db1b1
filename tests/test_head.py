"""Per-token log-probabilities in chunks: values and gradients against plain float64, whatever the chunk size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Family, build
from torch import Tensor, nn

from grpo_exp.head import head_logits, linear_head, tempered, token_logprobs

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def problem(n: int, width: int, vocabulary: int, bias: bool, seed: int = 0) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(n, width, generator=generator).requires_grad_(),
        "weight": torch.randn(vocabulary, width, generator=generator).requires_grad_(),
        "bias": torch.randn(vocabulary, generator=generator).requires_grad_() if bias else None,
        "tokens": torch.randint(vocabulary, (n,), generator=generator),
    }


def naive(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """In float64, all positions at once."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    log_p = (logits / temperature).log_softmax(-1)
    return log_p[torch.arange(len(tokens)), tokens], -(log_p.exp() * log_p).sum(-1)


def gradients(logprobs: Tensor, inputs: dict[str, Tensor | None]) -> list[Tensor]:
    upstream = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(7)).to(logprobs.dtype)
    leaves = [tensor for name, tensor in inputs.items() if name != "tokens" and tensor is not None]
    return list(torch.autograd.grad(logprobs, leaves, upstream, retain_graph=True))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    width=st.integers(1, 24),
    vocabulary=st.integers(2, 50),
    bias=st.booleans(),
    chunk=st.integers(1, 45),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    seed=st.integers(0, 2**16),
)
def test_values_and_gradients_are_those_of_float64_for_every_chunk_size(
    n: int, width: int, vocabulary: int, bias: bool, chunk: int, temperature: float, seed: int
):
    inputs = problem(n, width, vocabulary, bias, seed)
    found, entropy, dtype = token_logprobs(
        inputs["hidden"], inputs["weight"], inputs["bias"], inputs["tokens"], temperature, FP32, chunk
    )
    expected, expected_entropy = naive(**inputs, temperature=temperature)
    assert found.dtype == entropy.dtype == dtype == FP32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-4, atol=1e-4)
    both = zip(
        (found, entropy, found + entropy), (expected, expected_entropy, expected + expected_entropy), strict=True
    )
    for value, truth in both:
        for ours, theirs in zip(gradients(value, inputs), gradients(truth, inputs), strict=True):
            torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=1e-4 / temperature)


@pytest.mark.parametrize("head_dtype", [BF16, FP16])
def test_the_chunk_size_changes_nothing_but_the_order_of_sums_in_16_bits_either(head_dtype: torch.dtype):
    inputs = problem(33, 16, 40, bias=True)
    results = []
    for chunk in (1, 7, 33, 100):
        logprobs, entropy, dtype = token_logprobs(**inputs, temperature=0.7, head_dtype=head_dtype, chunk=chunk)
        assert dtype == head_dtype
        assert logprobs.dtype == FP32
        results.append([logprobs.detach(), entropy, *gradients(logprobs, inputs)])
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_the_matmul_has_the_head_dtype_and_everything_after_it_is_fp32():
    """Equal to rounding inputs and logits to the head dtype by hand, and nothing more."""
    inputs = problem(20, 16, 40, bias=False)
    hidden, weight = inputs["hidden"], inputs["weight"]
    assert hidden is not None
    assert weight is not None
    for head_dtype in (BF16, FP16):
        found, _, _ = token_logprobs(**inputs, temperature=0.7, head_dtype=head_dtype, chunk=8)
        logits = (hidden.to(head_dtype).double() @ weight.to(head_dtype).double().T).to(head_dtype)
        log_p = (logits.double() / 0.7).log_softmax(-1)
        expected = log_p[torch.arange(20), inputs["tokens"]]
        assert float((found.double() - expected).abs().median().detach()) < 1e-6  # one may round to its other neighbour


def test_gradients_come_in_the_dtype_of_what_they_are_of():
    inputs = problem(5, 4, 6, bias=True)
    mixed = {
        "hidden": inputs["hidden"].detach().bfloat16().requires_grad_(),
        "weight": inputs["weight"],
        "bias": inputs["bias"],
        "tokens": inputs["tokens"],
    }
    logprobs, entropy, _ = token_logprobs(**mixed, temperature=1.0, head_dtype=FP32, chunk=2)
    assert [gradient.dtype for gradient in gradients(logprobs, mixed)] == [BF16, FP32, FP32]
    assert [gradient.dtype for gradient in gradients(entropy, mixed)] == [BF16, FP32, FP32]


def test_an_overflow_in_fp16_is_not_hidden():
    hidden, weight = torch.full((1, 64), 100.0), torch.full((4, 64), 100.0)
    logprobs, _, _ = token_logprobs(hidden, weight, None, torch.zeros(1, dtype=torch.long), 1.0, FP16, 8)
    assert not bool(logprobs.isfinite().any())


def test_a_tied_weight_gets_both_of_its_gradients():
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    tokens = torch.tensor([1, 4, 5])
    logprobs, _, _ = token_logprobs(weight[torch.tensor([0, 2, 3])], weight, None, tokens, 1.0, FP32, 2)
    expected, _ = naive(weight[torch.tensor([0, 2, 3])], weight, None, tokens, 1.0)
    (ours,) = torch.autograd.grad(logprobs.sum(), weight)
    (theirs,) = torch.autograd.grad(expected.sum(), weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_tempered_logits_are_fp32():
    assert tempered(torch.ones(2, dtype=BF16), 1.0).dtype == FP32
    assert torch.equal(tempered(torch.ones(2, dtype=FP16), 0.5), torch.full((2,), 2.0))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [Family.llama, Family.qwen3])
def test_ordinary_models_have_a_linear_head(family: Family, tied: bool):
    model = build(family, tied)
    head = linear_head(model)
    assert head is model.lm_head
    ids = torch.arange(6)[None]
    with torch.no_grad():
        logits = head_logits(model.model(input_ids=ids).last_hidden_state, head.weight, head.bias)
        torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_a_soft_cap_is_noticed_even_where_logits_are_too_small_to_show_it(dtype: torch.dtype):
    model = build(Family.gemma2).to(dtype)
    model.config.final_logit_softcapping = 30.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.01)
    assert linear_head(model) is None
    model.config.final_logit_softcapping = None
    assert linear_head(model) is model.lm_head


def test_a_head_that_is_fed_or_followed_by_something_else_is_noticed():
    scaled = build(Family.llama)
    scaled.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 4,))
    assert linear_head(scaled) is None
    followed = build(Family.llama)
    followed.lm_head = nn.Sequential(followed.lm_head, nn.Tanh())
    assert linear_head(followed) is None


def test_looking_for_a_linear_head_leaves_the_model_as_it_was():
    model = build(Family.gemma2)
    linear_head(model)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
