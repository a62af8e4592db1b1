"""Two ranks on this machine train what one trains, whether each holds the whole model or a part of it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import PATIENCE_S, Ended
from safetensors.torch import load_file
from small_runs import metrics, repeatable, status

from grpo_exp import jsonl

STRATEGIES = ("ddp", "fsdp2")
SMALL = (
    "debug=smoke", "rollout=lockstep", "precision=fp32", "trainer.eval_every=0", "trainer.save_every=0", "probe.every=0",
    "task.num_eval=0", "trainer.tokens_per_micro_batch=48",
)  # fmt: skip
THREE_STEPS = (*SMALL, "trainer.max_steps=3")


def command(num_ranks: int, *arguments: str) -> list[str]:
    """A command line started by torchrun; 0 ranks: without it."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(num_ranks), "--standalone"]
    return [*(torchrun if num_ranks else [sys.executable]), "-m", "grpo_exp", *arguments]


def launched(num_ranks: int, *arguments: str, cwd: Path, program: list[str] | None = None) -> Ended:
    cwd.mkdir(exist_ok=True)
    done = subprocess.run(
        program or command(num_ranks, *arguments),
        cwd=cwd, capture_output=True, text=True, timeout=2 * PATIENCE_S, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return Ended(done.returncode, done.stdout, done.stderr, 0.0)


@contextmanager
def running(num_ranks: int, *arguments: str, cwd: Path, until: int) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """A run that has done so many steps, and its launcher."""
    cwd.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (cwd / "log").open("wb") as log:
        process = subprocess.Popen(command(num_ranks, *arguments), cwd=cwd, stdout=log, stderr=log, env=environment)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := list(cwd.glob("runs/*/metrics.jsonl"))) or len(metrics(found[0].parent)) < until:
            assert process.poll() is None, (cwd / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process, found[0].parent
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def the_run(folder: Path) -> Path:
    [path] = [path for path in (folder / "runs").iterdir() if (path / "status.json").is_file()]
    return path


def trained(folder: Path, num_ranks: int, *arguments: str) -> Path:
    ended = launched(num_ranks, *arguments, cwd=folder)
    assert ended.code == 0, ended.err
    assert status(the_run(folder))["state"] == "done"
    return the_run(folder)


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("one"), 0, *THREE_STEPS)


def assert_same_rows(run: Path, other: Path) -> None:
    rows, others = (
        [{key: value for key, value in row.items() if value is not None} for row in repeatable(metrics(path))]
        for path in (run, other)
    )
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, found in zip(rows, others, strict=True):
        for key in row:  # a mismatch is rounding itself here, and its slope is per 1 000 tokens
            bound = 1e-3 if key == "mismatch/drift_slope" else 1e-5 if key.startswith("mismatch/") else 1e-6
            assert found[key] == pytest.approx(row[key], rel=1e-5, abs=bound), key


def assert_same_weights(run: Path, other: Path, bound: float = 1e-6) -> None:
    [name] = [path.name for path in (run / "checkpoints").iterdir()][-1:]
    for file in ("model.safetensors", "optimizer.safetensors"):
        mine, theirs = (load_file(path / "checkpoints" / name / file) for path in (run, other))
        assert set(mine) == set(theirs)
        for key in set(mine) - {"rng"}:
            assert mine[key].dtype == theirs[key].dtype
            assert float((mine[key] - theirs[key]).abs().max()) <= bound, key


def observed(run: Path) -> dict[str, str]:
    found: dict[str, str] = jsonl.read_json(run / "manifest.json")["precision"]["observed"]["first_step"]
    return found


def test_more_ranks_than_the_strategy_takes_are_refused_and_so_is_a_strategy_without_a_launcher(tmp_path: Path) -> None:
    ended = launched(0, *THREE_STEPS, "distributed=ddp", cwd=tmp_path)
    assert ended.code == 2
    assert "distributed.strategy" in ended.err
    assert "torchrun --nproc-per-node" in ended.err
    ended = launched(2, *THREE_STEPS, cwd=tmp_path)
    assert "distributed.strategy" in ended.err
    assert "one of 2 ranks" in ended.err
    assert not (tmp_path / "runs").exists()


def test_two_ranks_with_parts_of_the_weights_train_what_one_process_trains(tmp_path: Path, by_one: Path) -> None:
    run = trained(tmp_path, 2, *THREE_STEPS, "distributed=fsdp2")
    assert_same_rows(by_one, run)
    assert_same_weights(by_one, run)
    assert (observed(run)["num_ranks"], observed(run)["wrapper"], observed(run)["backend"]) == ("2", "fsdp2", "gloo")


@pytest.mark.ranks
def test_two_ranks_with_the_whole_model_each_train_what_one_process_trains(tmp_path: Path, by_one: Path) -> None:
    run = trained(tmp_path, 2, *THREE_STEPS, "distributed=ddp")
    assert_same_rows(by_one, run)
    assert_same_weights(by_one, run)
    assert (observed(run)["num_ranks"], observed(run)["wrapper"], observed(run)["backend"]) == ("2", "ddp", "gloo")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "settings",
    [
        ("algo.kl_coef=0.1", "algo.epochs=2"),
        ("algo.mini_batches=2", "algo.entropy_coef=0.01", "correction=batch_norm"),
        ("algo=gspo", "trainer.share_prompts=false"),
        ("correction=batch_norm", "algo=token_mean"),
    ],
    ids=lambda settings: settings[0],
)
def test_every_part_of_a_step_is_the_same_on_two_ranks(tmp_path: Path, settings: tuple[str, ...]) -> None:
    run = trained(tmp_path / "one", 0, *THREE_STEPS, *settings)
    for strategy in STRATEGIES:
        other = trained(tmp_path / strategy, 2, *THREE_STEPS, *settings, f"distributed={strategy}")
        assert_same_rows(run, other)
        assert_same_weights(run, other)


@pytest.mark.ranks
def test_adapters_are_trained_by_two_ranks_as_by_one(tmp_path: Path) -> None:
    settings = (*THREE_STEPS, "lora=r16", "algo.kl_coef=0.1")
    run, other = trained(tmp_path / "one", 0, *settings), trained(tmp_path / "ddp", 2, *settings, "distributed=ddp")
    assert_same_rows(run, other)
    [adapters, theirs] = (
        load_file(path / "checkpoints/step-000003/adapter_model.safetensors") for path in (run, other)
    )
    assert max(float((adapters[name] - theirs[name]).abs().max()) for name in adapters) < 1e-6
    assert observed(other)["adapter"] == "fp32"


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_skip_the_same_steps_in_fp16_and_name_the_same_module(tmp_path: Path, strategy: str) -> None:
    settings = (
        *SMALL, "trainer.max_steps=4", "precision=fp16", "precision.loss_scale.init=1e9",
        "precision.loss_scale.backoff_factor=0.01",
    )  # fmt: skip
    skips = []
    for run in (
        trained(tmp_path / "one", 0, *settings),
        trained(tmp_path / "two", 2, *settings, f"distributed={strategy}"),
    ):
        skips.append([event for event in jsonl.read(run / "events.jsonl") if event["event"] == "skipped_step"])
        assert observed(run)["loss_scale"] == "dynamic"
    assert len(skips[0]) == 2
    for one, two in zip(*skips, strict=True):
        assert {key: one[key] for key in one if key != "time"} == {key: two[key] for key in two if key != "time"}


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_summed_in_the_dtype_that_is_asked_for(tmp_path: Path, strategy: str, by_one: Path) -> None:
    run = trained(tmp_path, 2, *THREE_STEPS, "precision.grad_reduce=bf16", f"distributed={strategy}")
    assert observed(run)["grad_reduce"] == "bf16"
    assert observed(run)["params"] == "fp32"
    with pytest.raises(AssertionError):
        assert_same_weights(by_one, run)  # rounded sums are others


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, strategy: str, before: int, after: int) -> None:
    settings = (*SMALL, "trainer.max_steps=40", "algo.kl_coef=0.01", "optim.lr=1e-5")
    unbroken = trained(tmp_path / "unbroken", 0, *settings)
    with running(before, *settings, f"distributed={strategy}", cwd=tmp_path / "broken", until=3) as (launcher, run):
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(PATIENCE_S)
    stopped = status(run)
    assert (stopped["state"], stopped["exit_code"]) == ("preempted", 143)
    assert 3 <= stopped["step"] < 40
    ended = launched(after, "resume", str(run), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert status(run)["state"] == "done"
    assert observed(run)["num_ranks"] == str(after)
    assert [row["step"] for row in metrics(run)] == list(range(1, 41))
    assert_same_weights(unbroken, run, bound=1e-5)


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_at_once_and_leaves_nothing(
    tmp_path: Path, strategy: str, rank: int
) -> None:
    settings = (*SMALL, "trainer.max_steps=100000", "trainer.save_every=2", f"distributed={strategy}")
    with running(2, *settings, cwd=tmp_path, until=3) as (launcher, run):
        processes = psutil.Process(launcher.pid).children(recursive=True)
        [victim] = [p for p in processes if p.environ().get("RANK") == str(rank) and p.ppid() == launcher.pid]
        victim.kill()
        assert launcher.wait(PATIENCE_S) != 0
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive
    if rank == 1:  # the one that leads lived to say why
        assert status(run)["state"] in ("failed", "preempted")
        assert "rank" in status(run)["reason"] or "SIGTERM" in status(run)["reason"]
    done = len(metrics(run))
    with running(2, "resume", str(run), cwd=tmp_path, until=done + 2) as (launcher, _):
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(PATIENCE_S)
    assert status(run)["state"] == "preempted"
    steps = [row["step"] for row in metrics(run)]
    assert len(steps) >= done + 2
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accelerate_launch_starts_ranks_too_and_a_worker_of_its_own_samples(tmp_path: Path, strategy: str) -> None:
    accelerate = [str(Path(sys.executable).with_name("accelerate")), "launch", "--multi_gpu", "--num_processes", "2"]
    settings = (  # --multi_gpu: without it accelerate starts a single process where there is no GPU
        "debug=smoke", "precision=bf16", "trainer.max_steps=4", "trainer.eval_every=2", f"distributed={strategy}",
        *(("probe.every=0",) if strategy == "fsdp2" else ("probe.every=2", "correction=beta_removal")),
    )  # fmt: skip
    program = [
        *accelerate,
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "-m",
        "grpo_exp",
    ]
    ended = launched(2, cwd=tmp_path, program=[*program, *settings])
    assert ended.code == 0, ended.err
    run = the_run(tmp_path)
    assert status(run)["state"] == "done"
    declared = jsonl.read_json(run / "manifest.json")["precision"]["declared"]
    assert {site: observed(run)[site] for site in declared} == declared
    assert (observed(run)["num_ranks"], observed(run)["compute"], observed(run)["params"]) == ("2", "bf16", "fp32")


def test_what_needs_all_weights_on_one_rank_is_refused_where_they_lie_in_parts(tmp_path: Path) -> None:
    ended = launched(
        1, *SMALL[:5], "distributed=fsdp2", "probe.every=5", "correction=beta_removal", "rollout.max_staleness=1",
        "algo.kl_coef=0.1", "precision=bf16_pure", "precision.reference=fp32", cwd=tmp_path,
    )  # fmt: skip
    assert ended.code == 1 or ended.code == 2
    for key in ("probe.every", "correction.proximal", "precision.reference"):
        assert key in ended.err
    assert not (tmp_path / "runs").exists()
