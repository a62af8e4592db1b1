"""The frozen configuration: plain values, one hash for what computes the same, names that are safe and short."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.freeze import MAX_NAME, config_hash, freeze, run_name
from grpo_exp.config.schema import Config
from grpo_exp.errors import ConfigError

SAFE = re.compile(r"[A-Za-z0-9._-]+")


@pytest.fixture(scope="module")
def config() -> Config:
    return to_typed(compose(["precision=fp16"]).config)


def test_a_frozen_configuration_is_plain_yaml_that_gives_the_same_configuration(config: Config) -> None:
    """F6: no placeholder and no interpolation is left; enums and dtypes are words."""
    frozen = freeze(config)
    text = frozen.to_yaml()
    assert "${" not in text
    assert "???" not in text
    assert "!!" not in text
    values = yaml.safe_load(text)
    json.dumps(values, allow_nan=False)
    assert values["precision"]["loss_scale"]["mode"] == "dynamic"
    assert freeze(to_typed(values)) == frozen
    assert to_typed(values) == replace(config, runs_dir=str(Path("runs").resolve()))


def test_what_changes_no_result_changes_no_hash(config: Config) -> None:
    elsewhere = replace(config, runs_dir="elsewhere", sweep=replace(config.sweep, name="other"))
    assert freeze(replace(elsewhere, tracker=replace(config.tracker, tags=["a"]))).hash == freeze(config).hash
    assert freeze(replace(config, seed=1)).hash != freeze(config).hash


def test_two_spellings_of_a_dtype_are_one_run(config: Config) -> None:
    """A5: names, long names and torch's own objects."""

    def spelled(rollout: str, dtype: object) -> str:
        precision = replace(config.precision, rollout=rollout)
        return freeze(
            replace(config, precision=precision, model=replace(config.model, init_kwargs={"dtype": dtype}))
        ).hash

    assert spelled("bf16", "fp32") == spelled(" torch.BFloat16 ", "Float") == spelled("bfloat16", torch.float32)
    assert spelled("bf16", "fp32") != spelled("fp16", "fp32")


def test_the_order_of_keys_and_of_overrides_does_not_matter(config: Config) -> None:
    values = freeze(config).values
    assert config_hash(dict(reversed(values.items()))) == config_hash(values)
    one, other = (to_typed(compose(o).config) for o in (["seed=1", "optim.lr=1e-4"], ["optim.lr=0.0001", "seed=1"]))
    assert freeze(one).hash == freeze(other).hash


def test_relative_paths_are_made_absolute_from_the_folder_of_the_command(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    task = replace(config.task, path="data/train.jsonl", eval_path="~/eval.jsonl", reward="rewards.py:score")
    model = replace(config.model, name_or_path="model", tokenizer="./model")
    values = freeze(replace(config, task=task, model=model)).values
    assert values["task"]["path"] == str(tmp_path / "data" / "train.jsonl")
    assert values["task"]["eval_path"] == str(Path("~/eval.jsonl").expanduser())
    assert values["task"]["reward"] == f"{tmp_path}/rewards.py:score"
    assert values["model"]["name_or_path"] == values["model"]["tokenizer"] == str(tmp_path / "model")
    assert values["runs_dir"] == str(tmp_path / "runs")


def test_names_that_are_no_paths_stay_as_they_are(config: Config) -> None:
    task = replace(config.task, reward="package.module:score")
    values = freeze(replace(config, task=task, model=replace(config.model, name_or_path="org/name"))).values
    assert (values["task"]["reward"], values["model"]["name_or_path"]) == ("package.module:score", "org/name")


@pytest.mark.parametrize("left", ["???", "${oc.env:X}", "before ${x} after"])
def test_a_placeholder_is_never_frozen(config: Config, left: str) -> None:
    """E13."""
    with pytest.raises(ConfigError, match=r"task\.prompt_field=.*placeholder"):
        freeze(replace(config, task=replace(config.task, prompt_field=left)))


def test_a_run_is_named_from_what_varies_and_its_hash() -> None:
    """F12."""
    assert run_name({"precision": "bf16", "seed": "0"}, "01234567") == "precision-bf16_seed-0_01234567"
    assert run_name({"optim.lr": "1e-05", "+experiment": "sort"}, "01234567") == "lr-1e-05_-experiment-sort_01234567"
    assert run_name({}, "01234567") == "run_01234567"


def test_a_long_model_name_with_a_slash_becomes_one_short_path_component(config: Config, tmp_path: Path) -> None:
    """E8: and two that share a long beginning stay distinct."""
    ids = [f"org/{'name-' * 40}{end}" for end in "ab"]
    names = []
    for name in ids:
        digest = freeze(replace(config, model=replace(config.model, name_or_path=name))).hash
        names.append(run_name({"model.name_or_path": name}, digest))
        (tmp_path / names[-1]).mkdir()
    assert names[0] != names[1]
    assert all(SAFE.fullmatch(name) and len(name) <= 128 for name in names)


@given(st.dictionaries(st.text(min_size=1, max_size=40), st.text(max_size=300), max_size=5))
def test_whatever_varies_the_name_is_safe_and_ends_in_the_hash(factors: dict[str, str]) -> None:
    """E8."""
    name = run_name(factors, "01234567")
    assert SAFE.fullmatch(name)
    assert len(name) <= MAX_NAME
    assert name.endswith("_01234567")
    assert not name.startswith((".", "-"))
