"""How long a step takes: a few real ones, in a temporary folder."""

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from omegaconf import OmegaConf

from ..config.compose import Composed
from ..errors import RunFailed
from ..report.load import find_runs
from ..report.metrics import number

STEPS = 6  # the first ones also compile, allocate and fill the buffer: the median of the last half counts


def seconds_per_step(job: Composed) -> float:
    """The median wall time of a step.

    Raises:
        RunFailed: the steps do not end well; the message has the reason.
    """
    from ..launch.local import run_quietly

    with tempfile.TemporaryDirectory(prefix="grpo-exp-plan-") as folder:
        config = job.config.copy()
        for key, value in {
            "runs_dir": folder, "tracker.name": "none", "trainer.max_steps": STEPS, "trainer.eval_every": 0,
            "trainer.save_every": 0, "probe.every": 0, "task.num_eval": 1,
        }.items():  # fmt: skip
            OmegaConf.update(config, key, value)
        run_quietly(replace(job, config=config))
        [run] = find_runs([Path(folder)])
        times = [seconds for row in run.metrics.rows[1:] if (seconds := number(row.get("perf/step_s"))) is not None]
        if not run.is_done or not times:
            raise RunFailed(f"calibration: {run.reason or run.state.value}")
        return median(times[-STEPS // 2 :])
