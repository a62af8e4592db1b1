"""Per-token log-probabilities from hidden states, without ever holding the logits of all positions.

A [positions, vocabulary] fp32 tensor is the largest thing in a GRPO step. :func:`token_logprobs` computes it chunk by chunk
and recomputes each chunk in the backward pass. The matmul runs in the head dtype; temperature and log-softmax are fp32.
:func:`linear_head` says whether a model's logits can be computed in this way.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .kernels import fp32_unless_native, matmul

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
        logprobs [n] and entropy [n] in nats, float32, and the dtype that the matmul gave, for the audit.
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


class _ChunkLogits:
    """Logits of one chunk of positions, in buffers that the next chunk overwrites: fresh memory costs more than they do."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, head_dtype: torch.dtype, num_rows: int, temperature: float
    ) -> None:
        self.head_dtype, self.temperature = head_dtype, temperature
        self.operand = fp32_unless_native(weight.to(head_dtype))
        self.bias = None if bias is None else bias.to(head_dtype)
        shape = (num_rows, len(weight))
        self.fp32 = torch.empty(shape, dtype=torch.float32, device=weight.device)  # log-softmax is fp32 always
        self.scratch = torch.empty_like(self.fp32)
        self.raw = (
            self.fp32 if head_dtype is self.fp32.dtype else torch.empty(shape, dtype=head_dtype, device=weight.device)
        )

    def compute(self, hidden: Tensor) -> Tensor:
        """Tempered logits of hidden states [rows, width], fp32 [rows, vocabulary]."""
        raw, logits = self.raw[: len(hidden)], self.fp32[: len(hidden)]
        states = fp32_unless_native(hidden.to(self.head_dtype))
        torch.mm(states, self.operand.T, out=raw if states.dtype is raw.dtype else logits)
        if states.dtype is not raw.dtype:
            raw.copy_(logits)
        if self.bias is not None:
            raw += self.bias
        if raw.dtype is not logits.dtype:
            logits.copy_(raw)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def rounded(self, d_logits: Tensor) -> Tensor:
        """Their gradient in the head dtype, ready for products; overwrites the logits."""
        if self.raw is self.fp32:
            return d_logits
        raw = self.raw[: len(d_logits)].copy_(d_logits)
        return raw if self.operand.dtype is raw.dtype else self.fp32[: len(d_logits)].copy_(raw)


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
        buffer = _ChunkLogits(weight, bias, head_dtype, min(chunk, len(tokens)), temperature)
        logprobs = buffer.fp32.new_empty(len(tokens))
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(tokens), chunk):
            part = slice(start, start + chunk)
            logits = buffer.compute(hidden[part])
            log_p = torch.log_softmax(logits, -1, out=buffer.scratch[: len(logits)])
            logprobs[part] = log_p.gather(-1, tokens[part, None])[:, 0]
            p = torch.exp(log_p, out=logits)
            entropy[part] = -torch.bmm(p[:, None], log_p[:, :, None])[:, 0, 0]  # needs no third buffer
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.temperature, ctx.head_dtype, ctx.chunk = temperature, head_dtype, chunk
        ctx.set_materialize_grads(False)  # an entropy that nobody uses costs nothing
        return logprobs, entropy, buffer.raw.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Every product is rounded to the head dtype once, as one product over all positions would be."""
        hidden, weight, bias, tokens = ctx.saved_tensors
        buffer = _ChunkLogits(weight, bias, ctx.head_dtype, min(ctx.chunk, len(tokens)), ctx.temperature)
        of_logprobs, of_entropy = grads[0], grads[1]
        factor = buffer.fp32.new_zeros(len(tokens)) if of_logprobs is None else of_logprobs / -ctx.temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = buffer.fp32.new_zeros(weight.shape) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else buffer.fp32.new_zeros(bias.shape)
        for start in range(0, len(tokens), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits = buffer.compute(hidden[part])
            d_logits = torch.softmax(logits, -1, out=buffer.scratch[: len(logits)])
            d_entropy = None if of_entropy is None else _entropy_gradient(logits, d_logits)
            d_logits.scatter_add_(1, tokens[part, None], d_logits.new_full((len(logits), 1), -1.0))
            d_logits.mul_(factor[part, None])
            if of_entropy is not None and d_entropy is not None:
                d_logits.add_(d_entropy.mul_(of_entropy[part, None] / ctx.temperature))
            if grad_bias is not None:
                grad_bias += d_logits.sum(0)
            d_product = buffer.rounded(d_logits)
            grad_hidden[part] = torch.mm(d_product, buffer.operand).to(ctx.head_dtype).to(hidden.dtype)
            if grad_weight is None:
                continue
            states = fp32_unless_native(hidden[part].to(ctx.head_dtype))
            if states.dtype is grad_weight.dtype:
                grad_weight.addmm_(d_product.T, states)
            else:
                grad_weight += torch.mm(d_product.T, states)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(ctx.head_dtype).to(weight.dtype),
            None if grad_bias is None else grad_bias.to(ctx.head_dtype).to(bias.dtype),
            *[None] * 4,
        )


def _entropy_gradient(logits: Tensor, p: Tensor) -> Tensor:
    """The derivative of each row's entropy H by its logits, ``-p (log p + H)``, in the memory of the logits."""
    log_p = logits.sub_(logits.logsumexp(-1, keepdim=True))
    entropy = -torch.bmm(p[:, None], log_p[:, :, None])[:, 0]
    return log_p.add_(entropy).mul_(p).neg_()
