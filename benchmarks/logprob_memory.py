"""Peak memory and time of the log-prob pass, forward and backward, against the naive ``log_softmax(logits.float())``.

8 x 512 tokens, hidden size 576, vocabulary 49152, the head of SmolLM2-135M. Targets: at most a quarter of the naive peak,
at most 1.2 times its time. Peaks are the kernel's high-water mark of a process of its own, over what the process held
before the pass; the chunk is the default of ``trainer.logprob_chunk``.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from _common import environment, header, interleaved, one_thread, ratio, spread, verdict

VOCABULARY, HIDDEN, TOKENS = 49152, 576, 8 * 512
VARIANTS = ("naive", "grpo_exp")


def high_water_bytes(key: str) -> int:
    match = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def prepare(variant: str, dtype_name: str, chunk: int) -> Callable[[], None]:
    """A function that runs the pass once."""
    import torch

    from grpo_exp.head import token_logprobs

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    weight = torch.nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.02)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    tokens = torch.randint(VOCABULARY, (TOKENS,))
    # the gradients exist before the pass as well, so that only what it needs on top is counted
    weight.grad, hidden.grad = torch.zeros_like(weight), torch.zeros_like(hidden)
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()  # starts BLAS and autograd

    def run() -> None:
        if variant == "naive":
            logits = hidden.to(dtype) @ weight.to(dtype).T
            logprobs = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        else:
            logprobs, _, _ = token_logprobs(hidden, weight, None, tokens, 1.0, dtype, chunk)
        logprobs.sum().backward()

    return run


def peak_bytes(variant: str, dtype: str, chunk: int) -> int:
    """In a process of its own: how far one pass raises the high-water mark over what the process held before."""
    run = prepare(variant, dtype, chunk)
    before = high_water_bytes("VmRSS")
    run()
    return high_water_bytes("VmHWM") - before


def child_peak(variant: str, dtype: str, chunk: int) -> int:
    arguments = [sys.executable, __file__, "--variant", variant, "--dtype", dtype, "--chunk", str(chunk)]
    return int(subprocess.run(arguments, env=environment(1), check=True, capture_output=True, text=True).stdout)


def timed(run: Callable[[], None]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    return seconds


def compare(dtype: str, chunk: int, rounds: int) -> None:
    peaks = {variant: child_peak(variant, dtype, chunk) for variant in VARIANTS}
    seconds = interleaved({v: timed(prepare(v, dtype, chunk)) for v in VARIANTS}, rounds)
    for variant in VARIANTS:
        print(f"  {dtype} {variant:8} peak {peaks[variant] / 2**30:.3f} GiB, {spread(seconds[variant], ' CPU-s')}")
    verdict(f"{dtype} peak memory, grpo_exp : naive", peaks["grpo_exp"] / peaks["naive"], 0.25, at_most=True, digits=3)
    verdict(f"{dtype} time, grpo_exp : naive", ratio(seconds["grpo_exp"], seconds["naive"]), 1.2, at_most=True)


def main() -> None:
    from grpo_exp.config.schema import TrainerConfig

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--chunk", type=int, default=TrainerConfig.logprob_chunk)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(peak_bytes(options.variant, options.dtype, options.chunk))
        return
    header(f"logprob_memory: {TOKENS} tokens, hidden {HIDDEN}, vocabulary {VOCABULARY}, chunk {options.chunk}")
    compare(options.dtype, options.chunk, 2 if options.quick else 7)


if __name__ == "__main__":
    one_thread()
    main()
