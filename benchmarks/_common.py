"""What the benchmarks share: facts about the machine, CPU time with children, and contestants that take turns.

Figures of a busy or throttled machine drift by tens of percent within minutes, so only ratios of one run are reported. A
contestant is a process of its own that is ready and warm before anything is measured; blocks of steps then go round robin.
"""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_exp.trainer import AsyncGRPOTrainer

STEPS_BOUND = 100_000
MARK = "@@ "  # begins a line of a contestant that is meant for us; libraries print to stdout too


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def header(title: str) -> None:
    """Print what is measured, by which command, and on what."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    print(f"{title}\n  command: {shlex.join(['python', *sys.argv])}")
    print(f"  machine: {cpu_model()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {load}")


def verdict(name: str, value: float, target: float, *, at_most: bool, digits: int = 2) -> None:
    """Print one ratio beside its target."""
    met = value <= target if at_most else value >= target
    sign = "≤" if at_most else "≥"
    print(f"  {name}: {value:.{digits}f}  (target {sign} {target:g}: {'met' if met else 'MISSED'})")


def spread(values: Iterable[float], unit: str = "", scale: float = 1.0) -> str:
    """Median with minimum and maximum, in words."""
    ordered = sorted(value * scale for value in values)
    return f"{statistics.median(ordered):.3g}{unit} ({ordered[0]:.3g}–{ordered[-1]:.3g}, n={len(ordered)})"


def interleaved(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each in turn, ``rounds`` times, and collect what they return."""
    seen: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            seen[name].append(run())
    return seen


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def one_thread() -> None:
    """Must be called before torch is imported."""
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")


def environment(threads: int) -> dict[str, str]:
    count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return os.environ | count | quiet


def cpu_seconds() -> float:
    """CPU time of this process and of every child that lives."""
    import psutil

    total = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return total


def peak_bytes() -> int:
    """The most resident memory of this process so far and of every child that lives; what they share counts once."""
    import psutil

    found = 0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        size = {
            name: 1024 * int(rest.split()[0])
            for name, _, rest in (line.partition(":") for line in lines)
            if "kB" in rest
        }
        found += size["VmHWM"] - (0 if process is own else size["RssShmem"])
    return found


@dataclass(frozen=True)
class Block:
    """Some steps in a row."""

    steps: int
    tokens: int
    cpu_s: float
    wall_s: float
    peak_bytes: int  # of resident memory so far, the warm-up included


class Contestant:
    """A process that runs a block of steps whenever it is told to."""

    def __init__(self, arguments: list[str], threads: int = 1, cpus: set[int] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(threads),
            text=True,
            preexec_fn=None if cpus is None else lambda: os.sched_setaffinity(0, cpus),
        )
        self._receive()  # ready

    def block(self) -> Block:
        self._tell("block")
        return Block(**self._receive())

    def close(self) -> None:
        self._tell("stop")
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        raise RuntimeError(f"a contestant ended with exit code {self.process.wait()}: {self.process.args}")


def take_turns(contestants: dict[str, Contestant], rounds: int) -> dict[str, list[Block]]:
    """A block of each in turn, ``rounds`` times; ends them."""
    blocks: dict[str, list[Block]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            blocks[name].append(contestant.block())
    for contestant in contestants.values():
        contestant.close()
    return blocks


class Turns:
    """The contestant's side: call :meth:`step_done` after each step; it waits for its turn between blocks.

    Args:
        warm_up: steps before the first turn.
        skip: steps at the start of each block that are not measured (an asynchronous run has rollouts in store then).
        steps: measured steps of a block.
    """

    def __init__(self, warm_up: int, skip: int, steps: int) -> None:
        self.warm_up, self.skip, self.steps = warm_up, skip, steps
        self.done, self.start = 0, (0.0, 0.0, 0)

    def step_done(self, tokens: int) -> bool:
        """``tokens``: trained so far. False: there will be no further turn."""
        self.done += 1
        if self.done < self.warm_up:
            return True
        if self.done == self.warm_up:
            self._send({})
            return self._wait(tokens)
        position = (self.done - self.warm_up - 1) % (self.skip + self.steps) + 1
        if position == self.skip:
            self._begin(tokens)
        if position < self.skip + self.steps:
            return True
        cpu_s, wall_s, tokens_before = self.start
        self._send(
            {
                "steps": self.steps,
                "tokens": tokens - tokens_before,
                "cpu_s": cpu_seconds() - cpu_s,
                "wall_s": time.perf_counter() - wall_s,
                "peak_bytes": peak_bytes(),
            }
        )
        return self._wait(tokens)

    def on_step(self, metrics: dict[str, Any]) -> bool:
        """:meth:`step_done` for :func:`make_trainer`."""
        return self.step_done(metrics["tokens"])

    def _begin(self, tokens: int) -> None:
        self.start = (cpu_seconds(), time.perf_counter(), tokens)

    def _send(self, message: dict[str, Any]) -> None:
        print(MARK + json.dumps(message), flush=True)

    def _wait(self, tokens: int) -> bool:
        if sys.stdin.readline().strip() != "block":
            return False
        self._begin(tokens)
        return True


def make_trainer(
    overrides: list[str],
    output: Path,
    on_step: Callable[[dict[str, Any]], bool] | None = None,
    reward_funcs: list[Any] | None = None,
) -> "AsyncGRPOTrainer":
    """The demo's trainer with some overrides, without evaluation and checkpoints.

    Args:
        on_step: is given the metrics of every step, and says whether to go on.
        reward_funcs: instead of the task's.
    """
    from grpo_exp.args import AsyncGRPOConfig
    from grpo_exp.config.compose import compose, to_typed
    from grpo_exp.tasks import build
    from grpo_exp.trainer import AsyncGRPOTrainer

    class Steps:
        def on_step_end(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
            assert on_step is not None
            control.should_training_stop = not on_step(metrics)

    bounds = [f"trainer.max_steps={STEPS_BOUND}", "trainer.eval_every=0", "trainer.save_every=0", "trainer.device=cpu"]
    config = to_typed(compose([*bounds, *overrides]).config)
    task = build(config.task)
    args = AsyncGRPOConfig.from_config(config, str(output))
    callbacks = [] if on_step is None else [Steps()]
    rewards = reward_funcs or task.reward_funcs
    return AsyncGRPOTrainer(config.model.name_or_path, rewards, args, task.train, callbacks=callbacks)
