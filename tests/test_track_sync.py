"""A sweep in wandb: what it wrote offline, and what a server is sent by ``grpo-exp sync``; wandb's own client, no account."""

import os
from pathlib import Path

import pytest
from commands import Ended, command, runs
from test_sweep_endings import JSONL, write_task
from wandb_file import segments
from wandb_server import KEY, Received, wandb_server

SMALL = ("debug=smoke", "rollout=lockstep", "trainer.prompts_per_step=4", "algo.group_size=2", "trainer.max_steps=2")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, the middle one failing."""
    folder = tmp_path_factory.mktemp("sweep")
    write_task(folder)
    arms = "task.reward=rewards.py:good,rewards.py:bad,examples_good.py:good"
    (folder / "examples_good.py").write_text((folder / "rewards.py").read_text())
    done = command(
        "-m", *SMALL, *JSONL, arms, "tracker=wandb", "tracker.details_every=2", cwd=folder, **without_account(folder)
    )
    assert done.code == 1, done.err
    return folder / "runs"


def without_account(folder: Path, **more: str) -> dict[str, str]:
    clean = {name: "" for name in os.environ if name.startswith("WANDB_")}
    return clean | {"NETRC": str(folder / "no-netrc"), "WANDB_CONFIG_DIR": str(folder / "no-config")} | more


def sync(path: Path, **environment: str) -> Ended:
    return command("sync", str(path), cwd=path.parent, **without_account(path.parent, **environment))


def test_a_sweep_whose_middle_arm_fails_is_three_runs_with_their_own_configs_and_exit_codes(sweep: Path) -> None:
    """F6: and none is shown as finished that is not."""
    found = {name: segments(path) for name, path in runs(sweep).items()}
    assert [len(parts) for parts in found.values()] == [1, 1, 1]
    rewards = {Path(parts[0].config["task"]["reward"]).name: parts[0].exit_code for parts in found.values()}
    assert rewards == {"rewards.py:good": 0, "rewards.py:bad": 1, "examples_good.py:good": 0}
    assert len({parts[0].run_id for parts in found.values()}) == 3
    assert len({parts[0].group for parts in found.values()}) == 1
    for parts in found.values():
        if parts[0].exit_code == 0:
            assert parts[0].summary["final/reward/mean"] == 0.5
            assert parts[0].summary["observed/compute"] == "fp32"
            assert {"step", "samples", "tokens", "wall_s"} <= parts[0].metrics.keys()
            rows = [row for row in parts[0].history if row["step"]]
            assert [row.get("completions/nrows") for row in rows] == [None, 4]
            tokens = rows[1]["tokens"] - rows[0]["tokens"]
            assert sum(rows[1]["log_ratio/values"]) == tokens


def test_a_sweep_is_uploaded_once_and_a_server_that_is_gone_is_tried_again(sweep: Path) -> None:
    """F5: what was not uploaded is said, marked as nothing else, and goes with the next call."""
    gone = sync(sweep, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY=KEY)
    assert gone.code == 1
    assert "http://127.0.0.1:9 cannot be reached" in gone.err
    with wandb_server() as (url, received):
        first = sync(sweep, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        again = sync(sweep, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert (first.code, first.out.splitlines()[-1]) == (0, "3 uploaded"), first.err
    assert (again.code, again.out.splitlines()[-1]) == (0, "3 nothing to upload")
    check_received(sweep, received)


def check_received(sweep: Path, received: Received) -> None:
    for path in runs(sweep).values():
        name = (path / "wandb_id").read_text().strip()
        kept = segments(path)[0]
        assert received.exit_codes[name] == kept.exit_code
        assert [row["step"] for row in received.rows.get(name, [])] == [row["step"] for row in kept.history]
        assert received.runs[name]["displayName"] == path.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "run folders, or folders of them"),
        (("--all",), "run folders, or folders of them"),
        (("not_there",), "a folder that is there"),
        (("runs",), "no API key"),
    ],
)
def test_what_cannot_be_uploaded_is_refused_in_a_line(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    ended = command("sync", *arguments, cwd=tmp_path, **without_account(tmp_path))
    assert ended.code == 2
    assert words in ended.err
    assert len(ended.err.splitlines()) == 1
