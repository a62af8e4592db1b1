"""The precision hook: dtype names become torch dtypes, once, before anything is built; and the audit that reads them back.

:func:`resolve` is pure. :class:`Audit` collects what the live objects say after start-up and after the first step; the run
writes both beside what was declared, and a difference stops it.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config.schema import LossScaleConfig, PrecisionConfig, Strategy
from .config.sites import SPELLINGS, Site, combination_problems, resolve_sites, site_problems
from .errors import ConfigError, ConfigErrors, RunFailed
from .kernels import kernel_name, matmul_context
from .sync.names import is_adapter

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # the one table of dtypes
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Precision:
    """Every precision site as a torch dtype: what the rest of the package uses."""

    params: torch.dtype
    compute: torch.dtype
    head: torch.dtype
    grad_reduce: torch.dtype
    optimizer_state: torch.dtype
    rollout: torch.dtype
    rollout_head: torch.dtype
    kv_cache: torch.dtype
    wire: torch.dtype
    reference: torch.dtype
    matmul: str
    loss_scale: LossScaleConfig
    reasons: Mapping[str, str]
    adapter: torch.dtype | None = None  # None: all weights are trained

    @property
    def autocasts(self) -> bool:
        """Whether forward and backward matmuls run in another dtype than the weights are stored in."""
        return self.compute != self.params

    def declared(self) -> dict[str, str]:
        """Site → name, as it is written to the manifest."""
        sites = {site: dtype_name(getattr(self, site)) for site in self.reasons}
        return sites | {"matmul": self.matmul, "loss_scale": self.loss_scale.mode.name, "num_ranks": "1"}

    def kernels(self, device: torch.device) -> dict[str, str]:
        return {
            dtype_name(dtype): kernel_name(dtype, device)
            for dtype in sorted({self.compute, self.head, self.rollout, self.rollout_head}, key=str)
        }

    def compute_context(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of the trainer's forward pass."""
        stack = ExitStack()
        if self.autocasts:
            stack.enter_context(torch.autocast(device.type, dtype=self.compute))
        stack.enter_context(matmul_context(device, self.compute))
        return stack


def resolve(
    config: PrecisionConfig,
    checkpoint_dtype: str,
    device: torch.device,
    init_kwargs: Mapping[str, Any] | None = None,
    optim_eps: float = 1e-8,
    strategy: Strategy = Strategy.single,
    adapted: bool = False,
) -> Precision:
    """Turn the precision group into torch dtypes.

    Args:
        checkpoint_dtype: the dtype stored in the checkpoint: what ``auto`` stands for.
        device: where the trainer computes.
        init_kwargs: keywords for ``from_pretrained``; a ``dtype`` in it must agree with ``precision.params``.
        optim_eps: Adam's epsilon, which must not round to zero in the moments' dtype.
        strategy: how ranks train together; some combinations need it.
        adapted: whether adapters are trained, not the weights.

    Raises:
        ConfigError: (a ValueError) naming key, value and what is allowed, for every site that cannot be had.
    """
    problems = site_problems(config, init_kwargs or {})
    if problems:
        raise ConfigErrors(problems)
    plain = checkpoint_dtype.strip().lower().removeprefix("torch.")
    sites = resolve_sites(config, init_kwargs or {}, SPELLINGS.get(plain, plain), adapted)
    problems = [*combination_problems(config, sites, optim_eps, strategy), *device_problems(config, sites, device)]
    if problems:
        raise ConfigErrors(problems)
    return Precision(
        **{site: DTYPES[entry.name] for site, entry in sites.items()},
        matmul=config.matmul,
        loss_scale=config.loss_scale,
        reasons={site: entry.reason for site, entry in sites.items()},
    )


def mix_warning(precision: Precision) -> str | None:
    """One line for the start of a run whose two sides compute in different dtypes, meant or not; None where they agree."""
    body, head = (precision.compute, precision.rollout), (precision.head, precision.rollout_head)
    parts = []
    if body[0] != body[1]:
        parts.append(_mix("computes", "compute", body[0], "rollout", body[1]))
    if head[0] != head[1] and head != body:
        parts.append(_mix("applies its head", "head", head[0], "rollout_head", head[1]))
    return "; ".join(parts) + ": log-probabilities of the same weights differ" if parts else None


def _mix(verb: str, site: str, dtype: torch.dtype, generator_site: str, generator_dtype: torch.dtype) -> str:
    return (
        f"the trainer {verb} in {dtype_name(dtype)} (precision.{site}),"
        f" generator workers in {dtype_name(generator_dtype)} (precision.{generator_site})"
    )


def device_problems(config: PrecisionConfig, sites: Mapping[str, Site], device: torch.device) -> list[ConfigError]:
    problems = []
    if not supports_bf16(device):
        for site, entry in sites.items():
            if entry.name == "bf16" and not entry.follows:
                problems.append(
                    ConfigError(f"precision.{site}", "bf16", "fp16, fp32", f"this {device.type} has no bf16")
                )
    if config.matmul != "highest" and not supports_tf32(device):
        problems.append(
            ConfigError("precision.matmul", config.matmul, "highest", f"this {device.type} has no TF32 matmuls")
        )
    return problems


def supports_bf16(device: torch.device) -> bool:
    """CPUs always do, by emulation if need be (the manifest's kernels say which); GPUs from Ampere on."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def supports_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def dtype_name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def observed_dtypes(tensors: Iterable[Tensor | None]) -> str:
    """The dtypes of some tensors as one word: ``bf16``, or ``bf16+fp32`` where they differ, ``none`` without any."""
    names = {dtype_name(tensor.dtype) for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    return "+".join(sorted(names)) or "none"


class Audit:
    """Declared against observed dtypes, by phase: ``startup``, ``first_step``, and ``first_sync`` where that went wrong."""

    def __init__(self, precision: Precision) -> None:
        self.declared = precision.declared()
        self.observed: dict[str, dict[str, str]] = {}

    def check(self, phase: str, observed: Mapping[str, str]) -> None:
        """Record what was observed, and stop the run at the first difference.

        Raises:
            RunFailed: naming each site with what was declared and what was found.
        """
        self.observed[phase] = dict(sorted(observed.items()))
        wrong = [
            f"{site}: declared {self.declared[site]}, in effect {name}"
            for site, name in self.observed[phase].items()
            if name != self.declared[site]
        ]
        if wrong:
            raise RunFailed(f"precision is not what was asked for ({phase}): " + "; ".join(wrong))

    def check_complete(self) -> None:
        """Raises RunFailed if there is a site of which nothing was ever seen."""
        unseen = sorted(set(self.declared) - set().union(*self.observed.values()))
        if unseen:
            raise RunFailed(f"precision cannot be proved: nothing was seen of {', '.join(unseen)}")


class DtypeProbe:
    """Reads the dtype that a module's matmuls really give, by a forward hook on its linear layers; ``close`` removes it.

    Adapters have a dtype of their own, and what they give is rounded to that of the layer.
    """

    def __init__(self, module: nn.Module, skip: nn.Module | None = None) -> None:
        self.seen: set[torch.dtype] = set()
        self.is_paused = False
        self._handles = [
            layer.register_forward_hook(self._record)
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear) and layer is not skip and not is_adapter(f".{name}.")
        ]

    def _record(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if not self.is_paused:
            self.seen.add(output.dtype)

    def observed(self) -> str:
        return "+".join(sorted(dtype_name(dtype) for dtype in self.seen)) or "none"

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
