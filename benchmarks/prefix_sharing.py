"""A training pass with the prompt of a group forwarded once, against one that repeats it for every completion.

The tiny model, 4 groups of 8 completions, random tokens: prompts of 256 and completions of 32. Seconds per pass, forward
and backward. Target: at least 1.8 times shorter. Tokens that are forwarded, padding included, are counted, too.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from _common import header, interleaved, make_trainer, one_thread, ratio, spread, verdict

if TYPE_CHECKING:
    from grpo_exp.rollout.types import Group

GROUPS, SIZE = 4, 8


def random_groups(prompt: int, completion: int) -> "list[Group]":
    import numpy as np

    from grpo_exp.rollout.types import Group, Rollout

    random = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        found: list[int] = random.integers(3, 60, count).tolist()
        return found

    def rollout() -> Rollout:
        return Rollout(ids(completion), np.full(completion, -4.0, np.float32), np.zeros(completion, np.int32), True)

    rewards = [float(place % 2) for place in range(SIZE)]
    return [Group(n, ids(prompt), {}, [rollout() for _ in range(SIZE)], 0, rewards) for n in range(GROUPS)]


def compare(prompt: int, completion: int, rounds: int) -> None:
    from grpo_exp.batch import build_batch

    header(f"prefix_sharing: tiny, fp32, {GROUPS} x {SIZE} completions of {completion} tokens, prompts of {prompt}")
    groups = random_groups(prompt, completion)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(["precision=fp32", "rollout.num_workers=0"], Path(folder) / "run")
        config = trainer.config
        limits = completion, config.trainer.tokens_per_micro_batch

        def timed(shared: bool) -> Callable[[], float]:
            def run() -> float:
                start = time.process_time()
                batch = build_batch(groups, config.algo, *limits, trainer.device, share_prompts=shared)
                trainer.passes.run(batch, 1.0)
                trainer.optimizer.zero_grad()
                return time.process_time() - start

            return run

        contestants = {"repeated": timed(False), "shared": timed(True)}
        interleaved(contestants, 2)
        seen = interleaved(contestants, rounds)
    for name, seconds in seen.items():
        tokens = GROUPS * (SIZE * (prompt + completion) if name == "repeated" else prompt + SIZE * completion)
        print(f"  {name:8} {spread(seconds, ' CPU-ms', 1e3)} a pass, {tokens} tokens")
    verdict("CPU-seconds of a pass, repeated : shared", ratio(seen["repeated"], seen["shared"]), 1.8, at_most=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--completion", type=int, default=32, help="tokens")
    options = parser.parse_args()
    one_thread()
    compare(options.prompt, options.completion, 7 if options.quick else 21)


if __name__ == "__main__":
    main()
