"""``grpo-exp status``: arms × seeds, from folders alone; and ``cancel`` where there is no Slurm."""

import json
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from commands import command, wait_for
from run_folders import write_run

from grpo_exp import folder
from grpo_exp.folder import SILENCE_S
from grpo_exp.launch.status import look
from grpo_exp.report.load import RunState, read_run


def sweep(root: Path) -> Path:
    write_run(root, precision="fp32", seed=0)
    path = write_run(root, precision="fp32", seed=1, state="failed", reason="ValueError: too bad", num_steps=7)
    (path / "slurm.json").write_text(json.dumps({"job": "12_1", "submitted": "", "script": "", "ended": None}))
    write_run(root, precision="bf16", seed=0, state="created", num_steps=0, rows=[])
    fresh = {"host": "node7", "heartbeat": datetime.now(UTC).isoformat(), "max_steps": 40, "step": 20}
    write_run(root, precision="bf16", seed=1, state="running", status=fresh)
    return root


def test_status_shows_arms_and_seeds_on_any_machine(tmp_path: Path) -> None:
    ended = command("status", "sweep", cwd=sweep(tmp_path / "sweep").parent, PATH="/nowhere", COLUMNS="160")
    assert ended.code == 0, ended.err
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert lines[0] == "4 runs: 1 created, 1 running, 1 done, 1 failed"
    assert lines[2] == "arm seed 0 seed 1"
    assert lines[3].startswith("precision=bf16 created 0 running 20/40 ")
    assert lines[4].startswith("precision=fp32 done 20/20 ")
    assert "failed 7/7 " in lines[4]
    assert "12_1 ValueError: too bad sweep/precision=fp32-seed=1" in lines


def test_a_running_run_has_a_time_left(tmp_path: Path) -> None:
    rows = [{"step": step, "time": 1000.0 + 30 * step, "reward/mean": step / 10} for step in range(5)]
    here = {"host": "node7", "heartbeat": datetime.now(UTC).isoformat(), "max_steps": 10, "step": 4}
    write_run(tmp_path, state="running", rows=rows, status=here)
    [line] = look([tmp_path])
    assert (line.state, line.step, line.reward, line.eta) == ("running", "4/10", "0.400", "3 min")


def test_a_host_that_went_silent_took_its_run_along(tmp_path: Path) -> None:
    then = datetime.now(UTC) - timedelta(seconds=2 * SILENCE_S)
    path = write_run(tmp_path, state="running", status={"host": "node7", "heartbeat": then.isoformat()})
    run = read_run(path)
    assert run.state is RunState.crashed
    assert run.reason == "no heartbeat from node7 for 6 min"


def test_a_run_shows_signs_of_life_during_a_long_step_and_none_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "BEAT_S", 0.02)
    run = folder.RunFolder(tmp_path / "run")
    run.begin(max_steps=3, after_step=None)
    file = run.path / "status.json"
    before = file.stat().st_mtime_ns
    wait_for(lambda: file.stat().st_mtime_ns > before, 10)
    run.end(folder.State.done, 0)
    run.close()
    before = file.stat().st_mtime_ns
    time.sleep(0.1)
    assert file.stat().st_mtime_ns == before
    assert json.loads(file.read_text())["state"] == "done"


def test_status_can_be_read_by_programs_and_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom grpo_exp.cli import dispatch\n"
        f"assert dispatch(['status', '--json', {str(sweep(tmp_path / 'sweep'))!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'wandb', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {line["state"] for line in json.loads(done.stdout)} == {"created", "running", "done", "failed"}


@pytest.mark.parametrize("word", ["status", "cancel"])
def test_a_folder_without_runs_or_a_machine_without_slurm_is_said_in_a_line(tmp_path: Path, word: str) -> None:
    ended = command(word, ".", cwd=tmp_path, PATH="/nowhere")
    assert ended.code == 2
    said = {
        "status": "error: PATH='.': no run in it (a run folder has config.yaml and status.json)\n",
        "cancel": "error: cancel='.': squeue does not answer here: run this where Slurm is\n",
    }
    assert ended.err == said[word]
