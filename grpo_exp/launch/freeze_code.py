"""The source that a job runs is the one it was submitted with: a copy of the package beside the run folders, one per content."""

import hashlib
import os
import shutil
from pathlib import Path

from ..config.compose import CONF_DIR, PACKAGE

LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "conf")


def code_digest() -> str:
    """Twelve hex digits over every file of the package and of conf/."""
    found = hashlib.sha256()
    for root in (PACKAGE, CONF_DIR):
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:12]


def code_folder(parent: Path) -> Path:
    """Where the copy is, or will be: a folder to put on ``PYTHONPATH``."""
    return parent / f"code-{code_digest()}"


def copy_code(target: Path) -> None:
    """Make the copy unless it is there; complete or not at all."""
    if target.is_dir():
        return
    half = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.copytree(PACKAGE, half / PACKAGE.name, ignore=LEFT_OUT)
    shutil.copytree(CONF_DIR, half / PACKAGE.name / "conf")
    try:
        half.rename(target)
    except OSError:  # another command was quicker
        shutil.rmtree(half)
