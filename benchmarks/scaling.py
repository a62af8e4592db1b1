"""Throughput and memory as functions of completion length, group size, workers and staleness. Completions are synthetic.

The tiny model with a longer context and without an end-of-sequence token: every completion has exactly the length asked for.
Each cell is a process of its own with its workers. What is reported: trained tokens per second, CPU-microseconds per token of
the trainer and of the workers, what of the trainer's is outside of its passes (texts, rewards, buffer, metrics, weights), and
peak memory. Target: outside of the passes a token costs at most 1.5 times as much in the last row of a table as in the first.
Passes and workers have none: attention is quadratic in the length, and the embedded engine copies its cache at every token.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from _common import MARK, environment, header, make_trainer, peak_bytes, verdict

WARM_UP = 2  # steps


@dataclass(frozen=True)
class Cell:
    """One setting. In a table of lengths or groups the tokens of a step stay the same."""

    length: int = 256
    group: int = 8
    prompts: int = 4
    workers: int = 1
    staleness: int = 1

    @property
    def tokens(self) -> int:
        return self.length * self.group * self.prompts


@dataclass
class Seen:
    """What a cell measured, after the warm-up."""

    wall_s: list[float] = field(default_factory=list)
    trainer_cpu_s: float = 0.0  # of a step
    beside_cpu_s: float = 0.0  # of it: everything but the forward and backward passes
    worker_cpu_s: float = 0.0
    trainer_mb: float = 0.0
    worker_mb: float = 0.0


def long_model(folder: Path, length: int) -> str:
    """The tiny model, with a context for ``length`` more tokens, that never ends a completion by itself."""
    from grpo_exp.assets import locate
    from grpo_exp.config.compose import compose, to_typed

    target = folder / "model"
    shutil.copytree(locate(to_typed(compose(["model=tiny"]).config).model.name_or_path), target)
    for name, changes in (
        ("config.json", {"max_position_embeddings": length + 64, "eos_token_id": None}),
        ("generation_config.json", {"eos_token_id": None}),
    ):
        path = target / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(target)


def reward(prompts: Any, completions: Any, completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Something that differs within a group, in time linear in the tokens."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class Meter:
    """Hears of every step, and adds up what the steps after the warm-up take."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.seen, self.passes_s = steps, 0, Seen(), 0.0

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same function with its CPU time added up; with one thread a backward pass is in the one that asks for it."""

        def run_timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            found = run(*args, **kwargs)
            self.passes_s += time.thread_time() - start
            return found

        return run_timed

    def on_step(self, metrics: dict[str, Any]) -> bool:
        self.done += 1
        if self.done == WARM_UP:
            self.start = self._cpu()
        elif self.done > WARM_UP:
            self.seen.wall_s.append(metrics["perf/step_s"])
        if self.done < WARM_UP + self.steps:
            return True
        own, workers, passes = (
            (now - before) / self.steps for now, before in zip(self._cpu(), self.start, strict=True)
        )
        self.seen.trainer_cpu_s, self.seen.beside_cpu_s, self.seen.worker_cpu_s = own, own - passes, workers
        self.seen.trainer_mb, self.seen.worker_mb = self._memory()
        return False

    def _cpu(self) -> tuple[float, float, float]:
        import psutil

        times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        return time.process_time(), sum(one.user + one.system for one in times), self.passes_s

    @staticmethod
    def _memory() -> tuple[float, float]:
        import resource

        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return own / 1e6, (peak_bytes() - own) / 1e6


def run_cell(cell: Cell, steps: int) -> None:
    """Be a cell."""
    with tempfile.TemporaryDirectory() as name:
        folder, meter = Path(name), Meter(steps)
        overrides = [
            "model=local", f"model.name_or_path={long_model(folder, cell.length)}", "precision=fp32",
            f"task.max_completion_tokens={cell.length}", f"algo.group_size={cell.group}",
            f"trainer.prompts_per_step={cell.prompts}", f"rollout.num_workers={cell.workers}",
            f"rollout.max_staleness={cell.staleness}", "rollout.num_threads=1", "trainer.num_threads=1", "optim.lr=1e-5",
        ]  # fmt: skip
        trainer = make_trainer(overrides, folder / "run", on_step=meter.on_step, reward_funcs=[reward])
        setattr(trainer.passes, "run", meter.timed(trainer.passes.run))  # noqa: B010 - a method, to the type checker
        trainer.train()
        print(MARK + json.dumps(asdict(meter.seen)), flush=True)


def measure(cell: Cell, steps: int) -> Seen:
    arguments = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--cell",
        json.dumps(asdict(cell)),
        "--steps",
        str(steps),
    ]
    done = subprocess.run(arguments, env=environment(1), stdout=subprocess.PIPE, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    return Seen(**json.loads(line.removeprefix(MARK)))


def micros(seconds: float, cell: Cell) -> float:
    return 1e6 * seconds / cell.tokens


def row(name: str, cell: Cell, steps: int) -> float:
    """Measure, print, and return the microseconds per token beside the passes."""
    seen = measure(cell, steps)
    beside = micros(seen.beside_cpu_s, cell)
    print(
        f"  {name:16} {cell.tokens:7} {cell.tokens / statistics.median(seen.wall_s):9.0f}"
        f" {micros(seen.trainer_cpu_s, cell):11.1f} {beside:11.1f} {micros(seen.worker_cpu_s, cell):11.1f}"
        f" {seen.trainer_mb:11.0f} {seen.worker_mb / cell.workers:11.0f}"
    )
    return beside


def sweep(title: str, cells: dict[str, Cell], steps: int) -> None:
    columns = ("tokens", "tokens/s", "trainer us", "beside us", "worker us", "trainer MB", "worker MB")
    print(f"  {title:16} {columns[0]:>7} {columns[1]:>9} " + " ".join(f"{name:>11}" for name in columns[2:]))
    found = [row(name, cell, steps) for name, cell in cells.items()]
    verdict(
        f"beside the passes, a token of the last row : of the first ({title})", found[-1] / found[0], 1.5, at_most=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to a quarter of the length, fewer steps")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help="measured steps of a cell")
    options = parser.parse_args()
    steps = options.steps or (3 if options.quick else 6)
    if options.cell:
        run_cell(Cell(**json.loads(options.cell)), steps)
        return
    header(f"scaling: tiny model, fp32, completions of an exact length, {steps} steps a cell")
    base, longest = Cell(), 1024 if options.quick else 4096
    lengths = {
        f"length {n}": replace(base, length=n, prompts=longest // n) for n in (64, 256, 1024, 4096) if n <= longest
    }
    groups = {f"group {n}": replace(base, group=n, prompts=64 // n) for n in (2, 8, 32, 64)}
    sweep("length", lengths, steps)
    sweep("group", groups, steps)
    sweep("workers", {f"workers {n}": replace(base, workers=n) for n in (1, 2, 4)}, steps)
    sweep("staleness", {f"staleness {n}": replace(base, staleness=n) for n in (1, 4, 16)}, steps)


if __name__ == "__main__":
    main()
