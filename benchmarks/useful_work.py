"""Completions that were trained over completions that were generated, in asynchronous runs. Target: at least 0.97.

The demo's task and model with one worker, at a staleness bound of 1 and of 4, evaluation aside. What a trainer throws away
for being late, or leaves over at the end of a run, was generated for nothing.
"""

import argparse
import tempfile
from pathlib import Path

from _common import header, make_trainer, one_thread, verdict


def share(staleness: int, steps: int) -> float:
    overrides = ["precision=fp32", f"rollout.max_staleness={staleness}", f"trainer.max_steps={steps}"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(overrides, Path(folder) / "run")
        trainer.train()
        counts = trainer.source.buffer.counts
        print(f"  staleness {staleness}: {vars(counts)}")
        return counts.trained / counts.started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    options = parser.parse_args()
    one_thread()
    steps = 30 if options.quick else 150
    header(f"useful_work: tiny, reverse, fp32, one worker, {steps} steps")
    for staleness in (1, 4):
        verdict(f"trained : generated at staleness {staleness}", share(staleness, steps), 0.97, at_most=False, digits=3)


if __name__ == "__main__":
    main()
