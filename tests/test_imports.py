"""Imports point one way, and what is heavy is imported where it is needed and nowhere else."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from grpo_exp.config.compose import PACKAGE

ROOT = PACKAGE.parent
LAYERS = (
    {"allocator", "arguments", "errors"},
    {"assets", "config", "jsonl"},
    {"distributed.launched", "sync.names"},
    {"alarm", "algo", "callbacks", "folder", "kernels", "manifest", "precision", "rollout.types", "tasks.types"},
    {
        "batch",
        "bounds",
        "checkpoint",
        "device",
        "distributed",
        "head",
        "lora",
        "metrics",
        "observe",
        "optim",
        "overflow",
        "parts",
        "passes",
        "policy",
        "prefix",
        "recording",
        "sync",
        "token_batch",
        "weights",
    },
    {"rollout", "tasks", "track", "tokens"},
    {
        "args",
        "checks",
        "decompose",
        "details",
        "evaluating",
        "first_sync",
        "keep",
        "lifecycle",
        "record",
        "saving",
        "trainer",
        "updating",
    },
    {"distributed.follow", "progress", "run"},
    {"__main__", "cli", "fetch", "launch", "plan", "probe_grid", "report"},
)
"""Each layer imports from itself and from those above it in this list."""

HEAVY = {"torch", "transformers", "accelerate", "wandb", "vllm", "numpy", "safetensors"}


def modules() -> dict[str, Path]:
    """Dotted name below grpo_exp → file."""
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Absolute names that a file imports, each with whether that is at module level; not what is for type checkers."""
    package = list(path.relative_to(ROOT).parent.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return
            case ast.Import(names=names):
                found.extend((alias.name, top) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = [*package[: len(package) - level + 1], module or ""] if level else [module or ""]
                prefix = ".".join(part for part in base if part)
                found.extend((f"{prefix}.{alias.name}", top) for alias in names)
        for child in ast.iter_child_nodes(node):
            visit(child, top and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(tree, True)
    return found


def layer(module: str) -> int:
    """The layer of the longest name that the module is or lies below."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        for index, names in enumerate(LAYERS):
            if ".".join(parts[:length]) in names:
                return index
    raise AssertionError(f"grpo_exp.{module} is in no layer")


def ours(path: Path, only_top: bool = False) -> Iterator[str]:
    """Modules of grpo_exp that a file imports, without ``grpo_exp.``."""
    known = modules()
    for name, top in imports(path):
        if not name.startswith("grpo_exp.") or (only_top and not top):
            continue
        target = name.removeprefix("grpo_exp.")
        if (found := target if target in known else target.rpartition(".")[0]) in known:
            yield found


def test_every_module_has_a_layer_and_every_layer_is_used() -> None:
    used = {layer(name) for name in modules()}
    assert used == set(range(len(LAYERS)))


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_one_way(module: str) -> None:
    """Also those inside functions: a module knows nothing of what is built on it."""
    upward = [target for target in ours(modules()[module]) if layer(target) > layer(module)]
    assert upward == []


def test_no_module_imports_itself_by_a_detour() -> None:
    """A cycle that only works because of the order in which names are bound."""
    known = modules()
    graph = {name: {t for t in ours(path, only_top=True) if t != name} for name, path in known.items()}
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        assert name not in trail, " → ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for target in graph.get(name, ()):
                walk(target, [*trail, name])
            done.add(name)

    for name in graph:
        walk(name, [])


@pytest.mark.parametrize(("package", "home"), [("wandb", "track.wandb"), ("vllm", "rollout.vllm")])
def test_an_optional_package_is_imported_by_one_file_and_inside_functions(package: str, home: str) -> None:
    for module, path in modules().items():
        found = [top for name, top in imports(path) if name.split(".")[0] == package]
        assert not found or (module.startswith(home) and not any(found)), module


def test_only_the_composing_files_know_hydra() -> None:
    knowing = {
        module for module, path in modules().items() if any(n.split(".")[0] == "hydra" for n, _ in imports(path))
    }
    assert knowing == {"config.compose", "config.messages"}


def test_config_launch_report_and_cli_name_no_heavy_package() -> None:
    light = [
        module
        for module in modules()
        if module.split(".")[0] in ("config", "launch", "report", "cli", "checks", "assets")
    ]
    for module in light:
        heavy = {name.split(".")[0] for name, _ in imports(modules()[module])} & HEAVY
        assert not heavy, module


def test_the_launcher_package_is_a_namespace_and_light() -> None:
    """Every Hydra application of the environment imports it."""
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
    for path in (ROOT / "hydra_plugins").rglob("*.py"):
        names = {name for name, top in imports(path) if top}
        ours = {name for name in names if name.startswith("grpo_exp.")}
        assert ours <= {"grpo_exp.launch.sbatch.SlurmOptions"}, "a plain dataclass, in a module that is light itself"
        at_top = {name.split(".")[0] for name in names - ours}
        assert at_top <= {"hydra", "hydra_plugins", "omegaconf", "dataclasses", "typing", "collections"}, path
    light = {name.split(".")[0] for name, top in imports(PACKAGE / "launch" / "sbatch.py") if top} - {"grpo_exp"}
    assert light <= set(sys.stdlib_module_names)


SCRIPT = """
import sys
from grpo_exp.config.compose import compose, to_typed
from grpo_exp.config.freeze import freeze
from grpo_exp.checks import find_problems
from grpo_exp.launch.prepare import check_all, prepare_all
jobs = [compose([f"precision={name}", "tracker=wandb", f"runs_dir={sys.argv[1]}"]) for name in ("fp32", "bf16")]
config = to_typed(jobs[0].config)
assert find_problems(config) == []
freeze(config)
planned = prepare_all(jobs, check_all(jobs), retry_failed=False)
import grpo_exp.launch.local, grpo_exp.run, grpo_exp.cli, grpo_exp.report.compare
print(len(planned), *sorted({"torch", "transformers", "wandb", "accelerate"} & set(sys.modules)))
"""


def test_composing_checking_freezing_and_planning_a_sweep_load_nothing_heavy(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
