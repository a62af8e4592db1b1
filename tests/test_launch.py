"""Planning a sweep: which jobs it has, what is done about runs that exist, and what is said meanwhile."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from commands import PLUGINS, command, runs
from rich.console import Console
from run_folders import write_run
from small_runs import status

from grpo_exp.config.compose import compose
from grpo_exp.errors import ConfigError
from grpo_exp.folder import RunFolder
from grpo_exp.launch import local
from grpo_exp.launch.board import Board
from grpo_exp.launch.ending import print_end, reason
from grpo_exp.launch.prepare import Action, Planned, check_all, decide, prepare_all


@pytest.mark.parametrize(
    ("line", "jobs"),
    [
        (
            "+sweeps=precision",
            [f"precision={p} seed={s} +sweeps=precision" for p in ("fp32", "bf16", "fp16") for s in range(3)]
            + [f"precision=fp32 seed={s} +sweeps=precision repeat=1" for s in range(3)],
        ),
        ("-m +sweeps=precision seed=7 precision=BFloat16", ["precision=bf16 seed=7 +sweeps=precision"]),
        (
            "-m +sweeps=split seed=0 precision=fp32,half",
            [f"precision={p} seed=0 +sweeps=split" for p in ("fp32", "fp16")],
        ),
        ("seed=0,1 -m tracker.tags=[a,b]", [f"seed={seed} tracker.tags=[a,b]" for seed in (0, 1)]),
        ("-m +experiment=sort debug=smoke", ["experiment=sort debug=smoke"]),
    ],
)
def test_a_sweep_has_the_jobs_that_its_file_and_the_command_line_say(
    line: str, jobs: list[str], tmp_path: Path
) -> None:
    """E9, E12: the command line wins over a named sweep, in factors too; a list is one value."""
    ended = command(*line.split(), "hydra/launcher=listing", cwd=tmp_path, PYTHONPATH=PLUGINS)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == jobs
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("state", "retry", "action", "note"),
    [
        ("created", False, Action.start, "new"),
        ("done", False, Action.skip, "done already"),
        ("done", True, Action.skip, "done already"),
        ("failed", False, Action.skip, "failed before"),
        ("failed", True, Action.resume, "failed before"),
        ("preempted", False, Action.resume, "was preempted"),
        ("running", False, Action.resume, "was crashed"),  # its process is gone
    ],
)
def test_a_run_that_exists_is_skipped_or_goes_on(
    state: str, retry: bool, action: Action, note: str, tmp_path: Path
) -> None:
    """F8: a run whose status says running but whose process is gone is resumed."""
    path = write_run(tmp_path, state=state, status={"pid": 2**22 + 1} if state == "running" else {})
    decided = decide(Planned(path, Action.start, "", []), retry)
    assert (decided.action, decided.note) == (action, note)


def test_a_run_that_another_process_holds_is_waited_for(tmp_path: Path) -> None:
    path = write_run(tmp_path, state="created")
    folder = RunFolder(path)
    folder.lock()
    assert decide(Planned(path, Action.start, "", []), False).action is Action.wait
    folder.close()
    assert decide(Planned(path, Action.start, "", []), False).action is Action.start


def test_planning_twice_finds_the_same_folders(tmp_path: Path) -> None:
    jobs = [compose([f"seed={seed}", f"runs_dir={tmp_path}"]) for seed in (0, 1, 0)]
    planned = prepare_all(jobs, check_all(jobs), retry_failed=False)
    assert len(planned) == 2, "the same configuration twice is one run"
    again = prepare_all(jobs, check_all(jobs), retry_failed=False)
    assert [plan.path for plan in again] == [plan.path for plan in planned]
    assert len(runs(tmp_path)) == 2


def test_a_folder_that_was_only_half_made_is_made_again(tmp_path: Path) -> None:
    jobs = [compose([f"runs_dir={tmp_path}"])]
    [planned] = prepare_all(jobs, check_all(jobs), retry_failed=False)
    (planned.path / "status.json").unlink()
    (planned.path / "config.yaml").write_text("")
    [again] = prepare_all(jobs, check_all(jobs), retry_failed=False)
    assert (again.path, again.action) == (planned.path, Action.start)
    assert yaml.safe_load((again.path / "config.yaml").read_text())["seed"] == 0


def test_the_same_run_prepared_by_many_processes_at_once_gets_one_folder(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom grpo_exp.config.compose import compose\n"
        "from grpo_exp.launch.prepare import check_all, prepare_all\n"
        "jobs = [compose([f'seed={seed}', f'runs_dir={sys.argv[1]}']) for seed in range(3)]\n"
        "jobs = jobs[int(sys.argv[2]) :]\n"
        "prepare_all(jobs, check_all(jobs), False)\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(n % 3)]) for n in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    hashes = [path.name.rpartition("_")[2] for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert len(hashes) == len(set(hashes)) == 3


def test_nothing_is_started_while_one_job_of_a_sweep_is_wrong(tmp_path: Path) -> None:
    jobs = [compose([f"algo.group_size={size}", f"runs_dir={tmp_path}/runs"]) for size in (4, 1, 0)]
    with pytest.raises(ConfigError) as caught:
        local.launch(jobs, 1, "none")
    assert str(caught.value).splitlines() == [
        f"algo.group_size={size}: allowed: 2 or more (an advantage compares completions of one prompt)"
        for size in (1, 0)
    ]
    assert list(tmp_path.iterdir()) == []


def board(tmp_path: Path, terminal: bool) -> str:
    """What is shown of a sweep of four: one was done before, one runs, one is killed, one waits."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=80, highlight=False, color_system=None)
    paths = [
        write_run(tmp_path, f"[{name}]", state=name, num_steps=3) for name in ("done", "running", "failed", "created")
    ]
    notes = (
        (Action.skip, "done already"),
        (Action.resume, "was preempted"),
        (Action.start, "new"),
        (Action.wait, "elsewhere"),
    )
    planned = [Planned(path, action, note, []) for path, (action, note) in zip(paths, notes, strict=True)]
    with Board(planned, console) as view:
        view.update({plan.path: plan for plan in planned[1:3]}, {})
        view.update({planned[1].path: planned[1]}, {paths[0]: 0, paths[2]: -9})
        view.update({}, {paths[0]: 0, paths[1]: 0, paths[2]: -9})
    return shown.getvalue()


def test_elsewhere_than_in_a_terminal_a_sweep_says_a_line_for_each_start_and_end(tmp_path: Path) -> None:
    assert board(tmp_path, terminal=False).splitlines() == [
        "[done]: done already",
        "[created]: elsewhere, its end is waited for",
        "[running]: goes on (was preempted)",
        "[failed]: started",
        "[failed]: ended with exit code -9",
        "[running]: done",
    ]


def test_in_a_terminal_a_sweep_is_a_live_table(tmp_path: Path) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", board(tmp_path, terminal=True))
    assert re.search(r"run +state +step", shown)
    assert re.search(r"\[running\] +running +3/3", shown)
    assert re.search(r"\[failed\] +failed +3/3", shown)
    assert re.search(r"\[created\] +waiting", shown)


def test_a_death_is_explained_by_its_signal(tmp_path: Path) -> None:
    path = write_run(tmp_path, state="running", num_steps=7)
    assert reason(path, -signal.SIGKILL) == "killed by SIGKILL (out of memory?) at step 7"
    assert reason(path, -signal.SIGSEGV) == "killed by SIGSEGV at step 7"
    assert reason(path, 1) == "exit code 1"
    assert reason(write_run(tmp_path, "other", state="failed", reason="too bad\nand more"), 1) == "too bad"


def test_a_second_ctrl_c_does_not_wait_for_checkpoints(tmp_path: Path) -> None:
    """A run that does not stop when asked would else be given its time; and the handlers are put back."""
    before = signal.getsignal(signal.SIGINT)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with local.Interruptible() as interrupted:
            signal.raise_signal(signal.SIGINT)
            again = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
            again.start()
            start = time.monotonic()
            local._stop([local.Child(Planned(tmp_path, Action.start, "", []), process)], interrupted)
            again.join()
    assert time.monotonic() - start < local.GRACE_S / 2
    assert process.returncode == -signal.SIGKILL
    assert (interrupted.number, interrupted.count) == (signal.SIGINT, 2)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_run_that_is_stopped_before_it_goes_on_keeps_what_its_status_says(tmp_path: Path) -> None:
    """Here by a setting that a later version no longer knows: the step that was reached is still known."""
    path = write_run(tmp_path, state="preempted", num_steps=7, config={"trainer.unheard_of": 1})
    done = subprocess.run([sys.executable, "-m", "grpo_exp.run", str(path), "--resume"], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    one = status(path)
    assert (one["state"], one["step"], one["max_steps"], one["exit_code"]) == ("failed", 7, 7, 2)


def test_a_run_process_whose_parent_is_gone_already_does_not_start(tmp_path: Path) -> None:
    path = write_run(tmp_path, state="created")
    done = subprocess.run([sys.executable, "-m", "grpo_exp.run", str(path), "--tied", "1"], capture_output=True)
    assert done.returncode == 128 + signal.SIGTERM
    assert status(path)["state"] == "created"


def test_a_narrowed_sweep_without_its_baseline_is_compared_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And it is said how the differences come to be those that were wanted."""
    arms = ("bf16", "fp16")
    paths = [write_run(tmp_path, precision=p, seed=s, baseline="precision=fp32") for p in arms for s in (0, 1)]
    shown = io.StringIO()
    ended = [(Planned(path, Action.start, "new", []), 0) for path in paths]
    sweep = {"baseline": "precision=fp32", "metric": "eval/nothing"}
    print_end(ended, sweep, Console(file=shown))
    assert shown.getvalue().splitlines() == [
        "no run has eval/nothing: compared by reward/mean",
        "no run of this sweep is its baseline precision=fp32: add it, or name another one with"
        " \"sweep.baseline='FACTOR=LEVEL'\"",
    ]
    assert "reward/mean at the end, minus the baseline precision=bf16" in capsys.readouterr().out
