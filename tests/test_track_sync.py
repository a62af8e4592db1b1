"""A sweep in wandb: what it wrote offline, and what a server is sent by ``grpo-exp sync``; wandb's own client, no account."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import Command, Ended, command, runs, step, wait_for
from small_runs import metrics
from test_sweep_endings import JSONL, write_task
from wandb_file import segments
from wandb_server import KEY, Received, wandb_server

from grpo_exp.track.sync import sync_run

SMALL = ("debug=smoke", "rollout=lockstep", "trainer.prompts_per_step=4", "algo.group_size=2", "trainer.max_steps=2")
SECRET = "hf_SECRET"  # on the command line, so it is in every run folder


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, the middle one failing."""
    folder = tmp_path_factory.mktemp("sweep")
    write_task(folder)
    arms = "task.reward=rewards.py:good,rewards.py:bad,examples_good.py:good"
    (folder / "examples_good.py").write_text((folder / "rewards.py").read_text())
    done = command(
        "-m", *SMALL, *JSONL, arms, "tracker=wandb", "tracker.details_every=2", f"+model.init_kwargs.token={SECRET}",
        cwd=folder, **without_account(folder)
    )  # fmt: skip
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
        assert received.files[name].keys() >= {"manifest.json", "status.json", "metrics.jsonl"}
        assert SECRET in (path / "manifest.json").read_text()
    assert SECRET not in repr(received)


def test_a_run_that_goes_on_is_uploaded_when_it_has_ended(sweep: Path) -> None:
    """wandb would take what there is for the whole run and mark it as uploaded."""
    path = next(iter(runs(sweep).values()))
    for mark in path.glob("wandb/*/*.synced"):
        mark.unlink()
    ended = (path / "status.json").read_text()
    with wandb_server() as (url, received):
        going_on = json.loads(ended) | {"state": "running", "pid": os.getpid()}
        (path / "status.json").write_text(json.dumps(going_on))
        early = sync(path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        assert (early.code, early.out, received.runs) == (1, "1 still running\n", {})
        assert early.err == f"{path.name}: still running, to be uploaded when it has ended\n"
        (path / "status.json").write_text(ended)
        assert sync(path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY).out.endswith("1 uploaded\n")


def processes_of(url: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("WANDB_BASE_URL") == url:
                found.append(process.pid)
    return found


def test_a_server_that_does_not_answer_ends_the_upload_of_a_run_and_leaves_no_process(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(iter(runs(sweep).values()))
    for mark in path.glob("wandb/*/*.synced"):
        mark.unlink()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        account = without_account(sweep, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        for name, value in account.items():
            monkeypatch.setenv(name, value)
        assert sync_run(path, limit_s=3.0) == "failed"
    assert f"{path.name}: failed, not done within 3 s" in capsys.readouterr().err

    wait_for(lambda: not processes_of(url), 10.0)


def test_runs_in_wandb_compare_as_their_folders_do(sweep: Path, tmp_path: Path) -> None:
    """Also where the folders were somewhere else when they were uploaded."""
    for mark in sweep.glob("*/wandb/*/*.synced"):
        mark.unlink()
    with wandb_server() as (url, received):
        account = without_account(tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        moved = sweep.rename(tmp_path / "moved")
        assert sync(moved, WANDB_BASE_URL=url, WANDB_API_KEY=KEY).code == 0
        moved.rename(sweep)
        received.runs["other"] = {"project": "grpo_exp", "config": "{}", "groupName": "runs"}  # of another program
        done = command("compare", "--wandb", "team/grpo_exp", "--json", cwd=tmp_path, **account)
        shown = command("compare", "--wandb", "team/grpo_exp", "--group", "runs", cwd=tmp_path, **account)
        html = ("--html", "report.html", "--artifact", "team/reports")
        page = command("compare", "--wandb", "team/grpo_exp", *html, cwd=tmp_path, **account)
        of_other = command("compare", "--wandb", "team/grpo_exp", "--group", "no", cwd=tmp_path, **account)
        nothing = command("compare", "--wandb", "team/nothing", cwd=tmp_path, **account)
    assert done.code == 0, done.err
    own = json.loads(command("compare", "runs", "--json", cwd=sweep.parent).out)
    found = json.loads(done.out)
    names = {
        run["name"]: (run.pop("path"), other.pop("path")) for run, other in zip(found["runs"], own["runs"], strict=True)
    }
    assert all(url in address and path.endswith(name) for name, (address, path) in names.items())
    assert found == own
    assert (shown.code, page.code) == (0, 0)
    assert "3 runs: 2 done, 1 failed" in shown.out
    assert "<html" in (tmp_path / "report.html").read_text()
    assert received.artifacts["report/report-report"]["report.html"] == (tmp_path / "report.html").read_bytes()
    assert "report/report-report" in received.committed
    assert (of_other.code, nothing.code) == (2, 2)
    assert "no run of the group no" in of_other.err
    assert "Could not find project nothing" in nothing.err
    assert len(nothing.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (("--wandb", "a/b/c"), {}, 2, "ENTITY/PROJECT"),
        (("--wandb", "team/lab"), {}, 2, "an API key"),
        (("--wandb", "team/lab", "runs"), {}, 2, "run folders, or --wandb"),
        ((), {}, 2, "run folders, or --wandb"),
        (("runs", "--group", "x"), {}, 2, "with --wandb"),
        (("runs", "--artifact", "team/lab"), {}, 2, "with --html"),
        (("--wandb", "team/lab"), {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}, 1, "cannot be reached"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_from_wandb_is_said_in_a_line(
    tmp_path: Path, arguments: tuple[str, ...], environment: dict[str, str], code: int, words: str
) -> None:
    done = command("compare", *arguments, cwd=tmp_path, **without_account(tmp_path, **environment))
    assert (done.code, len(done.err.splitlines())) == (code, 1), done.err
    assert words in done.err


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_online_run_is_sent_as_it_goes_and_a_server_that_dies_does_not_stop_it(tmp_path: Path, dies: bool) -> None:
    """F2. One that dies has made the run and takes no row."""
    write_task(tmp_path)
    with wandb_server(dies) as (url, received):
        account = without_account(tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        done = command(
            *SMALL,
            *JSONL,
            "task.reward=rewards.py:good",
            "tracker=wandb",
            "tracker.mode=online",
            f"tracker.log_checkpoint={not dies}",
            cwd=tmp_path,
            **account,
        )
    assert done.code == 0, done.err
    [path] = runs(tmp_path / "runs").values()
    name = (path / "wandb_id").read_text().strip()
    assert [row["step"] for row in metrics(path)] == [0, 1, 2]
    assert received.is_gone == dies
    assert list(received.runs) == [name]
    if dies:
        assert received.rows == {}
        assert "training goes on" in done.err or "left behind" in done.err
    else:
        assert received.exit_codes == {name: 0}
        uploaded = received.artifacts[f"model/checkpoint-{name}"]
        [checkpoint] = (path / "checkpoints").iterdir()
        assert uploaded["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
        assert "optimizer.safetensors" not in uploaded
        assert f"model/checkpoint-{name}" in received.committed
        assert [row["step"] for row in received.rows[name]] == [0, 1, 2]
        assert received.files[name]["metrics.jsonl"] == (path / "metrics.jsonl").read_bytes()
        assert json.loads(received.files[name]["status.json"])["state"] == "done"


def test_an_online_run_that_is_stopped_and_resumed_is_one_run_with_each_step_once(tmp_path: Path) -> None:
    write_task(tmp_path)
    long = ("trainer.max_steps=60", "trainer.eval_every=0", "tracker=wandb", "tracker.mode=online")
    with wandb_server() as (url, received):
        account = without_account(tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
        first = Command(*SMALL, *JSONL, "task.reward=rewards.py:good", *long, cwd=tmp_path, **account)
        wait_for(lambda: any(step(path) > 3 for path in (tmp_path / "runs").glob("run_*")))
        first.process.terminate()
        assert first.end().code == 143
        [path] = runs(tmp_path / "runs").values()
        resumed = command("resume", str(path), cwd=tmp_path, **account)
    assert resumed.code == 0, resumed.err
    [name] = received.runs
    assert name == (path / "wandb_id").read_text().strip()
    assert [row["step"] for row in received.rows[name]] == list(range(61))
    assert received.exit_codes[name] == 0
    assert received.files[name]["metrics.jsonl"] == (path / "metrics.jsonl").read_bytes()


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
