"""Recordings made by hand: no run behind them."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from steps import groups

from grpo_exp.config.replays import FORMAT, vocabulary_of
from grpo_exp.recording import Recording

ABOUT = {
    "format": FORMAT,
    "model": "asset:tiny",
    "vocabulary": None,
    "seed": 0,
    "rollout.temperature": 1.0,
    "task.max_completion_tokens": 256,
    "trainer.prompts_per_step": 4,
    "algo.group_size": 4,
}


def write_recording(run: Path, num_steps: int = 3, after_step: int | None = None, **about: Any) -> Path:
    """Steps of four groups of four, step n with the serials 4 (n - 1) to 4 n - 1; returns the run folder."""
    run.mkdir(parents=True, exist_ok=True)
    known = {"vocabulary_file": vocabulary_of("asset:tiny")} | {key.replace("__", "."): v for key, v in about.items()}
    recording = Recording(run, ABOUT | known, after_step)
    for step in range((after_step or 0) + 1, num_steps + 1):
        found = groups(seed=step)
        for group in found:
            group.serial += 4 * (step - 1)
        recording.write(step, step - 1, found, [7 * group.serial for group in found])
    recording.close()
    return run


@cache
def long_recording() -> Path:
    """One that goes with every default; it is gone when the session ends."""
    folder = Path(tempfile.mkdtemp(prefix="grpo_exp_recording_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_recording(folder, 150, trainer__prompts_per_step=32, algo__group_size=8)
