"""The policy: loading a checkpoint in the dtype that was asked for, and its log-probability pass."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .assets import locate
from .config.schema import Config
from .config.sites import UNKNOWN, checkpoint_dtype, loader_dtype, parse_init_kwargs
from .errors import ConfigError
from .head import linear_head, token_logprobs
from .precision import DTYPES, Precision, dtype_name
from .prefix import shared_states, shares_prompts
from .token_batch import RowBatch, SharedBatch, TokenBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LogProbs = Callable[[TokenBatch, float], tuple[Tensor, Tensor]]
"""Log-probabilities and entropies at a temperature: :meth:`Policy.logprobs`, or a wrapper's around it."""

CONFIG_KWARGS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "trust_remote_code")


def read_checkpoint_dtype(name_or_path: str, init_kwargs: Mapping[str, Any], trust_remote_code: bool = False) -> str:
    """The dtype the checkpoint itself is stored in: ``fp32``, ``bf16``, ``fp16``, another name, or ``unknown``."""
    folder = Path(name_or_path) / init_kwargs.get("subfolder", "")
    if folder.is_dir() and (name := checkpoint_dtype(folder)) is not None:
        return name
    from transformers import AutoConfig

    passed = {key: init_kwargs[key] for key in CONFIG_KWARGS if key in init_kwargs}
    config = AutoConfig.from_pretrained(name_or_path, **{"trust_remote_code": trust_remote_code, **passed})
    return dtype_name(config.dtype) if isinstance(config.dtype, torch.dtype) else UNKNOWN


def load_policy(
    name_or_path: str,
    init_kwargs: Mapping[str, Any] | str | None = None,
    params: str | torch.dtype = "auto",
    trust_remote_code: bool = False,
    device: torch.device | None = None,
) -> "PreTrainedModel":
    """Load a causal language model from a name or path, in evaluation mode: no dropout.

    Args:
        init_kwargs: any keywords of ``from_pretrained``, or a JSON object of them. ``dtype`` may be a name in any accepted
            spelling or a ``torch.dtype``; ``device_map`` stays None unless it is given. The dictionary is not changed.
        params: the value of ``precision.params``. ``auto``, here and there, is the checkpoint's own dtype.
        device: where to put the model, unless a ``device_map`` does that.

    Raises:
        ConfigError: (a ValueError) before anything is loaded, if a dtype is none, or the two places disagree.
    """
    kwargs = parse_init_kwargs(init_kwargs)
    name = loader_dtype(kwargs, params)
    kwargs.pop("dtype", None)
    kwargs.pop("torch_dtype", None)
    kwargs = {"device_map": None, "trust_remote_code": trust_remote_code, "use_safetensors": True} | kwargs
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        name_or_path, dtype=DTYPES.get(name, "auto"), **kwargs
    )
    if device is not None and kwargs["device_map"] is None:
        nn.Module.to(model, device)
    nn.Module.eval(model)
    return model


def load_trained(config: Config, precision: Precision, device: torch.device) -> "PreTrainedModel":
    """The model of a configuration on a device, with the adapters that it is trained by, if it is."""
    model = load_policy(
        locate(config.model.name_or_path),
        config.model.init_kwargs,
        precision.params,
        config.model.trust_remote_code,
        device,
    )
    if precision.adapter is not None:
        from .lora import add_adapters

        add_adapters(model, config.lora, precision.adapter, config.seed)
    return model


class Policy:
    """A model with its precision: the log-probability pass of the trainer.

    The LM head is applied here, to completion positions only and in its own dtype. Models whose logits are more than a
    linear head (soft caps, scales) are noticed at construction and run through their own forward pass instead.

    Raises:
        ConfigError: if the head of such a model is asked to compute in another dtype than the rest, on either side.
    """

    def __init__(self, model: "PreTrainedModel", precision: Precision, chunk: int) -> None:
        self.model, self.precision, self.chunk = model, precision, chunk
        self.device = model.device
        self.body = model.base_model
        self.head = linear_head(model)
        self._takes_cache = "use_cache" in inspect.signature(self.body.forward).parameters
        self.shares_prompts = self.head is not None and self._takes_cache and shares_prompts(model, self.body)
        self.logits_dtype: torch.dtype | None = None
        self.entropy_gradient = False  # asked for where a loss needs it: without a linear head it takes memory
        if self.head is None:
            self._check_fallback("head", "compute")
            self._check_fallback("rollout_head", "rollout")

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """The last hidden states, [rows, width, hidden size]."""
        kwargs = {"use_cache": False} if self._takes_cache else {}
        output = self.body(input_ids=input_ids, **kwargs)
        states: Tensor = output.last_hidden_state
        return states

    def logprobs(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the completion tokens of a batch, each [n] float32, in nats."""
        with self.precision.compute_context(self.device):
            if self.head is None:
                return self._logprobs_of_logits(batch, temperature)
            hidden = self._predicting_states(batch)
        logprobs, entropy, self.logits_dtype = token_logprobs(
            hidden, self.head.weight, self.head.bias, batch.tokens, temperature, self.precision.head, self.chunk
        )
        return logprobs, entropy

    def _predicting_states(self, batch: TokenBatch) -> Tensor:
        """The hidden state that predicts each completion token, [n, hidden size]."""
        match batch:
            case RowBatch():
                return self.hidden_states(batch.input_ids)[batch.rows, batch.positions - 1]
            case SharedBatch():
                return shared_states(self.model, self.body, batch)

    def _logprobs_of_logits(self, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
        assert isinstance(batch, RowBatch)
        logits = self.model(input_ids=batch.input_ids, use_cache=False).logits[batch.rows, batch.positions - 1]
        self.logits_dtype = logits.dtype
        log_p = (logits.float() / temperature).log_softmax(-1)  # log-softmax is fp32 always
        of_entropy = log_p if self.entropy_gradient else log_p.detach()
        entropy = -(of_entropy.exp() * of_entropy).sum(-1)
        return log_p.gather(-1, batch.tokens[:, None])[:, 0], entropy

    def _check_fallback(self, site: str, rest: str) -> None:
        found, needed = (dtype_name(getattr(self.precision, name)) for name in (site, rest))
        if found != needed:
            reason = f"the head of {type(self.model).__name__} is more than a linear layer"
            raise ConfigError(f"precision.{site}", found, needed, reason)
