"""AdamW with moments in a declared dtype, loss scaling, and the learning-rate schedule.

Order of one step: scale the loss, backward, unscale, clip, step, update the scale. A step with a non-finite gradient is
skipped: weights, moments, learning rate and policy version stay as they were, and a dynamic scale backs off.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config.schema import LossScaleConfig, LossScaleMode, OptimConfig, Schedule
from .precision import Precision


def learning_rate(config: OptimConfig, update: int, horizon: int | None) -> float:
    """The learning rate of the update with this index (0 = first), of ``horizon`` in all (None: no end is known).

    Linear warm-up over ``warmup_steps`` updates, then constant, or linear or cosine decay to 0 at the horizon.
    """
    if update < config.warmup_steps:
        return config.lr * (update + 1) / (config.warmup_steps + 1)
    if config.schedule is Schedule.constant or horizon is None:
        return config.lr
    progress = min(1.0, (update - config.warmup_steps) / max(1, horizon - config.warmup_steps))
    if config.schedule is Schedule.linear:
        return config.lr * (1.0 - progress)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


class LossScale:
    """``torch.amp.GradScaler``'s rule with its state in plain numbers, on any device; mode ``none`` and ``static`` too.

    The scale is multiplied by ``backoff_factor`` after a step with a non-finite gradient, and by ``growth_factor`` after
    ``growth_interval`` clean steps in a row, unless that leaves fp32. It is an fp32 number, as in torch.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self.scale = 1.0 if config.mode is LossScaleMode.none else _fp32(config.init)
        self.growth_tracker = 0

    @property
    def enabled(self) -> bool:
        return self.config.mode is not LossScaleMode.none

    @property
    def mode_in_effect(self) -> str:
        """For the audit: what the numbers do, whatever the configuration says."""
        if self.scale == 1.0 and self.config.mode is LossScaleMode.none:
            return "none"
        return "dynamic" if self.config.mode is LossScaleMode.dynamic else "static"

    def update(self, finite: bool) -> None:
        if self.config.mode is not LossScaleMode.dynamic:
            return
        if not finite:
            self.scale = _fp32(self.scale * self.config.backoff_factor)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.config.growth_interval:
            grown = _fp32(self.scale * self.config.growth_factor)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.growth_tracker = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "growth_tracker": self.growth_tracker}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.growth_tracker = state["scale"], int(state["growth_tracker"])


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))  # the dtype of GradScaler's scale


@dataclass(frozen=True)
class StepOutcome:
    """What one optimizer step did. ``grad_norm`` is before clipping, after unscaling."""

    applied: bool
    grad_norm: float
    changed_frac: float
    lr: float


class Optimizer:
    """torch's AdamW over the model's parameters.

    Where the moments have a wider dtype than the parameters, AdamW runs on copies of the parameters in the moments' dtype
    that are rounded back after each step: wide moments, no master weights.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, precision: Precision) -> None:
        self.config = config
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.params = [p for _, p in self.named]
        self.widened = precision.optimizer_state != precision.params
        self.stepped: list[Tensor] = (
            [p.detach().to(precision.optimizer_state) for p in self.params] if self.widened else list(self.params)
        )
        self.adamw = torch.optim.AdamW(
            self.stepped,
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        self.loss_scale = LossScale(precision.loss_scale)

    def step(self, lr: float) -> StepOutcome:
        """Unscale, clip, and step if every gradient is finite. Gradients stay in place for the audit."""
        grads = [p.grad for p in self.params if p.grad is not None]
        if self.loss_scale.scale != 1.0:
            torch._foreach_mul_(grads, 1.0 / self.loss_scale.scale)
        # the norm is summed in fp32: squares of 16-bit gradients overflow
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads]  # see above
        norm = torch.linalg.vector_norm(torch.stack(norms))
        finite = bool(norm.isfinite())
        if not finite:
            self.loss_scale.update(finite=False)
            return StepOutcome(False, float(norm), 0.0, lr)
        if self.config.max_grad_norm > 0:
            torch._foreach_mul_(grads, min(1.0, self.config.max_grad_norm / (float(norm) + 1e-6)))
        changed = self._apply(lr)
        self.loss_scale.update(finite=True)
        return StepOutcome(True, float(norm), changed, lr)

    def _apply(self, lr: float) -> float:
        before = [p.detach().clone() for p in self.params]
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if self.widened:
            for param, wide in zip(self.params, self.stepped, strict=True):
                wide.copy_(param.detach())
                wide.grad = None if param.grad is None else param.grad.to(wide.dtype)
        self.adamw.step()
        if self.widened:
            with torch.no_grad():
                for param, wide in zip(self.params, self.stepped, strict=True):
                    param.copy_(wide)
                    wide.grad = None
        changed = sum(int(torch.count_nonzero(p.detach() != old)) for p, old in zip(self.params, before, strict=True))
        return changed / sum(p.numel() for p in self.params)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def moments(self) -> list[Tensor]:
        """Every moment tensor, for the audit; empty before the first applied step."""
        return [state[key] for state in self.adamw.state.values() for key in ("exp_avg", "exp_avg_sq")]

    def first_nonfinite_grad(self) -> str | None:
        """The parameter whose non-finite gradient the backward pass reached first: the last one of the model."""
        bad = [name for name, p in self.named if p.grad is not None and not bool(p.grad.isfinite().all())]
        return bad[-1] if bad else None

    def tensors(self) -> dict[str, Tensor]:
        """Moments by parameter name, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for (name, _), stepped in zip(self.named, self.stepped, strict=True):
            for key, value in self.adamw.state.get(stepped, {}).items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        for (name, _), stepped in zip(self.named, self.stepped, strict=True):
            state: dict[str, Any] = {
                key: tensors[f"{name}/{key}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{name}/{key}" in tensors
            }
            if state:
                self.adamw.state[stepped] = state
