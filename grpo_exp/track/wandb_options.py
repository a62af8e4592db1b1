"""What wandb is told about a run: mode, id, names, tags and configuration, within the limits of its server.

Whether to go online is decided from the environment and from files alone: ``wandb.init`` without a network may wait for
a minute and a half, and without a key it asks for one. Importing this module imports neither wandb nor torch, because
the command line checks a configuration with it.
"""

import configparser
import hashlib
import importlib.util
import netrc
import os
import re
import secrets
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from grpo_exp.config.schema import TrackerConfig, TrackerName, WandbMode
from grpo_exp.errors import ConfigError
from grpo_exp.jsonl import Json, plain
from grpo_exp.track.base import TrackedRun

Mode = Literal["online", "offline", "disabled"]  # as wandb.init calls them

MAX_NAME = 128  # of a run, a group, a project
MAX_TAG = 64
ID_LENGTH = 12
ID_CHARACTERS = string.ascii_lowercase + string.digits
REDACTED = "(redacted)"

_REFUSED = "/\\#?%:"  # by wandb, in the name of a project
_SECRET = re.compile(r"(^|[_.-])(token|api_?key|secret|password|passwd|credentials?)$", re.IGNORECASE)
_SAAS_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")  # two names of one service: `wandb login` uses either
_MODES: dict[str, Mode] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def validate(config: TrackerConfig) -> list[ConfigError]:
    """Every problem of the tracker's settings, found without importing wandb and without a network."""
    if config.name is not TrackerName.wandb:
        return []
    errors: list[ConfigError] = []
    if not is_installed("wandb"):
        fix = "install it with `pip install wandb`, or set tracker=none"
        errors.append(ConfigError("tracker.name", "wandb", "none while the wandb package is missing", fix))
    for key, value in (("tracker.project", config.project), ("tracker.entity", config.entity)):
        if value is not None and (not 0 < len(value) <= MAX_NAME or set(value) & set(_REFUSED)):
            allowed = f"1 to {MAX_NAME} characters, none of {' '.join(_REFUSED)}"
            errors.append(ConfigError(key, value, allowed, "project and team are two settings, not one path"))
    if config.mode is WandbMode.online and not has_api_key():
        fix = "run `wandb login` or set WANDB_API_KEY"
        errors.append(ConfigError("tracker.mode", "online", "auto or offline while no API key is found", fix))
    given = os.environ.get("WANDB_MODE", "")
    if config.mode is WandbMode.auto and given and given.lower() not in _MODES:
        errors.append(ConfigError("WANDB_MODE", given, _MODES, "change or unset the environment variable"))
    return errors


def choose_mode(config: TrackerConfig) -> Mode:
    """``online``, ``offline`` or ``disabled``. An explicit ``tracker.mode`` wins over WANDB_MODE, that over the key."""
    match config.mode:
        case WandbMode.offline:
            return "offline"
        case WandbMode.online:
            return "online"
        case WandbMode.auto:
            given = os.environ.get("WANDB_MODE", "").lower()
            return _MODES.get(given) or ("online" if has_api_key() else "offline")


def has_api_key() -> bool:
    """Whether wandb will find credentials, looking where it looks: environment, settings file, netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if _settings_file().get("api_key"):
        return True
    host = urlsplit(server_url()).netloc
    hosts = _SAAS_HOSTS if host in _SAAS_HOSTS else (host,)
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        entries = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return False
    found = (entries.authenticators(name) for name in hosts)
    return any(entry is not None and entry[2] for entry in found)


def server_url() -> str:
    """Where wandb sends things to."""
    return os.environ.get("WANDB_BASE_URL") or _settings_file().get("base_url") or f"https://{_SAAS_HOSTS[0]}"


def run_id(run_dir: Path) -> str:
    """The id in ``RUN/wandb_id``, made at the first call: a resumed run goes on under the id that it had."""
    path = run_dir / "wandb_id"
    known = path.read_text().strip() if path.exists() else ""
    if len(known) >= 8 and set(known) <= set(ID_CHARACTERS):
        return known
    # secrets, not random: a tracker must not move the random state that the training draws from
    fresh = "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(fresh + "\n")
    temporary.replace(path)
    return fresh


def shorten(text: str, limit: int) -> str:
    """``text`` in at most ``limit`` characters. What is cut leaves a hash, so that different texts stay different."""
    if len(text) <= limit:
        return text
    return f"{text[: limit - 9]}-{hashlib.sha256(text.encode(errors='backslashreplace')).hexdigest()[:8]}"


def clean_tags(tags: Iterable[str]) -> list[str]:
    """Each tag once, of 1 to 64 printable characters without commas (which separate tags in WANDB_TAGS)."""
    words = (" ".join("".join(c if c.isprintable() and c != "," else " " for c in tag).split()) for tag in tags)
    return list(dict.fromkeys(shorten(word, MAX_TAG) for word in words if word))


def run_config(run: TrackedRun) -> dict[str, Json]:
    """The configuration as wandb shows it: nested, with the choices and factors as flat columns to group runs by.

    ``run/dir`` leads back from a run in wandb to its folder. A string under a key that names a secret is left out, and a
    value that JSON does not know is shown as text.
    """
    flat: dict[str, Json] = {"run/name": run.name, "run/dir": str(run.run_dir.resolve())}
    flat |= {f"choice/{group}": option for group, option in run.choices.items()}
    flat |= {f"factor/{key}": value for key, value in run.factors.items()}
    return {key: _shown(key, value) for key, value in run.config.items()} | flat


def shown_manifest(manifest: Mapping[str, object], hides_overrides: bool) -> dict[str, Json]:
    """What a run is made of, without secrets: overrides are text, in which one may be anywhere."""
    shown = {key: _shown(key, value) for key, value in manifest.items()}
    return shown | ({"overrides": [REDACTED]} if hides_overrides and "overrides" in shown else {})


def has_secret(config: Json) -> bool:
    """Whether :func:`run_config` has left something out."""
    match config:
        case dict():
            return any(has_secret(value) for value in config.values())
        case list():
            return any(has_secret(value) for value in config)
        case _:
            return config == REDACTED


def _shown(key: str, value: object) -> Json:
    match value:
        case Mapping():
            return {str(name): _shown(str(name), item) for name, item in value.items()}
        case list() | tuple():
            return [_shown(key, item) for item in value]
        case str() if value and _SECRET.search(key):
            return REDACTED
    try:
        return plain(value)
    except (TypeError, ValueError, RuntimeError):  # one odd value must not cost the whole configuration
        return str(value)


def is_installed(package: str) -> bool:
    """A folder of that name in the working directory, such as wandb leaves behind, is not the package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _settings_file() -> Mapping[str, str]:
    """What `wandb login` has stored beside the key, e.g. the address of a server of one's own."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(folder / "settings")
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
    return parser["default"] if parser.has_section("default") else {}
