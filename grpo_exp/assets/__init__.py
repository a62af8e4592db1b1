"""Models by a name that is the same on every machine.

``asset:tiny`` is the 0.1 M-parameter model that ships inside the package and that ``scripts/build_tiny_model.py`` builds;
``fetched:NAME`` is one that ``grpo-exp fetch-model NAME`` made, or its namesake on the hub. Imports no torch.
"""

from pathlib import Path

from ..errors import ConfigError
from . import fetched

PREFIX = "asset:"
SHIPPED = ("tiny",)
AS_NAMED = "as named"


def path(name: str) -> Path:
    """The absolute path of a shipped file or folder; ``FileNotFoundError`` where there is none of that name."""
    found = Path(__file__).resolve().parent / name
    if not found.exists():
        raise FileNotFoundError(f"grpo_exp ships no asset named {name!r}")
    return found


def locate(name_or_path: str) -> str:
    """``asset:NAME`` and ``fetched:NAME`` as what ``from_pretrained`` takes on this machine; anything else as it is.

    Configurations name models with the prefix, so that a frozen configuration is the same on every machine.
    """
    if name_or_path.startswith(PREFIX):
        return str(path(name_or_path.removeprefix(PREFIX)))
    if name_or_path.startswith(fetched.PREFIX):
        return fetched.locate(name_or_path.removeprefix(fetched.PREFIX))
    return name_or_path


def check_known(key: str, name_or_path: str) -> None:
    """Raises ConfigError for a prefix with a name that is none behind it."""
    if name_or_path.startswith(PREFIX) and name_or_path.removeprefix(PREFIX) not in SHIPPED:
        raise ConfigError(key, name_or_path, [PREFIX + name for name in SHIPPED])
    if name_or_path.startswith(fetched.PREFIX):
        fetched.check_known(key, name_or_path.removeprefix(fetched.PREFIX))


def problem(key: str, name_or_path: str) -> ConfigError | None:
    """Why a model cannot be had on this machine, as far as it can be told within seconds."""
    name = name_or_path.removeprefix(fetched.PREFIX)
    if name == name_or_path or name not in fetched.MODELS:
        return None
    reason = fetched.problem(name)
    return None if reason is None else ConfigError(key, name_or_path, "", f"{reason}; run: grpo-exp fetch-model {name}")


def source(name_or_path: str) -> str:
    """Where weights come from that a name may stand for in more than one way; the same words for the same weights."""
    if name_or_path.startswith(fetched.PREFIX):
        return fetched.source(name_or_path.removeprefix(fetched.PREFIX))
    return AS_NAMED
