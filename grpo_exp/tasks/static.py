"""What can be said of a function named in a configuration by reading its source, without importing it.

Importing runs the user's code, may take minutes and may hang: that is for the process that can be ended. Reading finds a
module or name that is not there, a syntax error and a name that stands for data. What a module makes up while it runs is
given the benefit of the doubt.
"""

import ast
import difflib
import sys
import tokenize
from collections.abc import Sequence
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

DATA = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.SetComp, ast.DictComp)
DYNAMIC = {"globals", "vars", "locals", "exec", "setattr", "__getattr__", "*"}


def problem(module: str, name: str) -> str | None:
    """Why the function ``name`` cannot be had from ``module``, a dotted name or a file; None if nothing speaks against it."""
    if module.endswith(".py"):
        return _problem_in(Path(module), name, None)
    spec = find(module)
    if spec is None:
        return f"there is no module {module} among the installed ones or in {Path.cwd()}"
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return _problem_in(Path(spec.origin), name, spec)


def find(module: str) -> ModuleSpec | None:
    """Where a module is, nothing imported, also none of the packages it lies in. The folder of the command comes last."""
    parts, locations = module.split("."), None
    spec: ModuleSpec | None = None
    for index in range(len(parts)):
        found = _find(".".join(parts[: index + 1]), locations)
        if found is None or (index + 1 < len(parts) and found.submodule_search_locations is None):
            return None
        spec, locations = found, list(found.submodule_search_locations or ())
    return spec


def _find(name: str, locations: Sequence[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:  # also those of packages that are installed as editable
        spec = finder.find_spec(name, locations) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return PathFinder.find_spec(name, [str(Path.cwd())]) if locations is None else None


def _problem_in(file: Path, name: str, package: ModuleSpec | None) -> str | None:
    first, dot, _ = name.partition(".")
    try:
        modified = file.stat().st_mtime_ns
        names = _names(file, modified)
    except SyntaxError as error:
        return f"{file}, line {error.lineno}: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{file}: {error}"
    if first in names:
        return None if dot or names[first] else f"{first} in {file} is no function"
    if names.keys() & DYNAMIC:
        return None
    if package is not None and package.submodule_search_locations and find(f"{package.name}.{first}"):
        return None
    near = difflib.get_close_matches(first, [known for known in names if names[known]], n=1)
    return f"there is no {first} in {file}" + (f"; did you mean {near[0]}?" if near else "")


@lru_cache(maxsize=64)
def _names(file: Path, modified: int) -> dict[str, bool]:
    """Every name that a module binds, and whether it may be called; a sweep asks once."""
    with tokenize.open(file) as text:
        tree = ast.parse(text.read(), str(file))
    visitor = _Names()
    visitor.visit(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            visitor.names |= dict.fromkeys(node.names, True)
        elif isinstance(node, ast.Name) and node.id in DYNAMIC:
            visitor.names[node.id] = True
    return visitor.names


class _Names(ast.NodeVisitor):
    """Collects what the top level of a module binds, also inside ``if``, ``try`` and loops."""

    def __init__(self) -> None:
        self.names: dict[str, bool] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.names[node.name] = True

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        pass

    def visit_alias(self, node: ast.alias) -> None:
        self.names[node.asname or node.name.partition(".")[0]] = True

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.names[node.id] = True

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = not isinstance(node.value, DATA)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and node.value is not None:
            self.names[node.target.id] = not isinstance(node.value, DATA)
