"""As submitit does: the task function goes through a pickle into another process."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict


@dataclass
class Conf:
    _target_: str = "hydra_plugins.grpo_exp_tests.pickling.PicklingLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="pickling", node=Conf)


class PicklingLauncher(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.hydra_context, self.config, self.task_function = hydra_context, config, task_function

    def launch(self, job_overrides, initial_job_idx):
        results = []
        for index, overrides in enumerate(job_overrides):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(index), index
            path = Path(os.environ["ELSEWHERE"]) / f"{index}.pkl"
            state = Singleton.get_state()
            path.write_bytes(cloudpickle.dumps((self.hydra_context, self.task_function, config, state)))
            script = "import sys; from hydra_plugins.grpo_exp_tests.pickling import run; run(sys.argv[1])"
            subprocess.run([sys.executable, "-c", script, str(path)], check=True, cwd=path.parent)
            results.append(JobReturn(status=JobStatus.COMPLETED))
        return results


def run(path):
    context, task_function, config, state = cloudpickle.loads(Path(path).read_bytes())
    setup_globals()
    Singleton.set_state(state)
    result = run_job(
        hydra_context=context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    _ = result.return_value  # raises where the job failed
