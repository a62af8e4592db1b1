"""The policy: loading a checkpoint in the dtype that was asked for, and its log-probability pass."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .config.sites import checkpoint_dtype, loader_dtype, parse_init_kwargs
from .errors import ConfigError
from .head import head_logits, token_logprobs
from .precision import DTYPES, Precision, dtype_name


def read_checkpoint_dtype(name_or_path: str, init_kwargs: Mapping[str, Any]) -> str:
    """The dtype the checkpoint itself is stored in: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        ConfigError: if it is stored in another dtype, or does not say.
    """
    name = checkpoint_dtype(Path(name_or_path)) if Path(name_or_path).is_dir() else None
    if name is None:
        from transformers import AutoConfig

        passed = {key: init_kwargs[key] for key in ("revision", "subfolder", "token", "cache_dir") if key in init_kwargs}
        config = AutoConfig.from_pretrained(name_or_path, **passed)
        name = dtype_name(config.dtype) if isinstance(config.dtype, torch.dtype) else None
    if name not in DTYPES:
        raise ConfigError("precision.params", "auto", DTYPES, f"{name_or_path} is stored in {name}: name a dtype")
    return name


def load_policy(
    name_or_path: str,
    init_kwargs: Mapping[str, Any] | str | None = None,
    params: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
) -> nn.Module:
    """Load a causal language model from a name or path.

    Args:
        init_kwargs: any keywords of ``from_pretrained``, or a JSON object of them. ``dtype`` may be a name in any accepted
            spelling or a ``torch.dtype``; ``device_map`` stays None unless it is given.
        params: the value of ``precision.params``. ``auto``, here and there, is the checkpoint's own dtype.

    Raises:
        ConfigError: (a ValueError) before anything is loaded, if a dtype is none, or the two places disagree.
    """
    kwargs = parse_init_kwargs(init_kwargs)
    name = loader_dtype(kwargs, params)
    kwargs.pop("dtype", None)
    kwargs.pop("torch_dtype", None)
    kwargs.setdefault("device_map", None)
    kwargs.setdefault("trust_remote_code", trust_remote_code)
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        name_or_path, dtype=DTYPES.get(name, "auto"), use_safetensors=True, **kwargs
    )
    return model


@dataclass(frozen=True)
class TokenBatch:
    """Rows of prompt + completion, padded on the right. Padding cannot reach a real token under causal attention."""

    input_ids: Tensor  # [rows, width] int64
    rows: Tensor  # [n] int64: row of each completion token
    positions: Tensor  # [n] int64: position in the row of each completion token

    @property
    def tokens(self) -> Tensor:
        """The completion tokens, [n]."""
        return self.input_ids[self.rows, self.positions]


class Policy:
    """A model with its precision: the log-probability pass of the trainer.

    The LM head is applied here, to completion positions only and in its own dtype. Models whose logits are more than a
    linear head (soft caps, scales) are noticed at construction and run through their own forward pass instead.
    """

    def __init__(self, model: nn.Module, precision: Precision, chunk: int) -> None:
        self.model, self.precision, self.chunk = model, precision, chunk
        self.device = next(model.parameters()).device
        self.head: nn.Linear = model.get_output_embeddings()
        self.body: nn.Module = getattr(model, model.base_model_prefix)
        self._takes_cache = "use_cache" in inspect.signature(self.body.forward).parameters
        self.head_is_linear = self._check_head()
        self.logits_dtype: torch.dtype | None = None
        if not self.head_is_linear and precision.head != precision.compute:
            raise ConfigError(
                "precision.head",
                dtype_name(precision.head),
                dtype_name(precision.compute),
                f"the head of {type(model).__name__} is more than a linear layer",
            )

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """The last hidden states, [rows, width, hidden size]."""
        kwargs = {"use_cache": False} if self._takes_cache else {}
        output = self.body(input_ids=input_ids, **kwargs)
        states: Tensor = output.last_hidden_state
        return states

    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the completion tokens of a batch, each [n] float32, in nats."""
        predicting = batch.positions - 1
        with self.precision.compute_context(self.device):
            if not self.head_is_linear:
                logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[batch.rows, predicting]
                self.logits_dtype = logits.dtype
                return _from_logits(logits, batch.tokens, temperature)
            hidden = self.hidden_states(batch.input_ids)[batch.rows, predicting]
        logprobs, entropy, self.logits_dtype = token_logprobs(
            hidden, self.head.weight, self.head.bias, batch.tokens, temperature, self.precision.head, self.chunk
        )
        return logprobs, entropy

    @torch.no_grad()
    def _check_head(self) -> bool:
        ids = torch.arange(4, device=self.device)[None]
        expected = self.model(input_ids=ids).logits.float()  # compared in fp32
        hidden = self.body(input_ids=ids).last_hidden_state
        found = head_logits(hidden, self.head.weight, self.head.bias)
        scale = float(expected.abs().max())
        return bool(((found - expected).abs() <= 0.02 * scale).all())


def _from_logits(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_p = (logits.float() / temperature).log_softmax(-1)  # log-softmax is fp32 always
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(-1)
    return log_p.gather(-1, tokens[:, None])[:, 0], entropy
