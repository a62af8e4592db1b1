"""Seconds from starting ``grpo-exp`` to its first optimizer step in metrics.jsonl. Target: at most 30 s on two cores.

The demo's configuration with one generator worker, evaluation before training included.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import header, spread, verdict

TIMEOUT_S = 300.0


def first_step_s(runs_dir: Path, precision: str) -> tuple[float, float]:
    """Seconds until the row of step 0 (the evaluation) and of step 1 can be read."""
    command = [
        sys.executable,
        "-c",
        "from grpo_exp.cli import main; main()",
        f"precision={precision}",
        f"runs_dir={runs_dir}",
    ]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seen: dict[int, float] = {}
    try:
        while 1 not in seen:
            elapsed = time.perf_counter() - start
            for path in runs_dir.glob("*/metrics.jsonl"):
                for line in path.read_text().splitlines():
                    seen.setdefault(json.loads(line)["step"], elapsed)
            if process.poll() is not None or elapsed > TIMEOUT_S:
                error = process.stderr.read() if process.poll() is not None and process.stderr else "it was too slow"
                raise RuntimeError(f"no optimizer step after {elapsed:.0f} s: {error}")
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    return seen.get(0, seen[1]), seen[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="once")
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    header(f"first_step: from starting grpo-exp precision={options.precision} to the first optimizer step")
    zero, one = [], []
    for _ in range(1 if options.quick else 5):
        with tempfile.TemporaryDirectory() as folder:
            evaluated, stepped = first_step_s(Path(folder) / "runs", options.precision)
        zero.append(evaluated)
        one.append(stepped)
    print(f"  first evaluation after {spread(zero, ' s')}, first step after {spread(one, ' s')}")
    verdict("seconds to the first step", statistics.median(one), 30.0, at_most=True, digits=1)
    print(f"  load at the end: {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
