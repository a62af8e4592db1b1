"""What a run ran on: versions, commit, hardware. Imports no torch and starts nothing slow."""

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
PACKAGES = (
    "grpo-exp",
    "torch",
    "transformers",
    "accelerate",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "numpy",
    "wandb",
    "vllm",
)


def about_this_machine() -> dict[str, Any]:
    """The sections of a manifest that say what a run runs on."""
    return {"versions": versions(), "git": git_state(PACKAGE), "hardware": hardware()}


def versions() -> dict[str, str]:
    """Installed versions of the packages that a run depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package.replace("-", "_")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that the package runs from; None where it is none."""
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if commit is None else bool(status)}


def git_diff(folder: Path) -> bytes | None:
    """What tracked files of that checkout have beyond the commit, for ``git apply``; None where it is no checkout."""
    if (top := _git(folder, "rev-parse", "--show-toplevel")) is None:
        return None
    command = ["git", "-C", top, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-color"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def hardware(device: str = "cpu") -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device": device,
        "gpus": _gpu_names() if device == "cuda" else [],
    }


def _git(folder: Path, *args: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
