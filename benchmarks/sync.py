"""Handing new weights to one generator worker, against copying their bytes once through memory.

Weights of the size of SmolLM2-135M (random ones), fp32 on both sides: from the call that sends them until the worker has
said which checksum it holds. Target: at most 3 times one copy by one thread.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import header, interleaved, one_thread, ratio, spread, verdict

if TYPE_CHECKING:
    from torch import nn

    from grpo_exp.rollout.pool import WorkerPool

SHAPE: dict[str, Any] = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


def random_model(folder: Path) -> "nn.Module":
    """Saved there, too, for the worker to build its own from."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(folder)
    return model


def start_pool(model: Path, folder: Path, dtype: str) -> "WorkerPool":
    from grpo_exp.config.compose import compose, to_typed
    from grpo_exp.rollout.pool import WorkerPool
    from grpo_exp.rollout.process import spawn_workers
    from grpo_exp.rollout.types import EngineSpec

    config = to_typed(compose(["rollout.num_workers=1"]).config).rollout
    dtypes = {"rollout": dtype, "rollout_head": dtype, "wire": dtype}
    spec = EngineSpec("grpo_exp.rollout.hf:HFEngine", str(model), {}, False, dtypes, "cpu", 1, 8)
    pool = WorkerPool(config, spawn_workers(config, folder), folder, lambda event, body: None)
    pool.initialise(spec)
    return pool


def compare(dtype: str, rounds: int) -> None:
    import torch

    torch.set_num_threads(1)
    header(f"sync: weights of the size of SmolLM2-135M to one worker, {dtype}, {rounds} rounds")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = random_model(folder / "model")
        pool = start_pool(folder / "model", folder, dtype)
        num_bytes = sum(p.numel() for p in model.parameters()) * {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
        source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
        version = 0

        def sync() -> float:
            nonlocal version
            version += 1
            start = time.perf_counter()
            pool.sync(version, model)
            pool.wait_synced()
            return time.perf_counter() - start

        def copy() -> float:
            start = time.perf_counter()
            target.copy_(source)
            return time.perf_counter() - start

        try:
            interleaved({"sync": sync, "copy": copy}, 2)
            seen = interleaved({"sync": sync, "copy": copy}, rounds)
        finally:
            pool.close()
    for name, seconds in seen.items():
        print(f"  {name}: {spread(seconds, ' ms', 1e3)} for {num_bytes / 1e6:.0f} MB")
    verdict("time of a sync : of a copy", ratio(seen["sync"], seen["copy"]), 3.0, at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the wire and the worker")
    options = parser.parse_args()
    one_thread()
    compare(options.dtype, 5 if options.quick else 15)


if __name__ == "__main__":
    main()
