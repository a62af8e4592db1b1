"""README.md and docs/ say what is so: their commands are run, their outputs compared, their tables held to the code.

A command in a ``console`` block begins with ``$``; what follows it is its output, where ``…`` stands for lines that are left
out. Every command is run as it stands unless a table below says what is done instead, and why.
"""

import fnmatch
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from models import Family, checkpoint

from grpo_exp.args import PATHS
from grpo_exp.checks import find_problems
from grpo_exp.config.compose import compose, load_precision, to_typed
from grpo_exp.config.schema import Config
from grpo_exp.config.sites import resolve_sites
from grpo_exp.folder import Status
from grpo_exp.metrics import COLUMNS, METRICS
from grpo_exp.probe_grid.settings import ProbeSettings
from grpo_exp.report.load import RunState
from grpo_exp.run import IN_USE

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CLONE = "/tmp/grpo_exp"  # where the outputs on the pages were made
RUN_NAME = re.compile(r"run_[0-9a-f]{8}\b")
TINY = ROOT / "grpo_exp" / "assets" / "tiny"

SMALLER = {
    "grpo-exp -m precision=bf16,fp16,fp32 seed=0,1,2": "grpo-exp -m precision=bf16,fp16,fp32 seed=0 debug=smoke"
    " trainer.max_steps=2 rollout=lockstep hydra.launcher.n_jobs=2",
    "grpo-exp task=jsonl task.path=examples/prompts.jsonl task.reward=examples/reward.py:reward"
    " task.max_completion_tokens=8 task.num_eval=16": "grpo-exp task=jsonl task.path=examples/prompts.jsonl"
    " task.reward=examples/reward.py:reward task.max_completion_tokens=8 task.num_eval=16 debug=smoke trainer.max_steps=2"
    " rollout=lockstep",
    "grpo-exp probe probe.num_prompts=8 probe.max_new_tokens=8": "grpo-exp probe probe.num_prompts=4 probe.max_new_tokens=4"
    " probe.rollout=bf16 rollout.num_workers=0",
    "grpo-exp compare runs --fail-if-confounded": "grpo-exp compare runs/precision-* --fail-if-confounded",
}
"""Command → what is run: the same with fewer and smaller steps, or on the runs of one sweep among others."""

COMPOSED = {
    "grpo-exp debug=smoke precision=fp16 runs_dir=runs_smoke": "the walkthrough runs it with seed=1",
    "grpo-exp experiment=sort precision=bf16 trainer.max_minutes=10": "takes ten minutes",
    "grpo-exp debug=smoke precision=bf16_pure model.init_kwargs.attn_implementation=eager": "one more smoke run",
    "grpo-exp -m +sweeps=precision": "twelve full runs",
    "grpo-exp -m +sweeps=precision seed=0,1,2,3,4 hydra.launcher.n_jobs=2": "twenty full runs",
    "grpo-exp -m +sweeps=precision hydra.launcher.retry=failed": "twelve full runs",
    "grpo-exp -m +sweeps=presets seed=0 precision=bf16": "ten full runs",
    "grpo-exp -m +sweeps=presets seed=0 precision=bf16 rollout=lockstep runs_dir=runs/presets_lockstep": "ten full runs",
    "grpo-exp -m +sweeps=precision_correction": "27 full runs",
    "grpo-exp -m +sweeps=sites seed=0,1,2,3,4": "35 full runs",
    "grpo-exp --config-dir my_conf experiment=wide": "a full run",
    "grpo-exp --config-dir my_conf -m +sweeps=head": "six full runs",
    "grpo-exp algo.epochs=2 algo.mini_batches=2 correction=token_tis algo.kl_coef=0.01": "a full run; test_penalty.py has it",
    "grpo-exp correction=token_icepop precision=fp32_rollout_bf16": "a full run",
    "grpo-exp correction=seq_tis correction.weight_high=5 correction.veto=1e-4": "a full run",
    "grpo-exp correction=decoupled correction.proximal=interpolate rollout.max_staleness=2": "a full run",
    "grpo-exp alarm=stop precision=bf16_rollout_fp32": "a full run",
    "grpo-exp lora=r16 precision=bf16 optim.lr=3e-3": "a full run; test_lora.py has small ones",
    "grpo-exp lora=r16 lora.rank=8 lora.target_modules=[v_proj] precision=bf16_pure precision.optimizer_state=fp32": "a"
    " full run",
    "grpo-exp alarm.kl.threshold=0.02 alarm.kl.action=lower_lr": "a full run",
    "grpo-exp -m rollout.record=true seed=0,1,2 runs_dir=runs/recorded": "three full runs",
    "grpo-exp experiment=phantom_clip": "a full run",
    "grpo-exp -m +sweeps=phantom_clip": "36 full runs",
    "grpo-exp rollout=vllm debug=smoke precision=bf16": "needs vLLM; test_vllm_run.py has it",
    "grpo-exp -m rollout=hf,vllm precision=bf16,fp16,fp32": "six full runs, some with vLLM",
    "grpo-exp rollout=vllm_server debug=smoke": "needs vLLM; test_vllm_run.py has it",
    "grpo-exp rollout=vllm_server rollout.urls=[http://gpu1:8000]": "needs a server",
    "grpo-exp tracker=wandb": "a full run; wandb has tests of its own",
    "grpo-exp -m +sweeps=precision hydra/launcher=slurm hydra.launcher.partition=gpu hydra.launcher.gpus=1"
    " hydra.launcher.time=8:00:00 hydra.launcher.n_jobs=4": "needs a cluster; test_slurm.py starts one",
    "grpo-exp -m precision=bf16,fp16 seed=0,1,2 distributed=fsdp2 hydra/launcher=slurm hydra.launcher.nodes=2"
    " hydra.launcher.ranks_per_node=4 hydra.launcher.gpus=h100:4 hydra.launcher.dry_run=true": "has golden files of its own",
    "grpo-exp -m +sweeps=precision tracker=wandb": "twelve full runs; wandb has tests of its own",
    "grpo-exp -m debug=smoke precision=fp32,fp32_tf32,bf16,fp16,bf16_pure,bf16_head32 rollout=lockstep"
    " trainer.device=cuda runs_dir=runs/gpu": "needs a GPU",
    "grpo-exp -m debug=smoke precision=bf16,fp16 trainer.device=cuda runs_dir=runs/gpu": "needs a GPU",
    "grpo-exp task=reasoning_gym task.dataset=spell_backward task.dataset_kwargs.max_word_len=4 model=smollm2_135m"
    " optim=adamw": "a full run of a model that is fetched",
    "grpo-exp task=chain_sum model=smollm2_135m optim=adamw": "a full run of a model that is fetched",
    "grpo-exp model=local model.name_or_path=/path/to/checkpoint optim=adamw task=jsonl task.path=prompts.jsonl"
    " task.reward=reward.py:reward": "a full run",
    "grpo-exp model=hub model.name_or_path=Qwen/Qwen3-0.6B optim=adamw task=jsonl task.path=prompts.jsonl"
    " task.reward=reward.py:reward": "needs a model hub",
}
"""Command → why it is only composed and checked, and not run."""

NOT_RUN = {
    "make demo": "six full runs after an installation; its command is composed",
    "make test": "what runs this test",
    "make setup-vllm": "installs 3.5 GB",
    "make test-vllm": "needs vLLM, and is run by itself",
    "grpo-exp probe model=smollm2_135m": "a quarter of an hour, on a model that is fetched; test_probe_model.py is about it",
    "grpo-exp probe model=smollm2_135m probe.engine=[hf,vllm] probe.rollout=bf16 probe.compute=fp32,bf16"
    " probe.head=[null,fp32] probe.micro_batch=[1,8]": "needs vLLM and a model that is fetched; test_probe_grid.py reads it",
    "grpo-exp probe --against probes/BEFORE": "needs an earlier probe; test_probe_grid.py has one",
    "grpo-exp probe --against probes/BEFORE model.init_kwargs.attn_implementation=eager": "the same",
    "pip install 'grpo-exp[fetch]'": "changes the environment that tests run in",
    "grpo-exp fetch-model smollm2_135m": "downloads 93 MB; has tests of its own",
    "grpo-exp plan model=smollm2_135m precision=bf16 --memory 16 --completion-tokens 128": "wants a model that is fetched",
    "pip install hydra-optuna-sweeper": "changes the environment that tests run in",
    "grpo-exp -m hydra/sweeper=optuna hydra.sweeper.n_trials=8 hydra.sweeper.n_jobs=2 hydra.sweeper.direction=maximize"
    " hydra.sweeper.sampler.seed=0 'optim.lr=tag(log,interval(1e-4,1e-2))' precision=bf16,fp16"
    " runs_dir=runs/search": "needs a plugin; test_sweep_optuna.py searches",
    "grpo-exp cancel runs": "needs a cluster; test_slurm.py has one",
    "grpo-exp compare --wandb my-team/grpo_exp --group precision": "needs an account; test_track_sync.py has a stand-in",
    "grpo-exp compare --wandb my-team/grpo_exp --html report.html --artifact my-team/reports": "the same",
    "grpo-exp sync runs/precision": "needs an account; test_track_sync.py has a stand-in",
    "grpo-exp compare runs/gpu": "needs runs on a GPU",
    "grpo-exp compare runs/phantom_clip": "needs the sweep that comes before it",
    "grpo-exp -m +sweeps=replay_precision rollout.replay_from=runs/recorded": "nine full runs; test_replay.py replays",
    "grpo-exp debug=smoke precision=bf16 rollout=replay rollout.replay_from=runs/small": "the command before it comes first;"
    " a test of its own",
    "accelerate launch --num_processes 8 -m grpo_exp distributed=fsdp2 model=hub model.name_or_path=Qwen/Qwen3-0.6B": "needs"
    " eight GPUs; test_ranks.py starts two ranks with accelerate",
    "torchrun --nproc-per-node 1 -m grpo_exp resume runs/RUN": "test_ranks.py resumes with other numbers of ranks",
    "grpo-exp resume runs/RUN": "a test of its own, on a run that was cut off",
}


@dataclass(frozen=True)
class Command:
    page: Path
    text: str
    output: str
    is_walk: bool


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.S | re.M)


def commands() -> list[Command]:
    found = []
    for page in PAGES:
        for block in blocks(page, "(?:console|bash)"):
            assert block.startswith("$ "), f"{page.name}: a console block begins with a command"
            for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
                text, _, output = part.partition("\n")
                found.append(Command(page, text, output, page.stem == "walkthrough"))
    return found


def distinct(of_walk: bool) -> list[Command]:
    """Commands of the walkthrough in order, or those of the other pages, each once."""
    some = [command for command in commands() if command.is_walk == of_walk]
    return some if of_walk else list({(command.text, command.output): command for command in some}.values())


def table(page: str, first_column: str) -> list[list[str]]:
    """The cells of the table whose header begins with a word, without the backquotes of the first column."""
    lines = (ROOT / page).read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# -- running what the pages say


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "default",
    }
    environment.pop("COLUMNS", None)
    return subprocess.run(
        ["bash", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
    )


def shape(text: str, folder: Path) -> list[str]:
    """The lines of an output without what differs between runs and machines."""
    text = text.replace(str(folder), CLONE)
    text = re.sub(r'"event": "(?:skipped_step|stale_drop|worker_\w+|warning)".*\n', "\n", text)  # may happen in any run
    text = re.sub(r'"(?:native|fp32 BLAS[^"]*)"', '"KERNEL"', text)
    text = RUN_NAME.sub("run_HASH", text)  # a new setting changes it
    text = re.sub(r'"host": "[^"]*"', '"host": "HOST"', text)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+\+00:00", "TIME", text)
    text = re.sub(r"-?\b\d[\d.,]*(?:e[+-]?\d+)?\b|\bnull\b", "0", text)
    text = re.sub(r"─+", "─", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def matches(page: list[str], real: list[str]) -> bool:
    """Whether the lines of a page are those of an output, ``…`` standing for any number of lines."""
    parts = [list(group) for is_gap, group in itertools.groupby(page, lambda line: line == "…") if not is_gap]
    position = 0
    for part in parts:
        places = [at for at in range(position, len(real) - len(part) + 1) if real[at : at + len(part)] == part]
        if not places:
            return False
        position = places[0] + len(part)
    starts = not page or page[0] == "…" or real[: len(parts[0])] == parts[0]
    ends = not page or page[-1] == "…" or real[-len(parts[-1]) :] == parts[-1]
    return starts and ends


def check_output(command: Command, done: subprocess.CompletedProcess[str], folder: Path) -> None:
    real = [line for line in shape(done.stdout + done.stderr, folder) if not line.endswith("/code.diff")]
    is_refused = command.output.startswith("error: ")
    assert done.returncode == (2 if is_refused else 0), done.stderr[-3000:]
    if command.output:
        assert matches(shape(command.output, folder), real), "\n".join(["", *real])


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which commands find what they would in a clone, and the runs of the README's sweep."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks(ROOT / "docs" / "configuration.md", "yaml"):
        path = re.search(r"^# (my_conf/\S+\.yaml):", block, re.M)
        assert path is not None
        (folder / path[1]).parent.mkdir(parents=True, exist_ok=True)
        (folder / path[1]).write_text(block)
    done = run(next(iter(SMALLER.values())), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def walk(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[tuple[Command, subprocess.CompletedProcess[str]]]]:
    """The commands of the walkthrough, run one after the other in a folder of their own."""
    folder = tmp_path_factory.mktemp("walk")
    steps = distinct(of_walk=True)
    return folder, [(step, run(RUN_NAME.sub("run_*", step.text), folder)) for step in steps]


@pytest.fixture(scope="module")
def run_folder(walk: tuple[Path, Any]) -> Path:
    """The run of the walkthrough."""
    [folder] = (walk[0] / "runs").glob("run_*")
    return folder


def test_the_walkthrough_shows_what_happens(walk: tuple[Path, list[Any]]) -> None:
    folder, done = walk
    assert len(done) > 8
    for command, result in done:
        check_output(command, result, folder)


@pytest.mark.parametrize("command", distinct(of_walk=False), ids=lambda command: f"{command.page.stem}: {command.text}")
def test_a_command_of_the_documentation_works(command: Command, clone: Path) -> None:
    if command.text in NOT_RUN:
        return
    if command.text in COMPOSED:
        assert problems_of(command.text, clone) == []
    elif command.text == next(iter(SMALLER)):
        assert len(list((clone / "runs").glob("precision-*"))) == 3  # run by the fixture
    else:
        check_output(command, run(SMALLER.get(command.text, command.text), clone), clone)


def test_every_exception_is_still_in_the_documentation() -> None:
    texts = {command.text for command in commands()}
    assert [text for text in [*SMALLER, *COMPOSED, *NOT_RUN] if text not in texts] == []


def test_the_demo_is_a_sweep_that_can_be_run(tmp_path: Path) -> None:
    shown = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [line] = [line for line in shown.splitlines() if "grpo-exp " in line]
    assert problems_of(line[line.index("grpo-exp ") :], tmp_path) == []


def problems_of(text: str, folder: Path) -> list[str]:
    """What is wrong with the jobs of a command, each level of each factor once, without running any."""
    given = shlex.split(text.replace("/path/to/checkpoint", str(TINY)))
    assert given[0] == "grpo-exp", text
    given = [word.replace("prompts.jsonl", str(ROOT / "examples/prompts.jsonl")) for word in given[1:]]
    given = [word.replace("=reward.py", f"={ROOT / 'examples/reward.py'}") for word in given]
    search = []
    if "--config-dir" in given:
        at = given.index("--config-dir")
        search = [f"hydra.searchpath=[file://{folder / given[at + 1]}]"]
        given = given[:at] + given[at + 2 :]
    factors = {key: value for word in given if word != "-m" for key, _, value in [word.partition("=")]}
    if (named := factors.get("+sweeps")) is not None:
        [file] = [
            path for path in (ROOT / f"sweeps/{named}.yaml", folder / f"my_conf/sweeps/{named}.yaml") if path.is_file()
        ]
        factors = yaml.safe_load(file.read_text())["hydra"]["sweeper"]["params"] | factors
    levels = [[f"{key}={one}" for one in str(value).split(",")] for key, value in factors.items()]
    found = []
    for index in range(max(map(len, levels), default=1)):
        job = [level[index % len(level)] for level in levels]
        found += find_problems(to_typed(compose([*search, *job]).config))
    return [str(problem) for problem in found]


def test_a_run_that_was_cut_off_is_resumed(run_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "RUN"
    shutil.copytree(run_folder, copy)
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    status = json.loads((copy / "status.json").read_text())
    (copy / "status.json").write_text(json.dumps(status | {"state": "preempted"}))
    done = run("grpo-exp resume runs/RUN", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert '"event": "resume"' in (copy / "events.jsonl").read_text()


def test_what_was_recorded_is_replayed(clone: Path) -> None:
    """By the two commands of the page, one after the other; the first is run by itself, too, and found done."""
    record = "grpo-exp debug=smoke rollout=lockstep rollout.record=true runs_dir=runs/small"
    replay = "grpo-exp debug=smoke precision=bf16 rollout=replay rollout.replay_from=runs/small"
    for text in (record, replay):
        assert text in [command.text for command in commands()]
        done = run(text, clone)
        assert done.returncode == 0, done.stderr[-3000:]


def test_the_library_snippet_trains(tmp_path: Path) -> None:
    [snippet] = blocks(ROOT / "README.md", "python")
    assert snippet == blocks(ROOT / "docs/library.md", "python")[0]
    (tmp_path / "script.py").write_text(snippet)
    done = run("python script.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 <= float(done.stdout) <= 1
    assert json.loads((tmp_path / "my-run" / "status.json").read_text())["state"] == "done"


def test_the_other_snippets_run() -> None:
    scope: dict[str, Any] = {"__name__": "snippet"}
    for page in PAGES:
        for snippet in blocks(page, "python")[page.stem in ("README", "library") :]:
            exec(compile(snippet, page.name, "exec"), scope)
    assert {"judge", "StopWhenLearnt", "reward", "config"} <= scope.keys()
    assert scope["reward"](completions=["agg", "ag"], answer=["agg", "gab"]) == [1.0, 0.0]


def test_the_example_on_the_page_is_the_file() -> None:
    assert blocks(ROOT / "docs/extending.md", "python") == [(ROOT / "examples/reward.py").read_text()]
    assert blocks(ROOT / "docs/extending.md", "json")[0] in (ROOT / "examples/prompts.jsonl").read_text()


def test_the_loss_and_the_task_on_the_page_can_be_added_and_train_another_model(tmp_path: Path) -> None:
    """The page's changes, applied to a copy of the package as they stand there; the model is one of another architecture."""
    for folder in ("grpo_exp", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for change in blocks(ROOT / "docs/extending.md", "diff"):
        subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=tmp_path, input=change, text=True, check=True)
    command = [
        sys.executable, "-c", "from grpo_exp.cli import main; raise SystemExit(main())", "algo=unclipped", "task=echo",
        "model=local", f"model.name_or_path={checkpoint(Family.llama)}", "precision=fp32", "debug=smoke", "rollout=lockstep",
        "trainer.max_steps=2", "trainer.eval_every=0", "correction=token_tis", "runs_dir=runs",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [run] = (tmp_path / "runs").glob("*/status.json")
    assert (json.loads(run.read_text())["state"], json.loads(run.read_text())["updates"]) == ("done", 2)
    config = yaml.safe_load((run.parent / "config.yaml").read_text())
    assert (config["algo"]["loss"], config["task"]["name"]) == ("unclipped", "echo")


def test_the_precision_option_on_the_page_can_be_added(tmp_path: Path) -> None:
    [option] = blocks(ROOT / "docs/precision.md", "yaml")
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text(option)
    config = to_typed(compose([f"hydra.searchpath=[file://{tmp_path}]", "precision=mine"]).config)
    assert find_problems(config) == []
    assert (config.precision.compute, config.precision.rollout) == ("fp16", "bf16")


# -- tables that are in step with the code


def test_the_table_of_metrics_is_the_one_in_the_code() -> None:
    rows = [(key.strip("`"), unit, formula) for key, unit, formula in table("docs/metrics.md", "key")]
    assert rows == [(key, unit, formula) for key, (unit, formula) in METRICS.items()]
    assert [row[0].strip("`") for row in table("docs/metrics.md", "column")] == list(COLUMNS)


def test_rows_of_a_run_have_the_documented_keys_and_no_others(run_folder: Path) -> None:
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert set().union(*rows) == {*COLUMNS, *METRICS}


def test_the_table_of_library_names_is_the_one_in_the_code() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("docs/library.md", "TRL's name")}
    assert rows == {"model_init_kwargs": "model.init_kwargs"} | PATHS


def test_the_table_of_groups_lists_every_option_and_default() -> None:
    choices = compose([]).choices
    rows = {row[0].strip("`"): row[1] for row in table("docs/configuration.md", "group")}
    folders = [path for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name not in ("hydra", "sweeps")]
    assert set(rows) == {folder.name for folder in folders}
    for folder in folders:
        listed = [name.strip() for name in rows[folder.name].split(",")]
        assert sorted(name.strip("*") for name in listed) == sorted(path.stem for path in folder.glob("*.yaml"))
        default = [choices[folder.name]] if folder.name in choices else []
        assert [name.strip("*") for name in listed if "*" in name] == default


def test_the_table_of_precision_options_says_what_they_resolve_to() -> None:
    header = next(
        line for line in (ROOT / "docs/precision.md").read_text().splitlines() if line.startswith("| option |")
    )
    columns = [cell.strip() for cell in header.split("|")[2:-2]]
    options = {path.stem for path in (ROOT / "conf/precision").glob("*.yaml")}
    rows = {row[0].strip("`"): row[1:-1] for row in table("docs/precision.md", "option")}
    assert set(rows) == options
    for option, cells in rows.items():
        config = load_precision(option)
        one, other = (resolve_sites(config, {}, own) for own in ("fp32", "bf16"))
        expected = {site: one[site].name if one[site].name == other[site].name else "checkpoint" for site in one}
        expected["loss_scale"] = config.loss_scale.mode.name
        assert dict(zip(columns, cells, strict=True)) == {column: expected[column] for column in columns}, option


def test_the_table_of_sites_lists_every_key_of_the_group() -> None:
    keys = [entry.name for entry in fields(get_type_hints(Config)["precision"])]
    assert sorted(row[0].strip("`") for row in table("docs/precision.md", "site")) == sorted(keys)


def test_the_tables_of_the_run_folder_are_complete(run_folder: Path) -> None:
    page = "docs/run_folder.md"
    files = {name.split("/")[0] for row in table(page, "file") for name in names(row[0])}
    assert {path.name for path in run_folder.iterdir()} <= files
    manifest = json.loads((run_folder / "manifest.json").read_text())
    sections = {row[0].strip("`"): set(names(row[1])) for row in table(page, "section")}
    assert set(sections) == set(manifest)
    for section in ("run", "sweep", "git", "hardware"):
        assert set(manifest[section]) <= sections[section]
    assert [name for row in table(page, "field") for name in names(row[0])] == [entry.name for entry in fields(Status)]
    assert {row[0].strip("`") for row in table(page, "state")} == {state.value for state in RunState}
    assert {row[0] for row in table(page, "code")} == {"0", "1", "2", "3", str(IN_USE), "128 + n"}


def test_the_table_of_events_lists_every_event_in_the_code() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "grpo_exp").rglob("*.py"))
    written = re.findall(r'\.?_?(?:on_)?event\((?:(?:\w+\.)*(?:step|0), )?"(\w+)"', source)
    assert {row[0].strip("`") for row in table("docs/run_folder.md", "event")} == set(written)


# -- names and links


def leaves(owner: Any = Config, prefix: str = "") -> Iterator[str]:
    for name, hint in get_type_hints(owner).items():
        yield f"{prefix}{name}"
        if is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{name}.")


OF_THE_MANIFEST = re.compile(r"precision\.(resolve|observed|declared|kernels|reasons)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_and_metrics_that_a_page_names_exist(page: Path) -> None:
    known, groups = set(leaves()), "|".join(get_type_hints(Config))
    known |= {f"probe.{entry.name}" for entry in fields(ProbeSettings)} | {"probe.json"}
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    spans = [span for span in names(text) if not OF_THE_MANIFEST.match(span)]
    keys = [m[1] for span in spans if (m := re.match(rf"((?:{groups})\.[a-z_.]*[a-z_])(?:=|$)", span))]
    assert [key for key in keys if key not in known and not key.startswith("model.init_kwargs.")] == []
    areas = "|".join(sorted({key.split("/")[0] for key in METRICS if "/" in key}))
    metrics = [span for span in spans if re.fullmatch(rf"(?:{areas})/[\w*]+", span)]
    assert [span for span in metrics if not fnmatch.filter(METRICS, span)] == [], "a pattern stands for some metric"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).strip("\n").replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme() -> None:
    linked = re.findall(r"\]\(docs/(\w+\.md)\)", (ROOT / "README.md").read_text())
    assert {page.name for page in PAGES[1:]} <= set(linked)
