"""Checkpoints: enough to go on as if nothing had happened. Weights and moments as safetensors, the rest as JSON.

    step-000050/  model.safetensors config.json tokenizer…   an ordinary checkpoint, loadable by its path; with adapters
                                                             these alone, as peft keeps them
                  optimizer.safetensors                      AdamW's moments by parameter name, the state of torch's RNG
                  trainer.json                               step, policy version, loss scale, data cursor, open groups

A checkpoint is written beside its place and renamed, so that a folder with the right name is complete.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .errors import RunFailed
from .folder import list_checkpoints
from .lora import adapter_parameters, is_adapted
from .optim import Optimizer
from .parts import in_parts, part, part_like, whole
from .sync.shm import unique_parameters

__all__ = ["Progress", "Tensors", "list_checkpoints", "load", "read_progress", "save"]

RNG = "rng"


@dataclass
class Progress:
    """Where a run stands. ``update`` is the policy version: the number of steps that changed the weights."""

    step: int = 0
    update: int = 0
    samples: int = 0
    tokens: int = 0
    wall_s: float = 0.0
    probe_s: float = 0.0  # of it, for probes of the mismatch
    skipped_total: int = 0
    skipped_in_a_row: int = 0
    loss_scale: dict[str, float] = field(default_factory=dict)
    cursor: int = 0
    open_serials: list[int] = field(default_factory=list)
    evaluated_at: int = -1  # the last step with an evaluation
    groups: dict[str, int] = field(default_factory=dict)
    reference: int | None = None  # checksum of the base checkpoint, where the KL from it is taken
    base: int | None = None  # checksum of the weights that adapters are beside
    alarm: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tensors:
    """What a checkpoint has of weights and moments, by name, all of them whole."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> "Tensors":
        """Of a run as it stands; of weights in parts on several ranks, which have to ask together, copies on the host."""
        weights = trained_parameters(model)
        return cls(
            {name: whole(p).cpu() if in_parts(p) else p for name, p in weights.items()},
            {name: tensor.contiguous() for name, tensor in optimizer.tensors().items()},
        )

    @torch.no_grad()
    def put_into(self, model: nn.Module, optimizer: Optimizer) -> None:
        parameters = trained_parameters(model)
        for name, tensor in self.weights.items():
            part(parameters[name]).copy_(part_like(parameters[name], tensor))
        optimizer.load_tensors(self.moments)


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """What is trained of a model, by the name it has in a checkpoint: its weights, or its adapters."""
    return adapter_parameters(model) or unique_parameters(model)


def save(
    folder: Path, progress: Progress, model: Any, tensors: Tensors, tokenizer: Any, keep: int, reach: int = 0
) -> Path:
    """Write a checkpoint and remove the oldest ones beyond ``keep``.

    Args:
        reach: keep besides the newest one that is at least so many steps old and all later ones; 0: none.

    Raises:
        RunFailed: if it cannot be written; what was written of it is removed, which leaves room for the run's last words.
    """
    final = folder / f"step-{progress.step:06d}"
    unfinished = folder / f".{final.name}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _write(unfinished, progress, model, tensors, tokenizer)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise RunFailed(f"{final} could not be written: {error}") from error
    kept = list_checkpoints(folder)
    first = last_until(kept, progress.step - reach)
    for old in kept[:-keep] if keep > 0 else []:
        if reach == 0 or (first is not None and old.name < first.name):
            shutil.rmtree(old)
    return final


def last_until(checkpoints: Sequence[Path], step: int) -> Path | None:
    """The newest of some checkpoints, oldest first, that is of this step or an earlier one."""
    return next((path for path in reversed(checkpoints) if read_progress(path).step <= step), None)


def _write(folder: Path, progress: Progress, model: Any, tensors: Tensors, tokenizer: Any) -> None:
    # a model in parts has none of its weights whole; any other writes its own, ties and all
    of_parts = {"state_dict": tensors.weights} if any(in_parts(p) for p in model.parameters()) else {}
    model.save_pretrained(folder, safe_serialization=True, **of_parts)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    save_file(tensors.moments | {RNG: torch.get_rng_state()}, folder / "optimizer.safetensors")
    (folder / "trainer.json").write_text(json.dumps(asdict(progress), indent=2))


def read_progress(path: Path) -> Progress:
    return Progress(**json.loads((path / "trainer.json").read_text()))


def load(path: Path, model: nn.Module) -> Tensors:
    """Read weights and moments for :meth:`Tensors.put_into`, and put torch's RNG back.

    Raises:
        RunFailed: if the checkpoint is of another model or in other dtypes.
    """
    try:
        file = path / ("adapter_model.safetensors" if is_adapted(model) else "model.safetensors")
        weights, moments = load_file(file), load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"{path} is damaged ({error}): remove it to go on from the checkpoint before") from error
    parameters = trained_parameters(model)
    if set(weights) != set(parameters):
        raise RunFailed(f"{path} is not a checkpoint of this model: {sorted(set(weights) ^ set(parameters))}")
    for name, tensor in weights.items():
        if tensor.dtype != parameters[name].dtype:
            raise RunFailed(f"{path}: {name} is stored in {tensor.dtype}, the run keeps it in {parameters[name].dtype}")
    torch.set_rng_state(moments.pop(RNG))
    return Tensors(weights, moments)
