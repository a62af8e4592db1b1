"""What is given to ``sbatch``, without a cluster: the golden file holds the text, a dry run writes and submits nothing.

After a wanted change of the script: UPDATE_GOLDEN=1 pytest tests/test_slurm_script.py, then read the diff.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import SMALL, command

from grpo_exp.config.compose import CONF_DIR, PACKAGE
from grpo_exp.launch.freeze_code import code_digest, copy_code
from grpo_exp.launch.sbatch import SlurmOptions, Submission, find_problems, script, time_limit_s

GOLDEN = Path(__file__).parent / "golden"
SUBMISSION = Submission(
    "grpo-exp-precision",
    Path("/scratch/runs/.slurm/0123abcd"),
    Path("/scratch/runs/.slurm/code-0123456789ab"),
    [Path(f"/scratch/runs/seed-{seed}_89abcdef") for seed in range(6)],
)
OPTIONS = {
    "slurm_defaults.sh": SlurmOptions(python="/venv/bin/python"),
    "slurm_all.sh": SlurmOptions(
        n_jobs=4,
        partition="gpu",
        account="lab",
        qos="long",
        time="8:00:00",
        mem="64G",
        cpus=8,
        gpus="a100:1",
        constraint="nvlink",
        exclude="node[1-2]",
        grace_s=300,
        max_requeues=10,
        setup=["module load cuda/12.8", "export NCCL_DEBUG=WARN"],
        container="apptainer exec --nv image.sif",
        python="python3",
        extra=["--mail-type=END,FAIL", "--exclusive"],
    ),
    "slurm_two_ranks.sh": SlurmOptions(python="/venv/bin/python", ranks_per_node=2),
    "slurm_two_nodes.sh": SlurmOptions(
        python="python3", nodes=2, ranks_per_node=4, gpus="h100:4", cpus=16, container="apptainer exec --nv image.sif"
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_script_is_that_of_the_golden_file(name: str) -> None:
    """E15: an option that is not set is not in the script."""
    text = script(OPTIONS[name], SUBMISSION)
    if "UPDATE_GOLDEN" in os.environ:
        (GOLDEN / name).write_text(text)
    assert text == (GOLDEN / name).read_text()
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert find_problems(OPTIONS[name]) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-0", 172800),
        ("1-2:03", 93780),
        ("1-02:03:04", 93784),
        ("UNLIMITED", sys.maxsize),
        ("soon", None),
        ("1:2:3:4", None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


def test_options_that_cannot_be_used_are_named() -> None:
    options = SlurmOptions(n_jobs=0, retry="all", time="1", grace_s=60, poll_s=0, partition="a\nb", max_requeues=-1)
    keys = [problem.key.removeprefix("hydra.launcher.") for problem in find_problems(options)]
    assert keys == ["retry", "n_jobs", "max_requeues", "poll_s", "grace_s", "partition"]
    assert [str(problem) for problem in find_problems(SlurmOptions(time="soon"))] == [
        "hydra.launcher.time='soon': allowed: minutes, H:MM:SS or D-HH:MM:SS"
        " (quote it in a YAML file, where 1:30:00 is a number)"
    ]


@pytest.mark.parametrize(
    ("strategy", "ranks", "key", "allowed"),
    [
        ("single", "hydra.launcher.nodes=2", "hydra.launcher.nodes=2", "allowed: 1"),
        ("single", "hydra.launcher.ranks_per_node=4", "hydra.launcher.ranks_per_node=4", "allowed: 1"),
        ("ddp", "hydra.launcher.nodes=1", "hydra.launcher.ranks_per_node=1", "allowed: 2 or more"),
        ("fsdp2", "hydra.launcher.nodes=0", "hydra.launcher.nodes=0", "allowed: 1 or more"),
    ],
)
def test_ranks_that_are_not_those_of_the_strategy_are_refused(
    tmp_path: Path, strategy: str, ranks: str, key: str, allowed: str
) -> None:
    line = ("-m", *SMALL, "seed=0,1", "probe.every=0", f"distributed={strategy}", "hydra/launcher=slurm", ranks)
    ended = command(*line, "hydra.launcher.dry_run=true", cwd=tmp_path)
    assert ended.code == 2
    assert key in ended.err
    assert allowed in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_script_and_frozen_configurations_and_writes_nothing(tmp_path: Path) -> None:
    line = (
        "-m",
        *SMALL,
        "seed=0,1",
        "hydra/launcher=slurm",
        "hydra.launcher.dry_run=true",
        "hydra.launcher.python=python3",
    )
    ended = command(*line, cwd=tmp_path, PATH="/nowhere")
    assert ended.code == 0, ended.err
    assert list(tmp_path.iterdir()) == []
    text, *configs = ended.out.split("\n# task ")
    head, _, text = text.partition("\n")
    folder = Path(head.removeprefix("# ")).parent
    assert folder.parent == tmp_path / "runs" / ".slurm"
    paths = [Path(config.partition(": ")[2].partition("\n")[0]).parent for config in configs]
    code = folder.parent / f"code-{code_digest()}"
    assert (
        text.strip() == script(SlurmOptions(python="python3"), Submission("grpo-exp-runs", folder, code, paths)).strip()
    )
    assert [yaml.safe_load(config.partition("\n")[2])["seed"] for config in configs] == [0, 1]


def test_where_there_is_no_slurm_it_is_said_before_anything_is_made(tmp_path: Path) -> None:
    ended = command("-m", *SMALL, "seed=0,1", "hydra/launcher=slurm", cwd=tmp_path, PATH="/nowhere")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err == (
        "error: squeue is not on the PATH: run this where Slurm is;"
        " hydra.launcher.dry_run=true shows what would be submitted\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_single_run_refuses_a_launcher_instead_of_running_here(tmp_path: Path) -> None:
    ended = command(*SMALL, "hydra/launcher=slurm", cwd=tmp_path)
    assert ended.code == 2
    assert ended.err == "error: hydra/launcher='slurm': launchers are for sweeps: add -m, also for one run\n"
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_of_a_swept_list_cannot_choose_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "my" / "experiment").mkdir(parents=True)
    for name in ("a", "b"):
        text = f"# @package _global_\ndefaults:\n  - override /hydra/launcher: slurm\nseed: {ord(name)}\n"
        (tmp_path / "my" / "experiment" / f"{name}.yaml").write_text(text)
    ended = command("--config-dir", str(tmp_path / "my"), "-m", *SMALL, "experiment=a,b", cwd=tmp_path)
    assert ended.code == 2
    assert "it chooses a launcher, which a file that is swept cannot do" in ended.err


def test_the_copy_of_the_source_is_what_a_job_imports(tmp_path: Path) -> None:
    copy_code(tmp_path / "code")
    copy_code(tmp_path / "code")  # once is enough
    shown = "import grpo_exp.run, grpo_exp.config.compose as c; print(grpo_exp.__file__); print(c.CONF_DIR)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", shown],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "code")},
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    package = tmp_path / "code" / "grpo_exp"
    assert done.stdout.split() == [str(package / "__init__.py"), str(package / "conf")]
    assert (package / "conf" / "config.yaml").read_bytes() == (CONF_DIR / "config.yaml").read_bytes()
