"""What wandb is told: checked before anything starts, within its limits, without a network and without secrets."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_exp.config.schema import Backend, TrackerConfig, TrackerName, WandbMode
from grpo_exp.track import TrackedRun, validate
from grpo_exp.track import wandb_options as options

KEY = "k" * 40


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home folder of nobody, with an environment that says nothing of wandb."""
    for name in ("API_KEY", "MODE", "BASE_URL", "CONFIG_DIR", "IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def config(mode: WandbMode = WandbMode.auto, project: str = "p", entity: str | None = None) -> TrackerConfig:
    return TrackerConfig(name=TrackerName.wandb, mode=mode, project=project, entity=entity)


@pytest.mark.usefixtures("home")
def test_without_a_key_auto_is_offline() -> None:
    assert options.choose_mode(config()) == "offline"


def test_a_key_in_the_environment_makes_auto_online(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert options.choose_mode(config()) == "online"
    assert options.choose_mode(config(WandbMode.offline)) == "offline"


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com"])
def test_a_key_in_netrc_makes_auto_online(home: Path, host: str) -> None:
    (home / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    (home / ".netrc").chmod(0o600)
    assert options.choose_mode(config()) == "online"


@pytest.mark.parametrize("text", ["machine example.com login user password x\n", "machine \n what is this", "\x00"])
def test_a_netrc_of_others_or_a_broken_one_is_no_key(home: Path, text: str) -> None:
    (home / ".netrc").write_text(text)
    (home / ".netrc").chmod(0o600)
    assert not options.has_api_key()


def test_the_key_is_looked_up_for_the_server_in_use(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = home / "elsewhere"
    netrc.write_text(f"machine wandb.example.com\n  login user\n  password {KEY}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    assert not options.has_api_key()
    settings = home / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.com\n")
    assert options.has_api_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example.com")
    assert not options.has_api_key()
    settings.write_text("nonsense")
    assert not options.has_api_key()


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("given", "mode"), [("offline", "offline"), ("dryrun", "offline"), ("disabled", "disabled"), ("Online", "online")]
)
def test_the_environment_decides_where_the_setting_does_not(
    monkeypatch: pytest.MonkeyPatch, given: str, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", given)
    assert options.choose_mode(config()) == mode
    assert options.choose_mode(config(WandbMode.online)) == "online"
    assert validate(config()) == []


@pytest.mark.usefixtures("home")
def test_every_problem_is_named_with_its_key() -> None:
    errors = validate(config(WandbMode.online, project="team/lab", entity="a/b"))
    assert [error.key for error in errors] == ["tracker.project", "tracker.entity", "tracker.mode"]
    assert "wandb login" in str(errors[2])
    assert [error.key for error in validate(config(project=""))] == ["tracker.project"]
    assert [error.key for error in validate(config(project="x" * 129))] == ["tracker.project"]


@pytest.mark.usefixtures("home")
def test_a_mode_that_wandb_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "off")
    (error,) = validate(config())
    assert (error.key, error.value) == ("WANDB_MODE", "off")


@pytest.mark.usefixtures("home")
def test_a_tracker_that_is_off_is_not_checked() -> None:
    assert validate(TrackerConfig(project="a/b", mode=WandbMode.online)) == []


@pytest.mark.usefixtures("home")
def test_a_missing_package_is_named_even_beside_a_folder_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "wandb").mkdir()
    assert validate(config()) == []
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    (error,) = validate(config())
    assert (error.key, error.value) == ("tracker.name", "wandb")
    assert "pip install wandb" in str(error)


def test_the_id_is_made_once(tmp_path: Path) -> None:
    """F5: the id is kept in the run folder."""
    first = options.run_id(tmp_path)
    assert len(first) == options.ID_LENGTH
    assert set(first) <= set(options.ID_CHARACTERS)
    assert options.run_id(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["wandb_id"]
    (tmp_path / "wandb_id").write_text("Not an id/")
    assert options.run_id(tmp_path) not in (first, "Not an id/")


@given(st.text(max_size=300), st.sampled_from([64, 128]))
def test_a_short_text_stays_and_a_long_one_fits(text: str, limit: int) -> None:
    short = options.shorten(text, limit)
    assert len(short) <= limit
    assert len(text) > limit or short == text


def test_long_names_with_the_same_beginning_stay_distinct() -> None:
    """E8: two long ids that share a prefix are two names."""
    names = [f"org/{'x' * 200}{end}" for end in "ab"]
    first, second = (options.shorten(name, options.MAX_NAME) for name in names)
    assert (len(first), len(second)) == (128, 128)
    assert first != second


@given(st.lists(st.text(max_size=100), max_size=5))
def test_every_tag_is_one_that_wandb_accepts(tags: list[str]) -> None:
    cleaned = options.clean_tags(tags)
    assert all(1 <= len(tag) <= 64 and tag.isprintable() and tag == tag.strip() and "," not in tag for tag in cleaned)
    assert len(set(cleaned)) == len(cleaned)
    assert options.clean_tags(cleaned) == cleaned


def test_good_tags_stay_as_they_are() -> None:
    assert options.clean_tags(["b", "a b", "é=1", "b", " ", "x\ny"]) == ["b", "a b", "é=1", "x y"]


def test_the_configuration_is_plain_json_whatever_it_holds(tmp_path: Path) -> None:
    """F6: nested dictionaries, enums as names, odd values as text, nothing lost."""
    values = {"a": {"b": Backend.hf, "c": (1, None)}, "path": Path("x"), "set": {1}, "nan": float("nan")}
    found = options.run_config(TrackedRun(run_dir=tmp_path, name="r", config=values))
    flat = {"run/name": "r", "run/dir": str(tmp_path)}
    assert found == {"a": {"b": "hf", "c": [1, None]}, "path": "x", "set": "{1}", "nan": None} | flat
    json.dumps(found, allow_nan=False)


def test_an_omegaconf_configuration_is_resolved_too(tmp_path: Path) -> None:
    """F6: no ``${`` reaches wandb."""
    from omegaconf import OmegaConf

    values = OmegaConf.create({"a": {"dtype": "${b}"}, "b": "bf16"})
    found = options.run_config(TrackedRun(run_dir=tmp_path, name="r", config=values))  # type: ignore[arg-type]
    assert (found["a"], found["b"]) == ({"dtype": "bf16"}, "bf16")


def test_secrets_are_left_out_and_words_like_them_are_not(tmp_path: Path) -> None:
    values = {
        "init_kwargs": {"token": "hf_x", "use_token": True, "list": [{"api_key": "x"}]},
        "hub_token": "hf_x",
        "max_completion_tokens": 8,
        "tokenizer": "path",
        "token": None,
    }
    found = options.run_config(TrackedRun(run_dir=tmp_path, name="r", config=values))
    assert found["init_kwargs"] == {"token": "(redacted)", "use_token": True, "list": [{"api_key": "(redacted)"}]}
    assert (found["hub_token"], found["max_completion_tokens"], found["tokenizer"]) == ("(redacted)", 8, "path")
    assert found["token"] is None
    assert options.has_secret(found)
    assert not options.has_secret({"tokenizer": "path", "list": [{"x": 1}]})
