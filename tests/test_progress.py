"""What is shown of a run while it goes on: a live bar in a terminal, two lines elsewhere."""

import subprocess
import sys
from pathlib import Path

from commands import in_a_terminal

PROGRESS = """
import sys
from pathlib import Path
from grpo_exp.callbacks import TrainState
from grpo_exp.progress import ConsoleProgress
progress = ConsoleProgress(Path("/runs/one_[01]"))
state = TrainState(max_steps=3)
try:
    progress.on_train_begin(None, state, None)
    for state.global_step in range(1, 4):
        progress.on_log(None, state, None, logs={"reward/mean": state.global_step / 4, "eval/accuracy": None})
        if "fail" in sys.argv:
            raise SystemExit("it failed")
    progress.on_train_end(None, state, None)
finally:
    progress.close()
"""


def test_elsewhere_than_in_a_terminal_a_run_says_two_lines(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "run folder: /runs/one_[01]\n3 steps: reward/mean 0.75\n"


def test_in_a_terminal_there_is_a_live_bar_and_then_the_last_line(tmp_path: Path) -> None:
    code, shown = in_a_terminal([sys.executable, "-c", PROGRESS], tmp_path)
    assert code == 0
    assert "run folder: /runs/one_[01]" in shown
    assert "3/3" in shown
    assert "reward 0.75" in shown
    assert shown.rstrip().endswith("3 steps: reward/mean 0.75")


def test_a_failure_gives_the_terminal_back(tmp_path: Path) -> None:
    code, shown = in_a_terminal([sys.executable, "-c", PROGRESS, "fail"], tmp_path)
    assert code == 1
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor was hidden, and is shown again
    assert shown.rstrip().endswith("it failed")
