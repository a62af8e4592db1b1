"""How much of the smaller half of a step the asynchronous loop hides.

Seconds per step with one generator worker on two cores, against the slower of the two halves alone on one core each:
generation (the engine in-process, as many groups as a step has) and training (batches recorded before: build, forward,
backward, optimizer). Target: at most 1.15 times.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import Contestant, Turns, header, make_trainer, spread, take_turns, verdict

if TYPE_CHECKING:
    from grpo_exp.rollout.types import Group, Request


def loop_generation(turns: Turns, overrides: list[str], folder: Path) -> None:
    """Sample the groups of one step, again and again."""
    half = Halves(overrides, folder)
    tokens, version = 0, 0
    while turns.step_done(tokens):
        groups = half.engine.generate(half.requests(version))
        tokens += sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
        version += 1


def loop_training(turns: Turns, overrides: list[str], folder: Path) -> None:
    """Train on recorded groups, again and again."""
    from grpo_exp.batch import build_batch

    half = Halves(overrides, folder)
    trainer, config = half.trainer, half.trainer.config
    recorded = [half.groups(version) for version in range(8)]
    tokens, step = 0, 0
    while turns.step_done(tokens):
        limits = (config.task.max_completion_tokens, config.trainer.tokens_per_micro_batch)
        groups = recorded[step % len(recorded)]
        batch = build_batch(groups, config.algo, *limits, trainer.device, trainer.policy.shares_prompts)
        trainer.passes.run(batch, trainer.optimizer.loss_scale.scale)
        trainer.optimizer.step(1e-6)
        trainer.optimizer.zero_grad()
        tokens, step = tokens + batch.num_tokens, step + 1


class Halves:
    """Trainer and engine of one configuration in one process, without the loop that joins them."""

    def __init__(self, overrides: list[str], folder: Path) -> None:
        from grpo_exp.precision import DTYPES
        from grpo_exp.rollout.hf import HFEngine
        from grpo_exp.rollout.process import open_memory
        from grpo_exp.rollout.start import engine_spec
        from grpo_exp.sync.shm import Sender
        from grpo_exp.tokens import Codec

        self.trainer = make_trainer(overrides, folder / "run")
        self.codec = Codec(self.trainer.processing_class)
        spec = engine_spec(self.trainer.config, self.trainer.precision, str(self.trainer.device))
        self.engine, memory = HFEngine(spec), open_memory()
        sender = Sender(memory, DTYPES[spec.dtypes["wire"]], DTYPES[spec.dtypes["rollout"]])
        self.engine.load(sender.write(0, self.trainer.model), memory)

    def requests(self, step: int) -> "list[Request]":
        """What a step asks the engine for."""
        from grpo_exp.rollout.types import Request

        config, rows = self.trainer.config, self.trainer.task.train
        count, size, limit = config.trainer.prompts_per_step, config.algo.group_size, config.task.max_completion_tokens
        serials = range(step * count, (step + 1) * count)
        prompts = self.codec.encode([rows[serial % len(rows)] for serial in serials])
        return [Request(s, ids, size, limit, 1.0, s) for s, ids in zip(serials, prompts, strict=True)]

    def groups(self, step: int) -> "list[Group]":
        """The groups of one step, with their rewards."""
        from grpo_exp.rollout.types import Group

        rows, size = self.trainer.task.train, self.trainer.config.algo.group_size
        requests, reward = self.requests(step), self.trainer.task.reward_funcs[0]
        assert callable(reward)
        groups = []
        for request, done in zip(requests, sorted(self.engine.generate(requests), key=lambda g: g.serial), strict=True):
            row = rows[request.serial % len(rows)]
            texts = self.codec.decode([row] * size, [rollout.token_ids for rollout in done.rollouts])
            rewards: Any = reward(completions=texts, answer=[row["answer"]] * size)
            groups.append(Group(request.serial, request.prompt_ids, row, done.rollouts, 0, rewards))
        return groups


def compare(precision: str, rounds: int, warm_up: int, steps: int) -> None:
    header(f"overlap: tiny, reverse, {precision}, {rounds} rounds of {steps} steps each")
    cores = sorted(os.sched_getaffinity(0))[:2]
    common = [str(Path(__file__).resolve()), "--warm-up", str(warm_up), "--steps", str(steps), "--precision", precision]
    running = {
        "async": Contestant([*common, "--contestant", "async"], cpus=set(cores)),
        "generation": Contestant([*common, "--contestant", "generation"], cpus={cores[-1]}),
        "training": Contestant([*common, "--contestant", "training"], cpus={cores[0]}),
    }
    blocks = take_turns(running, rounds)
    seconds = {name: [block.wall_s / block.steps for block in found] for name, found in blocks.items()}
    for name, found in seconds.items():
        cpu = statistics.median(block.cpu_s / block.steps for block in blocks[name])
        print(f"  {name:10} {spread(found, ' s')} and {cpu:.3g} CPU-s a step")
    slower = [max(pair) for pair in zip(seconds["generation"], seconds["training"], strict=True)]
    found_ratio = statistics.median(a / b for a, b in zip(seconds["async"], slower, strict=True))
    verdict("seconds per step, async : max(generation, training)", found_ratio, 1.15, at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--contestant", choices=["async", "generation", "training"], help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", type=int, default=10, help="steps before anything is measured")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    options = parser.parse_args()
    if not options.contestant:
        compare(options.precision, 4 if options.quick else 9, options.warm_up, 10 if options.quick else options.steps)
        return
    turns = Turns(options.warm_up, skip=3, steps=options.steps)
    # at this learning rate the policy, and with it the length of completions, stays what it is
    overrides = [
        "optim.lr=1e-9",
        f"precision={options.precision}",
        f"rollout.num_workers={int(options.contestant == 'async')}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        match options.contestant:
            case "async":
                make_trainer(overrides, Path(folder) / "run", turns.on_step).train()
            case "generation":
                loop_generation(turns, overrides, Path(folder))
            case "training":
                loop_training(turns, overrides, Path(folder))


if __name__ == "__main__":
    main()
