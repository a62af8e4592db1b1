"""Memory that ``grpo-exp plan`` foresees against the measured peak of a training step, in three precisions.

The peak is the kernel's high-water mark of a process of its own over what it held when its libraries were loaded and warm; the
step is that of a run (log-prob pass and backward of two micro-batches, AdamW), on rows as long as the plan assumes. Target: within 15 %.
``--model smollm2_135m`` wants ``grpo-exp fetch-model smollm2_135m`` first, and 3 GB.
"""

import argparse
import ctypes
import gc
import json
import re
import subprocess
import sys
from pathlib import Path

from _common import environment, header, one_thread

PRECISIONS = ("fp32", "bf16", "fp16")
SHAPE = (16, 240)  # tokens of prompt and completion
OVERRIDES = {
    "tiny": ["model=tiny", "trainer.tokens_per_micro_batch=16384", "trainer.prompts_per_step=64"],
    "smollm2_135m": ["model=smollm2_135m", "trainer.tokens_per_micro_batch=1024"],
}


def high_water_bytes(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def one(model: str, name: str) -> None:
    """In a process of its own: prints what was foreseen and what was measured, in bytes."""
    import torch

    from grpo_exp.assets import locate
    from grpo_exp.config.compose import compose, to_typed
    from grpo_exp.optim import Optimizer
    from grpo_exp.plan.memory import Shape, estimate
    from grpo_exp.policy import Policy, load_policy
    from grpo_exp.precision import resolve
    from grpo_exp.token_batch import Completion

    torch.set_num_threads(1)
    device = torch.device("cpu")
    config = to_typed(compose([*OVERRIDES[model], f"precision={name}"]).config)
    precision = resolve(config.precision, "fp32", device)
    shape = Shape(*SHAPE)
    foreseen = estimate(config, shape, device)
    warm = load_policy(locate("asset:tiny"), params=precision.params)
    step(Policy(warm, precision, 64), Optimizer(warm, config.optim, precision), [Completion(0, [1], [2] * 8)] * 2)
    del warm
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap could hold part of the step unseen
    before = high_water_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    policy = load_policy(locate(config.model.name_or_path), params=precision.params)
    optimizer = Optimizer(policy, config.optim, precision)
    rows = [Completion(n, [1] * shape.prompt, [2] * shape.completion) for n in range(shape.rows(config))]
    for _ in range(2):  # the moments exist from the second step on
        step(Policy(policy, precision, config.trainer.logprob_chunk), optimizer, rows)
    parts = {key: value for key, value in vars(foreseen).items() if key != "num_params"}
    print(json.dumps({"foreseen": foreseen.trainer, "measured": high_water_bytes("VmHWM") - before, "parts": parts}))


def step(policy, optimizer, completions) -> None:  # type: ignore[no-untyped-def]  # torch is imported later
    from grpo_exp.token_batch import RowBatch

    for _ in range(2):  # micro-batches of a step: from the second on, gradients are held during the whole pass
        new, _ = policy.logprobs(RowBatch.build(completions, policy.device), 1.0)
        new.sum().backward()
    optimizer.step(1e-6)
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny model only")
    parser.add_argument("--model", choices=OVERRIDES, help="one model only")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.model, options.one)
        return
    header(f"plan_memory: one step of rows of {SHAPE[0]} + {SHAPE[1]} tokens")
    for model in [options.model] if options.model else list(OVERRIDES)[: 1 if options.quick else None]:
        for name in PRECISIONS:
            arguments = [sys.executable, __file__, "--model", model, "--one", name]
            # memory that was freed goes back to the kernel at once: only what is held is to be seen
            give_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            ended = subprocess.run(arguments, env=environment(1) | give_back, capture_output=True, text=True)
            if ended.returncode:
                print(f"  {model} {name}: failed: {(ended.stderr.strip() or '?').splitlines()[-1]}")
                continue
            found = json.loads(ended.stdout.splitlines()[-1])
            ratio = found["foreseen"] / found["measured"]
            mib = {key: found[key] / 2**20 for key in ("foreseen", "measured")}
            met = "met" if 0.85 <= ratio <= 1.15 else "MISSED"
            print(
                f"  {model} {name}: foreseen {mib['foreseen']:.0f} MiB, measured {mib['measured']:.0f} MiB,"
                f" ratio {ratio:.2f}  (target 0.85 to 1.15: {met})"
            )


if __name__ == "__main__":
    one_thread()
    main()
