"""AsyncGRPOTrainer against TRL's GRPOTrainer: the same model, task, batch, group size, dtype and learning rate.

Lockstep: trained completion tokens per CPU-second, target at least 1.4 times TRL's. Asynchronous with one worker on two
cores: wall time per step, target at least 1.8 times shorter than TRL's at its better thread setting. Needs the extra
``bench``. 32 prompts x 8 completions of at most 8 tokens, fp32, no evaluation, no saving, no logging by TRL.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _common import STEPS_BOUND, Block, Contestant, Turns, header, make_trainer, ratio, spread, take_turns, verdict

PROMPTS, GROUP, NEW_TOKENS, LEARNING_RATE = 32, 8, 8, 1e-3


def train_ours(turns: Turns, workers: int, output: Path) -> None:
    overrides = [
        "model=tiny", "task=reverse", "precision=fp32", "algo=token_mean", "optim=tiny", f"optim.lr={LEARNING_RATE}",
        f"rollout.num_workers={workers}", f"algo.group_size={GROUP}", f"trainer.prompts_per_step={PROMPTS}",
        f"task.max_completion_tokens={NEW_TOKENS}",
    ]  # fmt: skip
    make_trainer(overrides, output, turns).train()


def train_trl(turns: Turns, output: Path) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_exp.assets import path
    from grpo_exp.config.schema import TaskConfig
    from grpo_exp.tasks import reverse

    task = reverse.build(TaskConfig())
    tokens = 0

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns: Any
    ) -> list[float]:
        nonlocal tokens
        tokens += sum(len(ids) for ids in completion_ids)
        return reverse.reward(completions, answer)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not turns.step_done(tokens)

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    args = GRPOConfig(
        output_dir=str(output), use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, beta=0.0, top_k=0,
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        max_completion_length=NEW_TOKENS, temperature=1.0, learning_rate=LEARNING_RATE, adam_beta1=0.9, adam_beta2=0.95,
        weight_decay=0.0, max_grad_norm=1.0, warmup_steps=5, lr_scheduler_type="constant_with_warmup",
        gradient_checkpointing=False, max_steps=STEPS_BOUND, logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    GRPOTrainer(str(path("tiny")), reward, args, Dataset.from_list(task.train), callbacks=[Steps()]).train()


def contest(name: str, warm_up: int, steps: int) -> None:
    """Be a contestant."""
    turns = Turns(warm_up, skip=3, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        match name:
            case "lockstep":
                train_ours(turns, 0, Path(folder) / "run")
            case "async":
                train_ours(turns, 1, Path(folder) / "run")
            case "trl":
                train_trl(turns, Path(folder))


def per_cpu(blocks: list[Block]) -> list[float]:
    return [block.tokens / block.cpu_s for block in blocks]


def per_step(blocks: list[Block]) -> list[float]:
    return [block.wall_s / block.steps for block in blocks]


def compare(rounds: int, warm_up: int, steps: int) -> None:
    header(f"peer_trl: tiny, reverse, fp32, {PROMPTS} x {GROUP} completions, {rounds} rounds of {steps} steps each")
    script, common = str(Path(__file__).resolve()), ["--warm-up", str(warm_up), "--steps", str(steps)]
    entries = {
        "lockstep": ("lockstep", 1),
        "async": ("async", 1),
        "TRL, 1 thread": ("trl", 1),
        "TRL, 2 threads": ("trl", 2),
    }
    running = {
        label: Contestant([script, "--contestant", name, *common], threads)
        for label, (name, threads) in entries.items()
    }
    blocks = take_turns(running, rounds)
    for label, found in blocks.items():
        tokens = statistics.mean(block.tokens / block.steps for block in found)
        cpu = spread((block.cpu_s / block.steps for block in found), " CPU-s")
        print(f"  {label:14} {cpu} and {spread(per_step(found), ' s')} a step; {tokens:.0f} tokens a step")
    peers = [label for label in entries if label.startswith("TRL")]
    frugal = max(peers, key=lambda label: statistics.median(per_cpu(blocks[label])))
    quick = min(peers, key=lambda label: statistics.median(per_step(blocks[label])))
    gain = ratio(per_cpu(blocks["lockstep"]), per_cpu(blocks[frugal]))
    verdict(f"trained tokens per CPU-second, lockstep : {frugal}", gain, 1.4, at_most=False)
    verdict(
        f"wall time per step, {quick} : async",
        ratio(per_step(blocks[quick]), per_step(blocks["async"])),
        1.8,
        at_most=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--contestant", choices=["lockstep", "async", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", type=int, default=10, help="steps before anything is measured")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    options = parser.parse_args()
    if options.contestant:
        contest(options.contestant, options.warm_up, options.steps)
    elif importlib.util.find_spec("trl") is None:
        print("peer_trl: skipped, trl is not installed (pip install -e '.[bench]' -c constraints.txt)")
    else:
        compare(rounds=3 if options.quick else 9, warm_up=options.warm_up, steps=5 if options.quick else options.steps)


if __name__ == "__main__":
    main()
