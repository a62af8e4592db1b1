"""Per-token log-probabilities from hidden states, without ever holding the logits of all positions.

A [positions, vocabulary] fp32 tensor is the largest thing in a GRPO step. :func:`token_logprobs` computes it chunk by chunk
and recomputes each chunk in the backward pass. The matmul runs in the head dtype; temperature and log-softmax are fp32.
:func:`linear_head` says whether a model's logits can be computed in this way.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .kernels import matmul

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def linear_head(model: "PreTrainedModel") -> nn.Linear | None:
    """The LM head, where logits are just this linear layer of the last hidden states; None where they are more.

    Soft caps and scales can be too small to be seen in the logits of an untrained model. So the head's output is replaced
    by numbers up to 1000, which must arrive as logits unchanged, and its input must be what the body returned.
    """
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    body = model.base_model
    if not isinstance(head, nn.Linear) or body is model:
        return None
    hidden: list[Tensor] = []
    fed: list[tuple[Tensor, Tensor]] = []

    def from_body(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden.append(output.last_hidden_state)

    def through_head(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        probe = torch.linspace(-1000.0, 1000.0, output.numel(), device=output.device).view_as(output).to(output.dtype)
        fed.append((inputs[0], probe))
        return probe

    handles = [body.register_forward_hook(from_body), head.register_forward_hook(through_head)]
    try:
        # several ids, since the embedding of a padding token is 0
        logits = model(input_ids=torch.arange(min(8, head.out_features), device=head.weight.device)[None]).logits
    finally:
        for handle in handles:
            handle.remove()
    if len(hidden) != 1 or len(fed) != 1:
        return None
    given, probe = fed[0]
    return head if torch.equal(given, hidden[0]) and torch.equal(logits.to(probe.dtype), probe) else None


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float,
    head_dtype: torch.dtype,
    chunk: int,
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Log-probability of each token and entropy of each distribution at a temperature.

    Args:
        hidden: [n, width], any float dtype; the states that predict ``tokens``.
        weight: [vocabulary, width]; bias: [vocabulary] or None.
        tokens: [n] int64.
        head_dtype: dtype of the matmul.
        chunk: positions whose logits are held at once.

    Returns:
        logprobs [n] and entropy [n] in nats, float32 (gradients flow through logprobs only), and the dtype that the matmul
        gave, for the audit.
    """
    result: tuple[Tensor, Tensor, torch.dtype] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, temperature, head_dtype, chunk
    )
    return result


def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits in the head dtype, which all inputs already have."""
    logits = matmul(hidden, weight.T)
    return logits if bias is None else logits + bias


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits over temperature in fp32: log-softmax is fp32 whatever the head dtype is."""
    logits = logits.float()  # see above
    return logits if temperature == 1.0 else logits / temperature


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: float,
        head_dtype: torch.dtype,
        chunk: int,
    ) -> tuple[Tensor, Tensor, torch.dtype]:
        weight_h = weight.to(head_dtype)
        bias_h = None if bias is None else bias.to(head_dtype)
        logprobs = torch.empty(len(tokens), dtype=torch.float32, device=hidden.device)  # log-probs are fp32 always
        entropy, lse = torch.empty_like(logprobs), torch.empty_like(logprobs)
        dtype = head_dtype
        for start in range(0, len(tokens), chunk):
            part = slice(start, start + chunk)
            raw = head_logits(hidden[part].to(head_dtype), weight_h, bias_h)
            dtype = raw.dtype
            logits = tempered(raw, temperature)
            lse[part] = logits.logsumexp(-1)
            log_p = logits - lse[part, None]
            logprobs[part] = log_p.gather(-1, tokens[part, None])[:, 0]
            entropy[part] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden, weight, bias, tokens, lse)
        ctx.temperature, ctx.head_dtype, ctx.chunk = temperature, head_dtype, chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        hidden, weight, bias, tokens, lse = ctx.saved_tensors
        weight_h = weight.to(ctx.head_dtype)
        bias_h = None if bias is None else bias.to(ctx.head_dtype)
        grad_hidden = torch.empty_like(hidden)
        # summed over chunks in fp32, as one large product would be
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        grad_bias = None if bias is None else grad_weight.new_zeros(bias.shape)
        for start in range(0, len(tokens), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            hidden_h = hidden[part].to(ctx.head_dtype)
            logits = tempered(head_logits(hidden_h, weight_h, bias_h), ctx.temperature)
            d_logits = logits.sub_(lse[part, None]).exp_().neg_()
            d_logits.scatter_add_(1, tokens[part, None], torch.ones_like(d_logits[:, :1]))
            d_logits.mul_((grad[part] / ctx.temperature)[:, None])
            d_logits_h = d_logits.to(ctx.head_dtype)
            grad_hidden[part] = matmul(d_logits_h, weight_h).to(hidden.dtype)
            grad_weight += matmul(d_logits_h.T, hidden_h)
            if grad_bias is not None:
                grad_bias += d_logits.sum(0)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )
