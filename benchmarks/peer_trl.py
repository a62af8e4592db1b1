"""AsyncGRPOTrainer against TRL's GRPOTrainer: the same model, task, batch, group size, dtype and learning rate.

Lockstep: trained completion tokens per CPU-second. Asynchronous with one worker on two cores: wall time per step, each at
its better thread setting (the worker has one thread of its own); and peak memory. Needs the extra ``bench``. fp32, no evaluation, no saving, no logging by TRL.
``--model tiny``: 32 prompts x 8 completions of at most 8 tokens. ``--model smollm2_135m``: 8 x 8 completions of at most 32 on
chain_sum; a step takes most of a minute, and the model has to be fetched before (``grpo-exp fetch-model smollm2_135m``).
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _common import STEPS_BOUND, Block, Contestant, Turns, header, make_trainer, ratio, spread, take_turns, verdict


@dataclass(frozen=True)
class Setting:
    """What both train, and by how much ours has to be ahead: tokens per CPU-second, wall time, share of the memory."""

    task: str
    prompts: int
    new_tokens: int
    learning_rate: float
    targets: tuple[float, float, float | None]
    warm_up: int
    skip: int
    steps: int  # of a round
    rounds: int
    group: int = 8
    tokens_per_micro_batch: int = 4096


SETTINGS = {
    "tiny": Setting("reverse", 32, 8, 1e-3, (1.4, 1.8, None), warm_up=10, skip=3, steps=10, rounds=9),
    "smollm2_135m": Setting(
        "chain_sum", 8, 32, 1e-6, (2.0, 3.0, 0.5), warm_up=2, skip=1, steps=1, rounds=3, tokens_per_micro_batch=1024
    ),
}


def overrides(model: str) -> list[str]:
    setting = SETTINGS[model]
    return [
        f"model={model}", f"task={setting.task}", "precision=fp32", "algo=token_mean", "optim=tiny",
        f"optim.lr={setting.learning_rate}", f"algo.group_size={setting.group}",
        f"trainer.prompts_per_step={setting.prompts}", f"task.max_completion_tokens={setting.new_tokens}",
        f"trainer.tokens_per_micro_batch={setting.tokens_per_micro_batch}",
    ]  # fmt: skip


def train_ours(model: str, turns: Turns, workers: int, output: Path) -> None:
    threads = ["rollout.num_threads=1", f"trainer.num_threads={os.environ['OMP_NUM_THREADS']}"]
    make_trainer([*overrides(model), *threads, f"rollout.num_workers={workers}"], output, turns.on_step).train()


def train_trl(model: str, turns: Turns, output: Path) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_exp.assets import locate
    from grpo_exp.config.compose import compose, to_typed
    from grpo_exp.tasks import build

    setting, config = SETTINGS[model], to_typed(compose(overrides(model)).config)
    task = build(config.task)
    [own_reward] = task.reward_funcs
    tokens = 0

    def reward(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> Any:
        nonlocal tokens
        tokens += sum(len(ids) for ids in completion_ids)
        return own_reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not turns.step_done(tokens)

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    args = GRPOConfig(
        output_dir=str(output), use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, beta=0.0, top_k=0,
        loss_type="dapo", epsilon=0.2, epsilon_high=0.28, num_generations=setting.group,
        per_device_train_batch_size=setting.prompts * setting.group, max_completion_length=setting.new_tokens,
        temperature=1.0, learning_rate=setting.learning_rate, adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0,
        max_grad_norm=1.0, warmup_steps=5, lr_scheduler_type="constant_with_warmup", gradient_checkpointing=False,
        max_steps=STEPS_BOUND, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    name = locate(config.model.name_or_path)
    GRPOTrainer(name, reward, args, Dataset.from_list(task.train), callbacks=[Steps()]).train()


def contest(name: str, model: str, turns: Turns) -> None:
    """Be a contestant."""
    with tempfile.TemporaryDirectory() as folder:
        match name:
            case "lockstep":
                train_ours(model, turns, 0, Path(folder) / "run")
            case "async":
                train_ours(model, turns, 1, Path(folder) / "run")
            case "trl":
                train_trl(model, turns, Path(folder))


def per_cpu(blocks: list[Block]) -> list[float]:
    return [block.tokens / block.cpu_s for block in blocks]


def per_step(blocks: list[Block]) -> list[float]:
    return [block.wall_s / block.steps for block in blocks]


def peak(blocks: list[Block]) -> list[float]:
    return [float(block.peak_bytes) for block in blocks]


def compare(model: str, rounds: int, steps: int) -> None:
    setting = SETTINGS[model]
    batch = f"{setting.prompts} x {setting.group} completions"
    header(f"peer_trl: {model}, {setting.task}, fp32, {batch}, {rounds} rounds of {steps} steps each")
    common = [str(Path(__file__).resolve()), "--model", model, "--steps", str(steps)]
    entries = {
        "lockstep": ("lockstep", 1),
        "async, 1 thread": ("async", 1),
        "async, 2 threads": ("async", 2),
        "TRL, 1 thread": ("trl", 1),
        "TRL, 2 threads": ("trl", 2),
    }
    running = {
        label: Contestant([*common, "--contestant", name], threads) for label, (name, threads) in entries.items()
    }
    blocks = take_turns(running, rounds)
    for label, found in blocks.items():
        tokens = statistics.mean(block.tokens / block.steps for block in found)
        cpu = spread((block.cpu_s / block.steps for block in found), " CPU-s")
        memory = f"{max(peak(found)) / 1e9:.2f} GB at most"
        print(f"  {label:16} {cpu} and {spread(per_step(found), ' s')} a step; {tokens:.0f} tokens a step; {memory}")
    peers, async_ = ([label for label in entries if label.startswith(kind)] for kind in ("TRL", "async"))
    frugal = max(peers, key=lambda label: statistics.median(per_cpu(blocks[label])))
    quick, ours = (min(some, key=lambda label: statistics.median(per_step(blocks[label]))) for some in (peers, async_))
    of_cpu, of_wall, of_memory = setting.targets
    gain = ratio(per_cpu(blocks["lockstep"]), per_cpu(blocks[frugal]))
    verdict(f"trained tokens per CPU-second, lockstep : {frugal}", gain, of_cpu, at_most=False)
    gain = ratio(per_step(blocks[quick]), per_step(blocks[ours]))
    verdict(f"wall time per step, {quick} : {ours}", gain, of_wall, at_most=False)
    if of_memory is not None:
        for label in ("lockstep", ours):
            share = max(peak(blocks[label])) / max(peak(blocks[quick]))
            verdict(f"peak memory, {label} : {quick}", share, of_memory, at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SETTINGS), default="tiny")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--contestant", choices=["lockstep", "async", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help="steps of a round")
    options = parser.parse_args()
    setting = SETTINGS[options.model]
    steps = options.steps or (-(-setting.steps // 2) if options.quick else setting.steps)
    if options.contestant:
        contest(options.contestant, options.model, Turns(setting.warm_up, setting.skip, steps))
    elif importlib.util.find_spec("trl") is None:
        print("peer_trl: skipped, trl is not installed (pip install -e '.[bench]' -c constraints.txt)")
    else:
        compare(options.model, -(-setting.rounds // 3) if options.quick else setting.rounds, steps)


if __name__ == "__main__":
    main()
