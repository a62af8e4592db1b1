"""Every file under conf/ and sweeps/ becomes a valid typed configuration, and the command line wins over all of them."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from recordings import long_recording

from grpo_exp.checks import find_problems
from grpo_exp.config.compose import CONF_DIR, Composed, compose, load_precision, normalise, to_typed
from grpo_exp.config.schema import Config, LossScaleMode, OptimConfig, PrecisionConfig, default_config
from grpo_exp.config.sites import resolve_sites
from grpo_exp.errors import ConfigError

GROUPS = (
    "model",
    "precision",
    "rollout",
    "task",
    "algo",
    "correction",
    "optim",
    "lora",
    "alarm",
    "distributed",
    "tracker",
)
GLOBAL = ("experiment", "debug")
REFUSED = {("bf16_head32", "vllm"), ("bf16_head32", "vllm_server")}  # vLLM's head computes in the rollout dtype
NEEDS = {  # what an option cannot know by itself
    "rollout/replay": [f"rollout.replay_from={long_recording()}"],
    "sweeps/replay_precision": [f"rollout.replay_from={long_recording()}"],
    "model/hub": ["model.name_or_path=org/name"],
    "model/local": [f"model.name_or_path={CONF_DIR.parent / 'grpo_exp' / 'assets' / 'tiny'}"],
    "task/reasoning_gym": ["task.dataset=chain_sum"],
    "task/jsonl": ["task.path=examples/prompts.jsonl", "task.reward=examples/reward.py:reward"],
}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))


def shipped() -> list[list[str]]:
    """The overrides that choose each shipped option file, with what it needs beside."""
    return [
        [f"{group}={option}", *NEEDS.get(f"{group}/{option}", [])]
        for group in GROUPS + GLOBAL
        for option in options(group)
    ]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONF_DIR.parent)


@cache
def shared(*overrides: str) -> Config:
    """A configuration that several tests look at; composing takes a tenth of a second."""
    return typed(*overrides)


def typed(*overrides: str) -> Config:
    return to_typed(compose(list(overrides)).config)


def problems(*overrides: str) -> list[str]:
    return [str(problem) for problem in find_problems(typed(*overrides))]


@pytest.mark.parametrize("overrides", shipped(), ids=lambda overrides: overrides[0])
def test_every_shipped_option_composes_to_a_valid_configuration(overrides: list[str]) -> None:
    """E16 ii: warnings are errors here, so none of them makes Hydra warn."""
    group, _, option = overrides[0].partition("=")
    job = compose(overrides)
    assert job.choices[group] == option
    assert find_problems(to_typed(job.config)) == []


def test_every_folder_of_conf_is_known_to_these_tests() -> None:
    folders = {path.name for path in CONF_DIR.iterdir() if path.is_dir()} - {"sweeps"}
    assert folders == {*GROUPS, *GLOBAL}


@pytest.mark.parametrize("precision", options("precision"))
def test_every_precision_goes_with_every_task_and_rollout(precision: str) -> None:
    """Groups are put together here: that Hydra fills each by itself is what the test above shows."""
    config = shared(f"precision={precision}")
    for task, rollout in product(options("task"), options("rollout")):
        needs = [*NEEDS.get(f"task/{task}", []), *NEEDS.get(f"rollout/{rollout}", [])]
        other = shared(f"task={task}", f"rollout={rollout}", *needs)
        found = [problem.key for problem in find_problems(replace(config, task=other.task, rollout=other.rollout))]
        assert found == (["precision.rollout_head"] if (precision, rollout) in REFUSED else [])


@pytest.mark.parametrize("experiment", options("experiment"))
def test_an_experiment_goes_with_another_precision_and_the_smoke_mode(experiment: str) -> None:
    assert problems(f"experiment={experiment}", "precision=fp16_pure", "debug=smoke") == []


@pytest.mark.parametrize("name", options("sweeps"))
def test_a_named_sweep_has_a_mode_factors_and_a_baseline_among_them(name: str) -> None:
    """Each arm composes, the baseline is one of them, and the file alone makes it a sweep."""
    content = yaml.safe_load((CONF_DIR / "sweeps" / f"{name}.yaml").read_text())
    assert content["hydra"]["mode"] == "MULTIRUN"
    params = {key: str(value).split(",") for key, value in content["hydra"]["sweeper"]["params"].items()}
    for key in ("baseline", "again"):
        for part in content["sweep"].get(key, "").split(",") if key in content["sweep"] else ():
            factor, _, level = part.partition("=")
            assert level in params[factor]
    seeds = params.pop("seed")
    assert len(seeds) >= (2 if name == "smoke" else 3)
    for levels in product(*params.values()):
        arm = [f"{key}={value}" for key, value in zip(params, levels, strict=True)]
        config = typed(f"+sweeps={name}", *arm, f"seed={seeds[-1]}", *NEEDS.get(f"sweeps/{name}", []))
        assert (find_problems(config), config.seed, config.sweep.name) == ([], int(seeds[-1]), name)


@pytest.mark.parametrize("name", options("sweeps"))
def test_a_named_sweep_says_beforehand_what_it_asks_and_how_it_is_judged(name: str) -> None:
    text = (CONF_DIR / "sweeps" / f"{name}.yaml").read_text()
    content = yaml.safe_load(text)
    assert re.search(rf"^#   grpo-exp -m \+sweeps={name}\b", text, re.M), "the command that runs it"
    assert content["sweep"].keys() >= {"name", "question", "baseline", "metric", "window", "failures"}
    assert "?" in content["sweep"]["question"]
    assert content["runs_dir"] == f"runs/{name}"


def test_no_option_file_repeats_a_default_of_its_dataclass() -> None:
    defaults = plain(default_config())
    for group in GROUPS:
        for option in options(group):
            content = yaml.safe_load((CONF_DIR / group / f"{option}.yaml").read_text()) or {}
            is_global = group in content
            given = flat(content if is_global else {group: content}) if content else {}
            repeated = [key for key, value in given.items() if value != "???" and defaults.get(key) == number(value)]
            assert repeated == [], f"{group}/{option}"


def test_the_primary_config_chooses_options_and_sets_nothing() -> None:
    """E12: no ``override`` of a group of ours there, for it would beat an experiment; ``_self_`` comes before experiments."""
    content = yaml.safe_load((CONF_DIR / "config.yaml").read_text())
    entries = content.pop("defaults")
    assert set(content) == {"hydra"}
    names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
    assert names.index("_self_") < names.index("experiment") < names.index("debug")
    assert all(name.startswith("override hydra/") for name in names if name.startswith("override"))


@pytest.mark.parametrize("form", ["experiment=phantom_clip", "+experiment=phantom_clip"])
def test_the_command_line_wins_over_an_experiment(form: str) -> None:
    """E12: in both forms, for the values of the group and for the choice that is recorded."""
    job = compose([form, "precision=fp16"])
    config = to_typed(job.config)
    assert job.choices["precision"] == "fp16"
    assert job.choices["task"] == "shortest"
    assert config.precision.loss_scale.mode is LossScaleMode.dynamic
    assert config.precision.rollout is None


def test_an_experiment_alone_chooses_its_precision() -> None:
    job = compose(["experiment=phantom_clip"])
    assert job.choices["precision"] == "fp32_rollout_bf16"
    assert to_typed(job.config).precision.rollout == "bf16"


def test_values_on_the_command_line_win_over_the_smoke_mode() -> None:
    assert typed("debug=smoke", "trainer.max_steps=7").trainer.max_steps == 7
    assert typed("+debug=smoke").trainer.max_steps == 4


def test_the_triple_differs_only_in_compute_and_loss_scale() -> None:
    configs = [plain(typed(f"precision={name}")) for name in ("fp32", "bf16", "fp16")]
    differing = {key for key in configs[0] if len({str(config[key]) for config in configs}) > 1}
    assert differing == {"precision.compute", "precision.loss_scale.mode"}


def test_the_pure_fp16_option_brings_an_epsilon_that_fp16_can_hold() -> None:
    config = typed("precision=fp16_pure")
    assert config.optim.eps == 1e-4 != OptimConfig.eps
    assert {site.name for site in resolve_sites(config.precision, {}, "fp32").values()} == {"fp16"}


def test_the_default_precision_follows_the_checkpoint_on_both_sides() -> None:
    for own in ("fp32", "bf16", "fp16"):
        sites = resolve_sites(typed().precision, {}, own)
        assert {name: site.name for name, site in sites.items()} == dict.fromkeys(sites, own) | {
            "optimizer_state": "fp32"
        }


SPELLINGS = {
    "bf16": ["bf16", "bfloat16", "torch.bfloat16", "BF16", "BFloat16", "Torch.BFloat16"],
    "fp16": ["fp16", "float16", "half", "torch.float16", "torch.half", "FP16", "Half", "Float16"],
    "fp32": ["fp32", "float32", "float", "torch.float32", "torch.float", "FP32", "Float"],
    "auto": ["auto", "AUTO", "Auto"],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_of_a_dtype_is_accepted_on_the_command_line_and_in_python(name: str) -> None:
    """A5."""
    config = shared("precision=fp32")
    for spelling in SPELLINGS[name]:
        assert normalise([f"precision={spelling}"]) == [f"precision={name}"]
        assert normalise([f"precision={spelling}, {spelling.upper()}"]) == [f"precision={name},{name}"]
        assert load_precision(spelling) == load_precision(name)
        for site in ("params", "rollout", "wire"):
            precision = replace(config.precision, **{site: spelling})
            assert find_problems(replace(config, precision=precision, model=replace(config.model))) == []


def test_spellings_pass_through_hydra_as_they_are() -> None:
    """A5."""
    job = compose(["precision=torch.BFloat16", "precision.rollout=Half", "model.init_kwargs.dtype=torch.float32"])
    config = to_typed(job.config)
    assert (job.choices["precision"], config.precision.rollout) == ("bf16", "Half")
    assert (config.model.init_kwargs, find_problems(config)) == ({"dtype": "torch.float32"}, [])


def test_every_spelling_of_a_dtype_is_accepted_in_a_file_of_the_user(tmp_path: Path) -> None:
    """A5: composed as the command line does, from a folder given with --config-dir."""
    (tmp_path / "precision").mkdir()
    spellings = [*SPELLINGS["bf16"], "Half", "torch.float32"]
    for index, spelling in enumerate(spellings):
        (tmp_path / "precision" / f"mine{index}.yaml").write_text(
            f"params: fp32\nrollout: {spelling}\nwire: ' {spelling} '\n"
        )
    script = (
        "import sys\nfrom grpo_exp.config.compose import run_app, to_typed\nfrom grpo_exp.checks import find_problems\n"
        "folder, count = sys.argv[1:]\nfor index in range(int(count)):\n"
        "    check = lambda job: print(find_problems(to_typed(job.config))) or 0\n"
        "    run_app(['--config-dir', folder, f'precision=mine{index}'], check, find_problems)\n"
    )
    arguments = [sys.executable, "-W", "error", "-c", script, str(tmp_path), str(len(spellings))]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[]\n" * len(spellings)


def test_a_model_dictionary_can_be_filled_key_by_key_or_as_a_whole() -> None:
    assert typed("model.init_kwargs.attn_implementation=eager").model.init_kwargs == {"attn_implementation": "eager"}
    whole = typed("model.init_kwargs={dtype: bfloat16, revision: main}").model.init_kwargs
    assert whole == {"dtype": "bfloat16", "revision": "main"}


def test_numbers_in_scientific_notation_are_numbers_in_files_and_on_the_command_line() -> None:
    assert typed("optim.lr=1e-5").optim.lr == 1e-5
    assert typed("optim=adamw").optim.lr == 1e-6


def test_a_value_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """E13."""
    monkeypatch.setenv("STEPS_OF_THIS_TEST", "12")
    assert typed("trainer.max_steps=${oc.env:STEPS_OF_THIS_TEST}").trainer.max_steps == 12
    assert typed("task.path=${oc.env:NOT_SET_ANYWHERE,null}").task.path is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.path=${oc.env:NOT_SET_ANYWHERE}", "task.path=.*set the environment variable NOT_SET_ANYWHERE"),
        ("task.path=${oc.env:NOT_SET_ANYWHERE,???}", "task.path=.*NOT_SET_ANYWHERE.*is to be filled in"),
        ("tracker.tags=[a,'${oc.env:NOT_SET_ANYWHERE}']", r"tracker.tags\[1\]=.*NOT_SET_ANYWHERE"),
        ("model.init_kwargs.token=${oc.env:NOT_SET_ANYWHERE}", "model.init_kwargs.token=.*NOT_SET_ANYWHERE"),
        ("task.path=${trainer.nothing}", "task.path=.*trainer.nothing"),
        ("trainer.max_steps=???", "trainer.max_steps=.*has no default"),
        ("+trainer.unheard_of=1", "trainer.unheard_of='1'.*no such key"),
        ("+unheard_of=1", "unheard_of='1'.*no such key"),
        ("trainer.max_steps=${oc.env:PATH}", "trainer.max_steps=.*a whole number"),
    ],
)
def test_what_cannot_be_resolved_is_named_with_its_key(override: str, message: str) -> None:
    """E13: nothing of it is noticed only when the value is first used."""
    with pytest.raises(ConfigError, match=message):
        typed(override)


def test_overrides_are_recorded_as_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THIS_TEST", "swordfish")
    job: Composed = compose(["task.path=${oc.env:SECRET_OF_THIS_TEST}"])
    assert job.overrides == ["task.path=${oc.env:SECRET_OF_THIS_TEST}"]
    assert job.start == Path(os.getcwd())


def test_a_shipped_precision_is_loaded_by_name_without_hydra() -> None:
    assert load_precision("bf16_head32") == PrecisionConfig(
        params="fp32", compute="bf16", head="fp32", rollout_head="fp32"
    )
    with pytest.raises(ConfigError, match=r"precision='bfloat': allowed: .*bf16_head32.*did you mean bf16\?"):
        load_precision("bfloat")


def plain(config: Config) -> dict[str, Any]:
    return flat(OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {
            key: leaf
            for name, item in value.items()
            for key, leaf in flat(item, f"{prefix}.{name}" if prefix else name).items()
        }
    return {prefix: value}


def number(value: Any) -> Any:
    """PyYAML reads ``1.0e-4`` as a number and ``1e-4`` as text; both are meant as numbers."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
