"""How much of a training pass the matrix products of a model of SmolLM2-135M's size take at the speed of the machine.

Products that a pass needs: three for every linear layer and token that is forwarded (the output, and two gradients), and
the same for the head at every completion token. Their FLOPs over the rate of plain products of the same shapes, measured
in the same run with the same dtype and one thread, is the least time they can take. Target: at least 60 % of the pass.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _common import header, interleaved, one_thread, spread, verdict
from prefix_sharing import SIZE, random_groups
from sync import SHAPE, random_model

PROMPT, COMPLETION, GROUPS = 96, 32, 2
HIDDEN, WIDE, LAYERS, WORDS = (
    SHAPE[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
)
KEYS = HIDDEN // SHAPE["num_attention_heads"] * SHAPE["num_key_value_heads"]
LINEAR = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, KEYS)] * 2 + [(HIDDEN, WIDE)] * 2 + [(WIDE, HIDDEN)]
"""Inputs and outputs of the linear layers of one block."""


def flops(tokens: int, completion_tokens: int) -> tuple[float, float]:
    """Of the blocks and of the head, forward and backward."""
    block = sum(rows * columns for rows, columns in LINEAR)
    return 6.0 * LAYERS * block * tokens, 6.0 * HIDDEN * WORDS * completion_tokens


def products(tokens: int, completion_tokens: int) -> Callable[[], float]:
    """CPU-seconds of one block's and the head's products, forward and backward, by plain calls."""
    import torch

    shapes = [(tokens, *shape) for shape in LINEAR] + [(completion_tokens, HIDDEN, WORDS)]
    operands = [(torch.randn(n, a), torch.randn(a, b), torch.randn(n, b)) for n, a, b in shapes]

    def run() -> float:
        start = time.process_time()
        for inputs, weight, gradient in operands:
            inputs @ weight, gradient @ weight.T, inputs.T @ gradient
        return time.process_time() - start

    return run


def compare(rounds: int) -> None:
    import torch

    from grpo_exp.batch import build_batch
    from grpo_exp.config.compose import compose, to_typed
    from grpo_exp.passes import PassRunner
    from grpo_exp.policy import Policy
    from grpo_exp.precision import resolve

    torch.set_num_threads(1)
    header(
        f"matmul_share: weights of the size of SmolLM2-135M, fp32, {GROUPS} x {SIZE} completions of {COMPLETION} tokens"
    )
    cpu = torch.device("cpu")
    config = to_typed(compose(["precision=fp32"]).config)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder))
        model.train()
    policy = Policy(model, resolve(config.precision, "fp32", cpu), config.trainer.logprob_chunk)
    passes = PassRunner(policy, config.algo, config.correction, 1.0)
    groups = random_groups(PROMPT, COMPLETION)[:GROUPS]
    batch = build_batch(groups, config.algo, COMPLETION, 1 << 20, cpu, share_prompts=policy.shares_prompts)
    completion_tokens = GROUPS * SIZE * COMPLETION
    tokens = GROUPS * PROMPT + completion_tokens
    plain = products(tokens, completion_tokens)

    def train() -> float:
        start = time.process_time()
        passes.run(batch, 1.0)
        seconds = time.process_time() - start
        model.zero_grad()
        return seconds

    interleaved({"pass": train, "products": plain}, 1)
    seen = interleaved({"pass": train, "products": plain}, rounds)
    blocks, head = flops(tokens, completion_tokens)
    of_one_block = blocks / LAYERS + head
    rates = [of_one_block / seconds for seconds in seen["products"]]
    shares = sorted((blocks + head) / rate / seconds for rate, seconds in zip(rates, seen["pass"], strict=True))
    print(f"  plain products: {spread(rates, ' GFLOP/s', 1e-9)}")
    print(f"  a pass: {spread(seen['pass'], ' CPU-s')}, {(blocks + head) / 1e9:.0f} GFLOP needed, {tokens} tokens")
    verdict("least time of the products : time of the pass", shares[len(shares) // 2], 0.6, at_most=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    one_thread()
    compare(3 if options.quick else 7)


if __name__ == "__main__":
    main()
