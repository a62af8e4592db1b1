"""``grpo-exp sync PATH…``: upload what runs have kept offline, with wandb's own ``wandb sync``, run by run.

An interrupted and resumed run has one offline folder per attempt; all of them go into one call, so that wandb uploads them
in the order of their start, as one run. What a kill left torn is cut off first. What wandb has uploaded it marks, and it is
left alone the next time.
"""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import ConfigError, RunFailed
from .wandb_options import has_api_key, is_installed, server_url
from .wandb_record import mend

CONNECT_S = 10.0
UPLOAD_S = 1800.0  # for one run: wandb itself would try for days
RUNNING = "still running"
USAGE = "grpo-exp sync RUN_OR_SWEEP…"


def main(argv: Sequence[str], run_folders: Callable[[Path], Iterable[Path]], is_running: Callable[[Path], bool]) -> int:
    """The command. 0: all there is has been uploaded; 1: some of it has not.

    A run that goes on is left for later: wandb would mark what there is of it as all.

    Args:
        run_folders: the run folders at or below a path.
        is_running: of a run folder.
    """
    if not argv or any(word.startswith("-") for word in argv):
        raise ConfigError("sync", " ".join(argv), f"run folders, or folders of them: {USAGE}")
    for word in argv:
        if not Path(word).is_dir():
            raise ConfigError("sync", word, "a folder that is there")
    if not is_installed("wandb"):
        raise ConfigError("sync", "wandb", "an installed package", "pip install wandb")
    if not has_api_key():
        raise ConfigError("sync", "no API key", "WANDB_API_KEY, or what `wandb login` stores", "run `wandb login`")
    check_server(server_url(), "nothing was uploaded")
    runs = list(dict.fromkeys(run for word in argv for run in run_folders(Path(word))))
    states = [_left_for_later(run) if segments(run) and is_running(run) else sync_run(run) for run in runs]
    counts = {state: states.count(state) for state in ("uploaded", "failed", RUNNING, "nothing to upload")}
    print(", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no runs found")
    return int("failed" in states or RUNNING in states)


def _left_for_later(run: Path) -> str:
    print(f"{run.name}: {RUNNING}, to be uploaded when it has ended", file=sys.stderr)
    return RUNNING


def check_server(url: str, so: str) -> None:
    """wandb would try for minutes, run by run. Behind a proxy only it can tell.

    Args:
        so: what has not been done then.

    Raises:
        RunFailed: nobody answers there.
    """
    parts = urlsplit(url)
    if getproxies().get(parts.scheme):
        return
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        raise RunFailed(f"{so}: {url} cannot be reached ({error})") from error


def sync_run(run: Path, limit_s: float = UPLOAD_S) -> str:
    """``uploaded``, ``failed`` or ``nothing to upload``; said in a line, with wandb's last words where it failed."""
    waiting = segments(run)
    if not waiting:
        print(f"{run.name}: nothing to upload")
        return "nothing to upload"
    for record in (record for folder in waiting for record in folder.glob("run-*.wandb")):
        mend(record)
    command = [sys.executable, "-m", "wandb", "sync", *map(str, waiting)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        print(f"{run.name}: failed, not done within {limit_s:g} s", file=sys.stderr)
        return "failed"
    # wandb ends with 0 also where some files were refused; what it has uploaded it marks
    left = segments(run)
    if done.returncode == 0 and not left:
        print(f"{run.name}: uploaded {len(waiting)} of {len(waiting)}")
        return "uploaded"
    print(f"{run.name}: failed, {len(waiting) - len(left)} of {len(waiting)} uploaded", file=sys.stderr)
    for line in (done.stdout + done.stderr).strip().splitlines()[-5:]:
        print(f"  {line}", file=sys.stderr)
    return "failed"


def segments(run: Path) -> list[Path]:
    """Offline folders of a run that wandb has not marked as uploaded, the oldest first."""
    return [
        folder
        for folder in sorted((run / "wandb").glob("offline-run-*"))
        if any(not record.with_name(record.name + ".synced").exists() for record in folder.glob("run-*.wandb"))
    ]
