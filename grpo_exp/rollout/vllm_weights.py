"""New weights inside a process of vLLM: loaded all or not at all, and read back from the kernels that use them.

vLLM fuses some parameters (``qkv_proj``), and on a CPU packs matrices for their kernels, so that a parameter can be empty,
or no longer what is multiplied with. So a matrix is read back through its own layer: a row of an identity matrix gives one of
its columns, bit for bit in any dtype, since all other products are zeros.
"""

import logging
import mmap
import os
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RunFailed
from ..precision import dtype_name, observed_dtypes
from ..sync.shm import Payload, checksum, tensors_in

FIRST_COLUMNS, LATER_COLUMNS = 512, 16
"""Columns of a matrix that are read back after the first sync and after later ones, evenly spread, others each time."""

NOISY = ("vllm.model_executor.model_loader.reload.layerwise",)
"""Warns at every sync of layers that have no weights of their own; what is held is checked here anyway."""


class WeightReceiver:
    """Methods that vLLM mixes into its worker (``worker_extension_cls``), called by name."""

    model_runner: Any
    vllm_config: Any
    _grpo_served: tuple[dict[str, Any], str] | None = None

    def grpo_load(self, payload: dict[str, Any], source: str) -> dict[str, Any]:
        """Load weights that lie in a file, and read them back.

        Args:
            payload: a :class:`~grpo_exp.sync.shm.Payload` as plain data.
            source: path of the file; that of a descriptor in /proc where the file has no name.

        Returns:
            ``{"checksum": …}`` of what arrived, or ``{"error": …, "serving": …}``: whether the weights of before are still
            there. They are where nothing was changed yet, and else they are loaded again.
        """
        new, serving = Payload.from_json(payload), self._grpo_served is not None
        try:
            weights = self._grpo_verified(new, tensors_in(_mapped(source), new))
            try:
                self._grpo_replace(weights)
                columns = LATER_COLUMNS if serving else FIRST_COLUMNS
                check_held(self.model_runner.get_model(), weights, new.version, columns)
            except Exception:
                serving = False
                serving = self._grpo_restore()
                raise
        except Exception:
            return {"error": traceback.format_exc(), "serving": serving}
        self._grpo_served = payload, source
        return {"checksum": new.checksum}

    def grpo_dtypes(self) -> dict[str, str]:
        """Precision site → dtype, from live objects."""
        model, config = self.model_runner.get_model(), self.vllm_config.model_config
        with torch.inference_mode():
            device = next(model.parameters()).device
            logits = model.compute_logits(torch.zeros(1, config.get_hidden_size(), dtype=config.dtype, device=device))
        return {
            "rollout": observed_dtypes(model.parameters()),
            "rollout_head": observed_dtypes([logits]),
            "kv_cache": observed_dtypes(self.model_runner.kv_caches),
        }

    def _grpo_verified(self, payload: Payload, sent: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights in the engine's dtype, once it is sure that they are all there and arrived whole."""
        dtype = self.vllm_config.model_config.dtype
        weights = {name: tensor.to(dtype) for name, tensor in sent.items()}
        arrived = checksum(weights.values())
        if arrived != payload.checksum:
            raise RunFailed(
                f"other weights arrived than were sent for version {payload.version} (wire {dtype_name(payload.dtype)}):"
                f" checksum {arrived:016x}, expected {payload.checksum:016x}"
            )
        check_names(self.model_runner.get_model(), weights)
        return weights

    def _grpo_replace(self, weights: Mapping[str, Tensor]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform

        for name in NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        model = self.model_runner.get_model()
        tied = tied_head(model)
        with torch.inference_mode(), set_current_vllm_config(self.vllm_config):
            names = [name for name in weights if not (tied is not None and name == "lm_head.weight")]
            self.model_runner.reload_weights(weights_iterator=((name, weights[name]) for name in names))
            if tied is not None and current_platform.is_cpu():  # it would go on with what was packed before
                from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

                dispatch_cpu_unquantized_gemm(tied, remove_weight=False)

    def _grpo_restore(self) -> bool:
        """Back to the version that was being served, if there was one; the sender has left it in the file."""
        if self._grpo_served is None:
            return False
        payload, source = Payload.from_json(self._grpo_served[0]), self._grpo_served[1]
        self._grpo_replace(self._grpo_verified(payload, tensors_in(_mapped(source), payload)))
        return True


def _mapped(path: str) -> mmap.mmap:
    """Unmapped when the last tensor in it is gone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)


def tied_head(model: nn.Module) -> nn.Module | None:
    """The LM head, where it shares its weight with the embedding."""
    head = getattr(model, "lm_head", None)
    return head if head is not None and getattr(getattr(model, "config", None), "tie_word_embeddings", False) else None


def parts_of(model: nn.Module) -> dict[str, list[str]]:
    """Parameter of the engine → the parameters of the checkpoint that it is fused from, in order, names canonical."""
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    parts = {}
    for name, _ in model.named_parameters():
        *before, module, kind = name.split(".")
        parts[name] = [".".join([*before, part, kind]) for part in packed.get(module, [module])]
    if tied_head(model) is not None:
        parts.pop("lm_head.weight", None)
    return parts


def check_names(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raises RunFailed, listing names, unless just those weights are there that the engine's parameters are made of."""
    expected = {part for parts in parts_of(model).values() for part in parts}
    sent = set(weights)
    if tied_head(model) is not None:
        sent.discard("lm_head.weight")  # a tied pair travels once or twice
    if sent != expected:
        missing, unknown = sorted(expected - sent), sorted(sent - expected)
        raise RunFailed(f"weights do not fit the generator: missing {missing}, unknown {unknown}")


@torch.inference_mode()
def check_held(model: nn.Module, weights: Mapping[str, Tensor], version: int, num_columns: int | None = None) -> None:
    """Raises RunFailed, naming them, if a layer computes with other weights than these; None reads every column back."""
    wrong = []
    for name, parts in parts_of(model).items():
        expected = torch.cat([weights[part] for part in parts]) if len(parts) > 1 else weights[parts[0]]
        module = model.get_submodule(name.rpartition(".")[0])
        if not _holds(module, name, expected, version, num_columns):
            wrong.append(name)
    head = tied_head(model)
    if head is not None:
        embedding = next(iter(parts_of(model).values()))[0]
        if not _holds(head, "lm_head.weight", weights[embedding], version, num_columns):
            wrong.append("lm_head.weight")
    if wrong:
        raise RunFailed(f"the generator holds other weights than were sent for version {version}: {', '.join(wrong)}")


def _holds(module: Any, name: str, expected: Tensor, version: int, num_columns: int | None) -> bool:
    kind = name.rpartition(".")[2]
    stored: Tensor = getattr(module, kind)
    if kind != "weight" or not hasattr(module, "cpu_linear") or _is_embedding(module):
        held = stored[: len(expected)]  # a vocabulary is padded
        return held.shape == expected.shape and torch.equal(held, expected.to(held))
    width = expected.shape[1]
    stride = -(-width // (num_columns or width))
    columns = torch.arange(version % stride, width, stride)
    probe = torch.zeros(len(columns), width, dtype=expected.dtype)
    probe[torch.arange(len(columns)), columns] = 1
    held = module.quant_method.apply(module, probe)[:, : len(expected)]
    return torch.equal(held.T.to(expected.dtype), expected[:, columns])


def _is_embedding(module: nn.Module) -> bool:
    """Its weight is looked up, not multiplied with; a head is a subclass that is multiplied with."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
