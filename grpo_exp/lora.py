"""LoRA by peft: small matrices are trained beside weights that stay as they are.

Generators get whole weights: base + scale B A, summed in fp32 and rounded once, to the wire. That is worked out tensor by
tensor on the way; nothing is ever merged into the base and taken out again, so that the base is the same bits after any
number of syncs, in every dtype. peft is imported where adapters are added, and nowhere else.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .config.schema import LoraConfig
from .errors import ConfigError
from .sync.names import canonical_name, is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "default"  # peft's, of the one adapter there is
PREFIX = "base_model.model."  # before every name in a file of peft's


@dataclass(frozen=True)
class Adapter:
    """What is trained beside one weight [out, in]: a is [rank, in], b is [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float

    def merged(self, weight: Tensor) -> Tensor:
        """The weight that a generator computes with, fp32: the sum is rounded once, where it is sent."""
        wide = torch.float32  # products of 16-bit numbers are exact in it
        return torch.addmm(
            weight.detach().to(wide), self.b.detach().to(wide), self.a.detach().to(wide), alpha=self.scale
        )


def add_adapters(model: "PreTrainedModel", config: LoraConfig, dtype: torch.dtype, seed: int) -> None:
    """Freeze the model and put adapters into it, which change nothing yet: every ``b`` is 0.

    Raises:
        ConfigError: no layer has such a name.
    """
    import peft

    targets = list(config.target_modules) or "all-linear"
    model.requires_grad_(False)
    alpha: Any = config.alpha  # peft says int, and divides it
    own = peft.LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model.add_adapter(own)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError("lora.target_modules", config.target_modules, "names of linear layers", reason) from None
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)
    nn.Module.eval(model)


def is_adapted(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """By the canonical name of the weight that each is beside."""
    found: dict[str, Adapter] = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and NAME in module.lora_A:
            layer: Any = module
            pair = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            found[canonical_name(f"{name}.weight")] = Adapter(*pair, float(layer.scaling[NAME]))
    return found


def adapter_parameters(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, by the name it has in a file of peft's."""
    named = ((name, p) for name, p in model.named_parameters() if is_adapter(name))
    return {PREFIX + name.replace(f".{NAME}.", "."): p.detach() for name, p in named}


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """The base alone computes."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def as_served(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights by canonical name as a generator has to hold them, one by one."""
    beside = adapters(model)
    for name, weight in weights.items():
        yield name, beside[name].merged(weight) if name in beside else weight
