"""AdamW with moments in a declared dtype, loss scaling, and the learning-rate schedule.

Order of one step: scale the loss, backward, unscale, clip, step, update the scale. A step with a non-finite gradient is
skipped: weights, moments, learning rate and policy version stay as they were, and a dynamic scale backs off.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config.schema import LossScaleConfig, LossScaleMode, OptimConfig, Schedule
from .parts import in_parts, part, part_like, whole_like
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


STEPPED_AT_ONCE = 1 << 24
"""Numbers whose weights AdamW steps together: its intermediate results, and the copy that says what changed, are as large."""

STEP = "step"  # of AdamW's state, beside its moments


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


def cut(tensors: list[Tensor]) -> list[list[Tensor]]:
    """Consecutive tensors together up to ``STEPPED_AT_ONCE``."""
    parts: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if parts[-1] and sum(t.numel() for t in parts[-1]) + tensor.numel() > STEPPED_AT_ONCE:
            parts.append([])
        parts[-1].append(tensor)
    return parts


class Optimizer:
    """torch's AdamW over the model's parameters.

    Where the moments have a wider dtype than the parameters, AdamW runs on copies of the parameters in the moments' dtype
    that are rounded back after each step: wide moments, no master weights.

    Of weights that lie in parts on several ranks, each rank steps its own.

    Args:
        sum_over_ranks: adds up a tensor over the ranks that hold parts.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        precision: Precision,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config, self._sum_over_ranks = config, sum_over_ranks
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.params: list[Tensor] = [p for _, p in self.named]
        self._places = {name: place for place, (name, _) in enumerate(self.named)}
        self.widened = precision.optimizer_state != (precision.adapter or precision.params)
        self.copies = self.widened or any(in_parts(p) for p in self.params)
        """Whether AdamW steps other tensors than the parameters, which have to be given each gradient."""
        own = [part(p.detach()) if in_parts(p) else p for p in self.params]
        self.stepped: list[Tensor] = (
            [p.detach().to(precision.optimizer_state) for p in own] if self.widened else list(own)
        )
        self.adamw = torch.optim.AdamW(
            [{"params": some} for some in cut(self.stepped)],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        self.loss_scale = LossScale(precision.loss_scale)

    def step(self, lr: float) -> StepOutcome:
        """Unscale, clip, and step if every gradient is finite. Gradients stay in place for the audit."""
        grads = self.grads()
        if self.loss_scale.scale != 1.0:
            torch._foreach_mul_(grads, 1.0 / self.loss_scale.scale)
        # the norm is summed in fp32: squares of 16-bit gradients overflow
        norms = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads])  # see above
        if self._sum_over_ranks is not None:
            norms = self._sum_over_ranks(norms.square()).sqrt()
        norm = torch.linalg.vector_norm(norms)
        finite = bool(norm.isfinite())
        if not finite:
            self.loss_scale.update(finite=False)
            return StepOutcome(False, float(norm), 0.0, lr)
        if self.config.max_grad_norm > 0:
            torch._foreach_mul_(grads, min(1.0, self.config.max_grad_norm / (float(norm) + 1e-6)))
        changed = self._apply(lr)
        self.loss_scale.update(finite=True)
        return StepOutcome(True, float(norm), changed, lr)

    def grads(self) -> list[Tensor]:
        """The gradients there are, of this rank's parts."""
        return [part(p.grad) for p in self.params if p.grad is not None]

    @torch.no_grad()
    def _apply(self, lr: float) -> float:
        """A step, some parameters after the other; returns the share of numbers that it changed."""
        groups, start, counts = self.adamw.param_groups, 0, []
        for group in groups:
            end = start + len(group["params"])
            group["lr"] = lr
            self.adamw.param_groups = [group]
            counts.append(self._step_some(self.params[start:end], self.stepped[start:end]))
            start = end
        self.adamw.param_groups = groups
        changed = torch.stack(counts).sum()
        if self._sum_over_ranks is not None:
            changed = self._sum_over_ranks(changed)
        return int(changed) / sum(p.numel() for p in self.params)

    def _step_some(self, params: list[Tensor], stepped: list[Tensor]) -> Tensor:
        """How many numbers changed, in a tensor."""
        own = [part(p.detach()) for p in params]
        before = [p.clone() for p in own]
        if self.widened:
            torch._foreach_copy_(stepped, own)
        if self.copies:
            for to, p in zip(stepped, params, strict=True):
                to.grad = None if p.grad is None else part(p.grad).to(to.dtype)
        self.adamw.step()
        if self.widened:
            torch._foreach_copy_(own, stepped)
        if self.copies:
            for to in stepped:
                to.grad = None
        return torch.stack([torch.count_nonzero(p != old) for p, old in zip(own, before, strict=True)]).sum()

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def moments(self) -> list[Tensor]:
        """Every moment tensor, for the audit; empty before the first applied step."""
        return [state[key] for state in self.adamw.state.values() for key in ("exp_avg", "exp_avg_sq")]

    def nonfinite_grads(self) -> list[str]:
        """Parameters with a gradient that is not finite, in the order of the model; of this rank's parts."""
        return [name for name, p in self.named if p.grad is not None and not bool(part(p.grad).isfinite().all())]

    def nonfinite_weights(self) -> list[str]:
        """Parameters that are not finite themselves; of this rank's parts."""
        norms = torch._foreach_norm([part(parameter.detach()) for parameter in self.params])
        if bool(torch.stack(norms).sum().isfinite()):
            return []  # the usual case: one look at all of them
        return [name for name, p in self.named if not bool(torch.isfinite(part(p.detach())).all())]

    def tensors(self) -> dict[str, Tensor]:
        """Moments by parameter name, for a checkpoint, on the host where they had to be put together."""
        return dict(self.each_tensor())

    def each_tensor(self) -> Iterator[tuple[str, Tensor]]:
        """Moments by name, one by one and as a whole: ranks with parts have to ask for them together."""
        for (name, parameter), stepped in zip(self.named, self.stepped, strict=True):
            for key, value in self.adamw.state.get(stepped, {}).items():
                is_cut = key != STEP and in_parts(parameter)
                yield f"{name}/{key}", whole_like(parameter, value).cpu() if is_cut else value

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what :meth:`tensors` gave, whatever was in parts then or is now."""
        for name, tensor in tensors.items():
            self.load_tensor(name, tensor)

    def load_tensor(self, name: str, tensor: Tensor) -> None:
        parameter, _, key = name.rpartition("/")
        place = self._places[parameter]
        own = tensor if key == STEP else part_like(self.params[place], tensor)
        self.adamw.state[self.stepped[place]][key] = own.clone()
