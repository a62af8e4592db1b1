"""The wandb tracker against the real package: what it logged is read back from the files that wandb wrote."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from wandb_file import Segment, segments
from wandb_server import KEY, wandb_server

from grpo_exp.config.schema import TrackerConfig, TrackerName, WandbMode
from grpo_exp.track import Details, Sample, TrackedRun, Tracker, build, guarded
from grpo_exp.track.sync import sync_run
from grpo_exp.track.wandb_record import mend

OFFLINE = TrackerConfig(name=TrackerName.wandb, project="lab", entity="team", mode=WandbMode.offline, tags=["a", "b"])
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from grpo_exp.config.schema import TrackerConfig, TrackerName, WandbMode
from grpo_exp.track import TrackedRun, guarded
from grpo_exp.track.wandb import WandbTracker
warn = lambda text: print("WARNING", text, flush=True)
def tracker(mode):
    return guarded(WandbTracker(TrackerConfig(name=TrackerName.wandb, mode=mode), warn, init_s=2.0), warn, limit_s=2.0)
def run(**config):
    return TrackedRun(Path(sys.argv[1]), "run", config)
def wait_for_rows_on_disk(count):  # each is named once in the history and once in the summary
    while sum(path.read_bytes().count(b"_step") for path in Path(sys.argv[1]).glob("wandb/*/*.wandb")) < 2 * count:
        time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's wandb account reaches a test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "no-config"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "precision=bf16,seed=0-1a2b"
    folder.mkdir(parents=True)
    return folder


def tracked(run_dir: Path, **config: object) -> TrackedRun:
    return TrackedRun(
        run_dir=run_dir,
        name=run_dir.name,
        config=config,
        sweep="precision",
        factors={"precision": "bf16", "seed": "0"},
        choices={"model": "tiny", "precision": "bf16"},
        tags=["demo"],
    )


def start(run: TrackedRun) -> Tracker:
    tracker = build(OFFLINE, pytest.fail)
    tracker.start(run)
    return tracker


def only(found: list[Segment]) -> Segment:
    assert len(found) == 1
    return found[0]


def script(body: str, run_dir: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Runs ``body`` in a process of its own. Returns its exit code and all that it printed."""
    command = [sys.executable, "-c", SCRIPT + body, str(run_dir), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | environment, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_a_run_in_wandb_is_the_run_of_the_folder(run_dir: Path) -> None:
    """F2, F4, F6, F12: nested config, flat choices, one group per sweep, explicit steps, exit code."""
    tracker = start(tracked(run_dir, precision={"params": "bf16", "loss_scale": {"init": 2.0}}, optim={"lr": 1e-6}))
    tracker.log(0, {"eval/accuracy": 0.25})
    tracker.log(1, {"reward/mean": 0.5, "fp16/scale": None, "tokens": 640})
    tracker.log(2, {"reward/mean": float("nan"), "eval/accuracy": 0.5})
    tracker.finish(3)

    seen = only(segments(run_dir))
    assert (seen.project, seen.entity, seen.name, seen.group) == ("lab", "team", run_dir.name, "precision")
    assert seen.run_id == (run_dir / "wandb_id").read_text().strip()
    assert seen.tags == ["a", "b", "demo"]
    assert seen.exit_code == 3
    assert seen.config["precision"] == {"params": "bf16", "loss_scale": {"init": 2}}
    assert seen.config["optim"] == {"lr": 1e-6}
    flat = {key: value for key, value in seen.config.items() if "/" in key}
    assert flat == {
        "run/name": run_dir.name,
        "run/dir": str(run_dir),
        "choice/model": "tiny",
        "choice/precision": "bf16",
        "factor/precision": "bf16",
        "factor/seed": "0",
    }
    rows = [{key: value for key, value in row.items() if key not in ("_runtime", "_timestamp")} for row in seen.history]
    assert rows[:2] == [
        {"_step": 0, "step": 0, "eval/accuracy": 0.25},
        {"_step": 1, "step": 1, "reward/mean": 0.5, "tokens": 640},
    ]
    assert (rows[2]["step"], np.isnan(rows[2]["reward/mean"])) == (2, True)
    assert seen.metrics == {"step": "", "samples": "", "tokens": "", "wall_s": "", "*": "step"}


def test_completions_and_a_histogram_are_shown_with_the_row_of_their_step(run_dir: Path) -> None:
    tracker = start(tracked(run_dir))
    assert tracker.details_every == 25
    sample = Sample(25, "abc>", "cba", None, 3, True)
    tracker.details(25, Details([sample, replace(sample, reward=1.0)], counts=[1, 2], edges=[-0.5, 0.0, 0.5]))
    tracker.log(25, {"reward/mean": 1.0})
    tracker.log(26, {"reward/mean": 0.5})
    tracker.finish(0)

    seen = only(segments(run_dir))
    shown, after = seen.history
    assert shown["log_ratio/values"] == [1, 2]
    assert shown["log_ratio/bins"] == [-0.5, 0, 0.5]
    assert shown["completions/nrows"] == 2
    table = next(run_dir.glob("wandb/*/files/media/table/*.table.json"))
    content = json.loads(table.read_text())
    assert content["columns"] == ["step", "prompt", "completion", "reward", "num_tokens", "finished"]
    assert content["data"][0] == [25, "abc>", "cba", None, 3, True]
    assert "completions/nrows" not in after


def test_wandb_writes_into_the_run_folder_only(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    start(tracked(run_dir)).finish(0)
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in run_dir.iterdir()} == {"wandb", "wandb_id", "wandb_step"}
    assert capfd.readouterr() == ("", "")


def test_a_run_that_was_killed_in_the_middle_of_a_record_is_uploaded_with_the_attempt_after_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself wandb gives up at the torn end, and uploads no attempt after it, ever."""
    for steps in ((1, 2, 3), (3, 4)):
        tracker = start(tracked(run_dir))
        for step in steps:
            tracker.log(step, {"reward/mean": float(step)})
        tracker.finish(0)
        if steps[0] == 1:
            [record] = run_dir.glob("wandb/offline-run-*/run-*.wandb")
            whole = record.read_bytes()
            record.write_bytes(whole[: whole.rindex(b"_step") + 1])
    with wandb_server() as (url, received):
        monkeypatch.setenv("WANDB_BASE_URL", url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        assert sync_run(run_dir) == "uploaded"
        assert sync_run(run_dir) == "nothing to upload"
    [rows] = received.rows.values()
    assert [row["step"] for row in rows] in ([1, 2, 3, 4], [1, 2, 3, 3, 4])
    assert list(received.exit_codes.values()) == [0]


def test_a_torn_record_is_cut_off_and_nothing_else(run_dir: Path) -> None:
    tracker = start(tracked(run_dir))
    tracker.log(1, {f"reward/{index}": float(index) for index in range(2000)})  # a record of several blocks
    tracker.log(2, {"reward/mean": 1.0})
    tracker.finish(0)
    [path] = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    whole = path.read_bytes()
    assert len(whole) > 2 * 32 * 1024
    assert mend(path) == 0
    ends = set()
    for size in (*range(7, len(whole), 997), *range(len(whole) - 300, len(whole), 11)):
        path.write_bytes(whole[:size])
        cut = mend(path)
        assert path.read_bytes() == whole[: size - cut]
        assert mend(path) == 0
        ends.add(size - cut)
    assert 3 < len(ends) < 40  # the ends of records, not any byte
    path.write_bytes(b"something else")
    assert mend(path) == 0


@pytest.mark.parametrize(("is_asked", "exit_code"), [(True, 0), (True, 1), (False, 0)])
def test_the_last_checkpoint_of_a_run_that_is_done_is_an_artifact_if_asked(
    run_dir: Path, is_asked: bool, exit_code: int
) -> None:
    """What a model loads from, from where it is, without what is for a resume alone."""
    for step, text in ((1, "old"), (2, "new")):
        folder = run_dir / "checkpoints" / f"step-{step:06}"
        folder.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "optimizer.safetensors", "trainer.json"):
            (folder / name).write_text(text)
    tracker = build(replace(OFFLINE, log_checkpoint=is_asked), pytest.fail)
    tracker.start(tracked(run_dir))
    tracker.finish(exit_code)
    seen = only(segments(run_dir))
    files = {name: folder / name for name in ("model.safetensors", "config.json")}
    wanted = {f"model/checkpoint-{seen.run_id}": files} if is_asked and exit_code == 0 else {}
    assert (seen.artifacts, seen.exit_code) == (wanted, exit_code)


def test_a_run_resumed_twice_from_older_checkpoints_is_one_run_with_each_step_once(run_dir: Path) -> None:
    """F4, F5: three offline segments of one id; the count of wandb only rises."""
    for first, last, exit_code in ((0, 5, 143), (3, 6, 143), (5, 8, 0)):
        tracker = start(tracked(run_dir))
        if first:
            tracker.log(first - 1, {"eval/accuracy": 0.5})  # made up for, now that there is time
        for step in range(first, last):
            tracker.log(step, {"time": 0.0, "reward/mean": float(step)})
        tracker.finish(exit_code)

    found = segments(run_dir)
    assert {part.run_id for part in found} == {(run_dir / "wandb_id").read_text().strip()}
    rows = [row for part in found for row in part.history]
    assert [row["step"] for row in rows if "reward/mean" in row] == list(range(8))
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [2, 4]
    assert [row["_step"] for row in rows] == sorted({row["_step"] for row in rows})
    assert [part.exit_code for part in found] == [143, 143, 0]


def test_a_step_logged_twice_makes_two_rows_rather_than_none(run_dir: Path) -> None:
    """F4: wandb drops what comes at a count it has seen."""
    tracker = start(tracked(run_dir))
    for step in (1, 2, 2, 1, 3):
        tracker.log(step, {"x": float(step)})
    tracker.finish(0)
    history = only(segments(run_dir)).history
    assert [row["step"] for row in history] == [1, 2, 2, 1, 3]
    assert [row["_step"] for row in history] == sorted({row["_step"] for row in history})


def test_records_larger_than_a_block_are_read_back(run_dir: Path) -> None:
    text = "x" * 100_000
    tracker = start(tracked(run_dir, prompt=text))
    for step in range(50):
        tracker.log(step, {f"area/metric{index}": step + index / 7 for index in range(40)})
    tracker.finish(0)
    seen = only(segments(run_dir))
    assert seen.config["prompt"] == text
    assert [row["area/metric39"] for row in seen.history] == [step + 39 / 7 for step in range(50)]


def test_the_random_states_of_the_training_are_left_alone(run_dir: Path) -> None:
    random.seed(0)
    np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    tracker = start(tracked(run_dir))
    tracker.log(1, {"x": 1.0})
    tracker.finish(0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_the_service_ends_with_the_run_that_started_it(run_dir: Path) -> None:
    import psutil

    start(tracked(run_dir)).finish(0)
    assert [child for child in psutil.Process().children() if "wandb" in child.name()] == []


def test_a_run_that_the_users_own_code_has_open_is_not_taken_over(run_dir: Path, tmp_path: Path) -> None:
    import wandb

    theirs = wandb.init(mode="offline", dir=str(tmp_path), project="theirs", settings=wandb.Settings(silent=True))
    try:
        tracker = start(tracked(run_dir))
        tracker.log(1, {"x": 1.0})
        tracker.finish(1)
        theirs.log({"y": 2.0})
        assert wandb.run is theirs
    finally:
        theirs.finish(exit_code=0)
        wandb.teardown()
    assert [row["y"] for row in only(segments(tmp_path)).history] == [2.0]
    ours = only(segments(run_dir))
    assert (ours.run_id != theirs.id, ours.project, ours.exit_code) == (True, "lab", 1)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking with threads is what is tested
def test_a_forked_child_cannot_log_into_the_run_or_end_it(run_dir: Path) -> None:
    """F9: all calls come from the main process."""
    tracker = start(tracked(run_dir))
    tracker.log(1, {"x": 1.0})
    child = os.fork()
    if child == 0:
        try:
            tracker.log(2, {"x": 2.0})
            tracker.finish(1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    tracker.log(3, {"x": 3.0})
    tracker.finish(0)
    seen = only(segments(run_dir))
    assert ([row["step"] for row in seen.history], seen.exit_code) == ([1, 3], 0)


def test_disabled_by_the_environment_nothing_is_written(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = build(TrackerConfig(name=TrackerName.wandb), pytest.fail)
    tracker.start(tracked(run_dir))
    tracker.log(1, {"x": 1.0})
    tracker.finish(0)
    assert list(run_dir.iterdir()) == []


def test_a_service_that_is_killed_first_costs_warnings_and_the_last_rows(run_dir: Path) -> None:
    """F8: scancel ends wandb's service before us; what it had is on disk and the exit code of the run is its own."""
    body = """
import psutil
guard = tracker(WandbMode.offline)
guard.start(run())
for step in range(3): guard.log(step, {"x": 1.0})
wait_for_rows_on_disk(3)
for child in psutil.Process().children(): child.kill()
for step in range(3, 6): guard.log(step, {"x": 1.0})
guard.finish(7)
sys.exit(7)
"""
    code, out = script(body, run_dir)
    assert code == 7
    warnings = [line.split(" failed")[0] for line in out.splitlines() if line.startswith("WARNING")]
    assert warnings[-1] == "WARNING tracker: finish", out
    assert set(warnings) <= {"WARNING tracker: log", "WARNING tracker: finish"}  # rows may be gone without an error
    assert "Traceback" not in out
    assert [row["step"] for row in only(segments(run_dir)).history] == [0, 1, 2]


def test_a_service_that_hangs_holds_up_neither_training_nor_exit(run_dir: Path) -> None:
    """F8, F9: the process is gone seconds after the last step, whatever wandb does."""
    body = """
import psutil
guard = tracker(WandbMode.offline)
guard.start(run())
for child in psutil.Process().children(): child.suspend()
began = time.monotonic()
for step in range(2000): guard.log(step, {f"m{i}": float(i) for i in range(40)})
assert time.monotonic() - began < 3
guard.finish(0)
assert time.monotonic() - began < 9
assert not psutil.Process().children()
sys.exit(5)
"""
    code, out = script(body, run_dir)
    assert code == 5, out
    assert "did not finish within 2 s" in out
    assert "Traceback" not in out


def test_a_killed_run_has_its_rows_on_disk_and_leaves_no_process(run_dir: Path) -> None:
    """F5, F8: wandb itself would write only every 15 s."""
    body = """
import psutil
guard = tracker(WandbMode.offline)
guard.start(run())
for step in range(3): guard.log(step, {"x": 1.0})
wait_for_rows_on_disk(3)
print(*(child.pid for child in psutil.Process().children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    code, out = script(body, run_dir, "seed=1")
    assert code == -signal.SIGKILL
    seen = only(segments(run_dir))
    assert "seed=1" in seen.arguments  # no secret, so the command line is kept
    assert ([row["step"] for row in seen.history], seen.exit_code) == ([0, 1, 2], None)
    (service,) = (int(word) for word in out.split())
    assert gone_within(service, 10)


def gone_within(pid: int, seconds: float) -> bool:
    import psutil

    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_without_a_network_an_online_run_goes_on_offline_and_no_key_is_written_down(run_dir: Path) -> None:
    """A key in the environment, a token in the configuration and on the command line: none of them is kept."""
    body = """
guard = tracker(WandbMode.auto)
guard.start(run(model={"init_kwargs": {"token": "hf_SECRET", "revision": "main"}, "tokenizer": "t"}))
guard.log(1, {"x": 1.0})
guard.finish(4)
"""
    key = "secretkey0" * 4
    account = {"WANDB_API_KEY": key, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    _, out = script(body, run_dir, "+model.init_kwargs.token=hf_SECRET", **account)
    assert out.startswith("WARNING wandb: cannot go online, the run is kept offline: "), out
    assert len(out.splitlines()) <= 2, out
    seen = segments(run_dir)
    assert [row["step"] for segment in seen for row in segment.history] == [1]
    assert seen[0].exit_code == 4
    assert seen[0].run_id == (run_dir / "wandb_id").read_text().strip()
    model = {"init_kwargs": {"token": "(redacted)", "revision": "main"}, "tokenizer": "t"}
    assert seen[0].config["model"] == model
    written = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file()) + out.encode()
    assert key.encode() not in written
    assert b"hf_SECRET" not in written


def test_an_explicit_online_without_a_key_never_asks_for_one(run_dir: Path) -> None:
    warnings: list[str] = []
    config = TrackerConfig(name=TrackerName.wandb, mode=WandbMode.online)
    tracker = guarded(build(config, warnings.append), warnings.append)
    tracker.start(tracked(run_dir))
    tracker.finish(0)
    assert warnings == ["wandb: no API key found, the run is kept offline"]
    assert len(segments(run_dir)) == 1


def test_the_package_imports_neither_wandb_nor_torch() -> None:
    body = "import sys; from grpo_exp.track import build, validate; from grpo_exp.config.schema import TrackerConfig\n"
    body += "build(TrackerConfig()); validate(TrackerConfig()); sys.exit(len({'torch', 'wandb'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", body], check=False).returncode == 0
