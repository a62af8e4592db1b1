"""Memory of the trainer and of a generator by site, worked out without any weights.

The model is built of fake tensors, which have a shape and a dtype but no memory, and one forward and backward pass of the
largest micro-batch is run on them, with this package's own head. Every tensor's storage is counted from its birth to its
end, so the peak of the pass is that of the real one, for any model that transformers can build from its configuration.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..assets import locate
from ..config.schema import Config, LoraConfig, Proximal
from ..errors import ConfigError
from ..head import token_logprobs
from ..optim import cut
from ..policy import CONFIG_KWARGS, read_checkpoint_dtype
from ..precision import Precision, resolve
from ..sync.shm import unique_parameters


@dataclass(frozen=True)
class Shape:
    """Tokens of a prompt and of a completion, at their longest."""

    prompt: int
    completion: int

    def rows(self, config: Config) -> int:
        """Of the largest micro-batch of a step."""
        per_step = config.trainer.prompts_per_step * config.algo.group_size
        return max(1, min(per_step, config.trainer.tokens_per_micro_batch // (self.prompt + self.completion)))


@dataclass(frozen=True)
class Memory:
    """Bytes. ``pass_peak`` is what a pass holds at most on top of the weights and gradients, its head's buffers included."""

    num_params: int
    parameters: int
    master: int  # the copy in the moments' dtype, where that is not the parameters'
    optimizer: int  # both moments
    gradients: int
    other_weights: int  # the reference of a KL penalty, and older versions for a correction
    step_copies: int  # held during the optimizer step only
    activations: int
    logits: int
    generator: int  # the weights of one generator worker
    kv_cache: int  # of a full batch of one worker
    wire: int  # one staged version of the weights

    @property
    def trainer(self) -> int:
        """At the peak of a step: either of the pass or of the optimizer step."""
        held = self.parameters + self.master + self.optimizer + self.gradients + self.other_weights
        return held + max(self.activations + self.logits, self.step_copies)

    @property
    def worker(self) -> int:
        return self.generator + self.kv_cache


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that are alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def ignore(self, tensors: Any) -> None:
        for tensor in tensors:
            self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage()) not in self._known:
                size = storage.nbytes()
                self._known.add(storage)
                weakref.finalize(storage, self._free, size)
                self.now += size
                self.peak = max(self.peak, self.now)
        return result

    def _free(self, size: int) -> None:
        self.now -= size


def estimate(config: Config, shape: Shape, device: torch.device) -> Memory:
    """What one run needs at most, if every sequence is as long as ``shape`` says.

    Raises:
        ConfigError: the model's configuration cannot be read, or its head is not a linear layer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kwargs, source = config.model.init_kwargs, locate(config.model.name_or_path)
    trust = config.model.trust_remote_code
    passed = {key: kwargs[key] for key in CONFIG_KWARGS if key in kwargs and key != "trust_remote_code"}
    try:
        model_config = AutoConfig.from_pretrained(source, trust_remote_code=trust, **passed)
        own = read_checkpoint_dtype(source, kwargs, trust)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError("model.name_or_path", config.model.name_or_path, fix=reason) from None
    precision = resolve(
        config.precision, own, device, kwargs, config.optim.eps, config.distributed.strategy, config.lora.rank > 0
    )
    for key in ("attn_implementation",):
        if key in kwargs:
            setattr(model_config, f"_{key}", kwargs[key])
    with FakeTensorMode(allow_non_fake_inputs=True), _one_sequence_a_row():
        with torch.device(device):
            build = AutoModelForCausalLM.from_config
            model = build(model_config, dtype=precision.params, trust_remote_code=trust)  # type: ignore[no-untyped-call]
        model.eval()
        if precision.adapter is not None:
            _adapt(model, config.lora, precision.adapter)
        return _measure(model, config, precision, shape, device)


class _Adapted(nn.Module):
    """What peft's layer computes; peft itself cannot put one into a model of fake tensors."""

    def __init__(self, layer: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, dtype=dtype, device=layer.weight.device)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, dtype=dtype, device=layer.weight.device)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.base_layer(states)
        beside: Tensor = self.lora_B(self.lora_A(states.to(self.lora_A.weight.dtype)))
        return (out + beside * 2.0).to(out.dtype)


def _adapt(model: Any, config: LoraConfig, dtype: torch.dtype) -> None:
    model.requires_grad_(False)
    for name, layer in list(model.base_model.named_modules()):
        parent, _, own = name.rpartition(".")
        if isinstance(layer, nn.Linear) and (not config.target_modules or own in config.target_modules):
            setattr(model.base_model.get_submodule(parent), own, _Adapted(layer, config.rank, dtype))


def _measure(model: Any, config: Config, precision: Precision, shape: Shape, device: torch.device) -> Memory:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError("model.name_or_path", config.model.name_or_path, fix="plan needs a model with a linear head")
    params = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in params)
    trained = precision.adapter or precision.params
    widened = precision.optimizer_state != trained
    moment, param = precision.optimizer_state.itemsize, trained.itemsize
    logits = _logit_buffers(len(head.weight), config, precision, shape)
    peak = _pass_peak(model, head, config, precision, shape, device)
    rows = min(config.rollout.batch_size, config.trainer.prompts_per_step * config.algo.group_size)
    every = sum(p.numel() for p in unique_parameters(model).values())
    return Memory(
        num_params=every,
        parameters=sum(p.numel() * p.element_size() for p in model.parameters()),
        master=count * moment if widened else 0,
        optimizer=2 * count * moment,
        gradients=count * param,
        other_weights=every * _other_weights(config, precision),
        # of the weights that are stepped at once: as they were, AdamW's root of the second moments, and a wide gradient
        step_copies=max(sum(p.numel() for p in some) for some in cut(params)) * (param + moment + moment * widened),
        activations=max(0, peak - logits),
        logits=min(logits, peak),
        generator=every * precision.rollout.itemsize,
        kv_cache=rows * _cache_bytes(model, precision.kv_cache, shape, device),
        wire=every * precision.wire.itemsize,
    )


def _other_weights(config: Config, precision: Precision) -> int:
    """Bytes for each parameter. Older versions are in the memory of the host, which on a CPU is the trainer's too."""
    reference = precision.reference.itemsize if config.algo.kl_coef and precision.adapter is None else 0
    is_kept = config.correction.proximal is Proximal.beta_removal
    return reference + (config.rollout.staleness_bound * precision.params.itemsize if is_kept else 0)


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """transformers looks for several sequences in a row by the values of its positions, which fake tensors have not: it then
    makes an attention mask, and repeats keys and values for it, that no run of ours has."""
    from transformers import masking_utils

    looks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *args, **kwargs: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = looks


def _logit_buffers(vocabulary: int, config: Config, precision: Precision, shape: Shape) -> int:
    """Two fp32 buffers of a chunk, and one in the head dtype where that is another (see head.py)."""
    positions = min(config.trainer.logprob_chunk, shape.rows(config) * shape.completion)
    wide = torch.float32  # log-softmax is fp32 always
    return positions * vocabulary * (2 * wide.itemsize + (0 if precision.head is wide else precision.head.itemsize))


def _pass_peak(
    model: Any, head: nn.Linear, config: Config, precision: Precision, shape: Shape, device: torch.device
) -> int:
    """The most that forward and backward hold beyond weights and gradients."""
    rows, width = shape.rows(config), shape.prompt + shape.completion
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    live = _Live()
    live.ignore([*model.parameters(), *(p.grad for p in trained), *model.buffers()])
    with live:
        ids = torch.zeros(rows, width, dtype=torch.long, device=device)
        with precision.compute_context(device):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            hidden = hidden[:, shape.prompt - 1 : -1].reshape(rows * shape.completion, -1)
        tokens = ids[:, shape.prompt :].reshape(-1)
        chunk = config.trainer.logprob_chunk
        new, _, _ = token_logprobs(hidden, head.weight, head.bias, tokens, 1.0, precision.head, chunk)
        del hidden
        new.sum().backward()  # type: ignore[no-untyped-call]
    return live.peak


def _cache_bytes(model: Any, dtype: torch.dtype, shape: Shape, device: torch.device) -> int:
    """Keys and values of one sequence at its longest."""
    ids = torch.zeros(1, shape.prompt + shape.completion, dtype=torch.long, device=device)
    with torch.no_grad():
        cache = model.base_model(input_ids=ids, use_cache=True).past_key_values
    total = 0
    for layer in getattr(cache, "layers", ()):
        held = (getattr(layer, name, None) for name in ("keys", "values"))
        total += sum(tensor.numel() * dtype.itemsize for tensor in held if isinstance(tensor, Tensor))
    return total
