"""A long run of the tiny model: does memory, the number of open files or of threads grow with the steps?

A run as from the command line, with one generator worker, small steps, evaluation and checkpoints now and then. The trainer
and its children are looked at from outside. Targets, from a tenth of the steps on: no file and no thread more, and less than
1 MB of private memory per 1000 steps, by a line through the last half. In fp32: bf16 products of a CPU keep a kernel for
every shape (docs/performance.md).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _common import environment, header, verdict

RUN = (
    "precision=fp32", "trainer.prompts_per_step=4", "algo.group_size=4", "trainer.eval_every=500", "trainer.save_every=500",
    "trainer.keep_checkpoints=2", "task.num_eval=16", "probe.every=500", "optim.lr=1e-5",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    step: int
    private_mb: float
    files: int
    threads: int
    processes: int


def look(pid: int, folder: Path) -> Look | None:
    """The run with its children; None where it has not begun, or has ended."""
    import psutil

    try:
        [status] = folder.glob("runs/run_*/status.json")
        step = json.loads(status.read_text()).get("step") or 0
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        private = sum(process.memory_full_info().uss for process in family)
        files, threads = sum(p.num_fds() for p in family), sum(p.num_threads() for p in family)
        return Look(step, private / 1e6, files, threads, len(family))
    except (ValueError, psutil.Error):
        return None


def slope(looks: list[Look]) -> float:
    """MB per 1000 steps, by least squares."""
    line = statistics.linear_regression([one.step for one in looks], [one.private_mb for one in looks])
    return 1000 * line.slope


def soak(steps: int, every_s: float) -> None:
    header(f"soak: {steps} steps of the tiny model, one worker")
    with tempfile.TemporaryDirectory() as name:
        folder, looks = Path(name), list[Look]()
        arguments = [sys.executable, "-m", "grpo_exp", *RUN, f"trainer.max_steps={steps}"]
        start = time.perf_counter()
        run = subprocess.Popen(arguments, cwd=folder, env=environment(1), stdout=subprocess.DEVNULL)
        while run.poll() is None:
            found = look(run.pid, folder)
            if found is not None and found.step > (looks[-1].step if looks else 0):
                looks.append(found)
            time.sleep(every_s)
        if run.returncode:
            print(f"  failed: exit code {run.returncode}")
            sys.exit(1)
        took = time.perf_counter() - start
        rows = len(next(folder.glob("runs/run_*/metrics.jsonl")).read_text().splitlines())
        answers = [timed(folder, "status", "runs"), timed(folder, "compare", "runs")]
    warm = [one for one in looks if one.step >= steps // 10]
    for one in [*warm[:: max(1, len(warm) // 8)], warm[-1]]:
        print(f"  step {one.step:6}: {one.private_mb:.1f} MB, {one.files} files, {one.threads} threads")
    print(
        f"  {steps / took:.0f} steps/s; {rows} rows; status answers in {answers[0]:.2f} s, compare in {answers[1]:.2f} s"
    )
    steady = [one for one in warm if one.processes == max(w.processes for w in warm)]
    for what in ("files", "threads"):
        counts = [getattr(one, what) for one in steady]
        third = max(1, len(counts) // 3)
        verdict(
            f"{what}, last third minus first", max(counts[-third:]) - max(counts[:third]), 0, at_most=True, digits=0
        )
    verdict("MB per 1000 steps", slope(steady[len(steady) // 2 :]), 1, at_most=True)


def timed(folder: Path, *words: str) -> float:
    start = time.perf_counter()
    arguments = [sys.executable, "-m", "grpo_exp", *words]
    subprocess.run(arguments, cwd=folder, env=environment(1), stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    soak(options.steps // (10 if options.quick else 1), every_s=0.5)


if __name__ == "__main__":
    main()
