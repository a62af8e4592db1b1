"""Start-up of the command line: ``grpo-exp --cfg job`` against a bare Hydra app with the same groups and schema.

Target: at most 1.5 times. Both are started in turns; CPU-seconds (user and system) of each process and its children.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from _common import environment, header, interleaved, ratio, spread, verdict

APP = """
import hydra
from hydra.core.config_store import ConfigStore
from schema import Config

ConfigStore.instance().store(name="schema", node=Config)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    pass


main()
"""


def child_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def start(command: list[str], folder: Path) -> Callable[[], float]:
    def run() -> float:
        before = child_cpu_s()
        subprocess.run(command, cwd=folder, env=environment(1), check=True, capture_output=True)
        return child_cpu_s() - before

    return run


def bare_app(folder: Path) -> list[str]:
    """Write an app with our groups, schema and defaults into a folder; returns its command.

    The launcher is Hydra's own, since ours is found only where grpo_exp is imported.
    """
    from grpo_exp.config import schema
    from grpo_exp.config.compose import CONF_DIR

    shutil.copytree(CONF_DIR, folder / "conf")
    shutil.copy(Path(schema.__file__), folder / "schema.py")
    config = folder / "conf" / "config.yaml"
    config.write_text(config.read_text().replace("hydra/launcher: local", "hydra/launcher: basic"))
    (folder / "app.py").write_text(APP)
    return [sys.executable, "app.py", "--cfg", "job"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    header("cli_startup: grpo-exp --cfg job against a bare Hydra app with the same groups")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = [os.path.join(sysconfig.get_path("scripts"), "grpo-exp"), "--cfg", "job"]
        if not os.path.exists(ours[0]):
            ours[:1] = [sys.executable, "-m", "grpo_exp.cli"]
        commands = {"grpo-exp": start(ours, folder), "bare Hydra": start(bare_app(folder), folder)}
        interleaved(commands, 1)  # byte code is compiled, files are cached
        seconds = interleaved(commands, 5 if options.quick else 20)
    for label, found in seconds.items():
        print(f"  {label:10} {spread(found, ' CPU-s')}")
    verdict("start-up, grpo-exp : bare Hydra", ratio(seconds["grpo-exp"], seconds["bare Hydra"]), 1.5, at_most=True)


if __name__ == "__main__":
    main()
