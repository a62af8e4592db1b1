"""Functions named in a configuration: ``package.module:function`` or ``path/to/file.py:function``.

Checking a name imports nothing; loading is left to the process that runs the function.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_exp.tasks import static

ALLOWED = "package.module:function or path/to/file.py:function"
_NAME = r"[A-Za-z_]\w*"
_DOTTED = re.compile(rf"{_NAME}(\.{_NAME})*")


def split(import_path: str) -> tuple[str, str]:
    """Module or file, and the name in it. The last colon counts: a Windows path has one of its own."""
    module, _, name = import_path.rpartition(":")
    return module, name


def problem(import_path: str) -> str | None:
    """Why there can be no such function, as far as it can be told without importing; None if nothing speaks against it."""
    module, name = split(import_path)
    if not module or not name:
        return "there is no colon between module and function"
    if not _DOTTED.fullmatch(name):
        return f"{name!r} is not the name of a function"
    if module.endswith(".py"):
        return static.problem(module, name) if Path(module).is_file() else f"there is no file {module} in {Path.cwd()}"
    if "/" in module or "\\" in module:
        return f"{module} is not a .py file"
    return static.problem(module, name) if _DOTTED.fullmatch(module) else f"{module!r} is not the name of a module"


def absolute(import_path: str) -> str:
    """The same with the path of a file made absolute, for a process that may work in another folder."""
    module, name = split(import_path)
    return f"{Path(module).resolve()}:{name}" if module.endswith(".py") else import_path


def load(import_path: str) -> Callable[..., Any]:
    """Import the function. Errors of the user's module propagate; a name that is not there is an ``ImportError``."""
    name, attribute = split(import_path)
    module = load_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ImportError(f"{import_path}: there is no {attribute!r} in {name}")
        found = getattr(found, part)
    if not callable(found):
        raise ImportError(f"{import_path} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def load_file(path: Path) -> ModuleType:
    """Import a file that is in no package; it can import its neighbours, as a script can."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look their module up here
    spec.loader.exec_module(module)
    return module
