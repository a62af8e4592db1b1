"""Training with malloc as it is, and with malloc told to keep freed memory (``grpo_exp.allocator``).

Seconds per training step of the tiny model (build, forward, backward, optimizer) in two processes that take turns. The
first leaves malloc alone because its environment sets one of malloc's variables, to the default it has anyway.
"""

import argparse
import os
import tempfile
from pathlib import Path

from _common import Contestant, Turns, header, ratio, spread, take_turns, verdict
from overlap import loop_training


def compare(precision: str, rounds: int, steps: int) -> None:
    header(f"allocator: training of tiny, reverse, {precision}, {rounds} rounds of {steps} steps each")
    common = [str(Path(__file__).resolve()), "--steps", str(steps), "--precision", precision, "--contestant"]
    running = {name: Contestant([*common, name]) for name in ("default", "kept")}
    blocks = take_turns(running, rounds)
    seconds = {name: [block.wall_s / block.steps for block in found] for name, found in blocks.items()}
    for name, found in seconds.items():
        print(f"  {name:8} {spread(found, ' ms', 1e3)} a step")
    verdict("seconds per step, kept : default", ratio(seconds["kept"], seconds["default"]), 1.0, at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--contestant", choices=["default", "kept"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    options = parser.parse_args()
    if not options.contestant:
        compare(options.precision, 5 if options.quick else 11, options.steps)
        return
    if options.contestant == "default":
        os.environ["MALLOC_ARENA_TEST"] = "8"  # glibc's default on 64 bits; read once, before this process began
    overrides = ["optim.lr=1e-9", f"precision={options.precision}", "rollout.num_workers=0"]
    with tempfile.TemporaryDirectory() as folder:
        loop_training(Turns(10, skip=3, steps=options.steps), overrides, Path(folder))


if __name__ == "__main__":
    main()
