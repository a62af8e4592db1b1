"""Runs of a wandb project as run folders again: what ``grpo-exp compare --wandb`` compares.

wandb's own history has no row for what was null, and steps that were done again as they were first. So a run keeps the files
that make up its folder beside its metrics in wandb, and here they are fetched in full, with wandb's own client.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml

from .. import jsonl
from ..errors import ConfigError, RunFailed
from .sync import check_server
from .wandb_options import MAX_NAME, has_api_key, is_installed, server_url, shorten, shown_manifest

if TYPE_CHECKING:
    import wandb
    from wandb.apis.public import Run

MANIFEST = "manifest.json"
KEPT = (MANIFEST, "status.json", "metrics.jsonl", "events.jsonl")
"""Files of a run folder that are uploaded with a run; the configuration is in wandb as such, without secrets."""
TIMEOUT_S = 30
NUM_FETCHES = 8  # runs at a time


class KeptFiles:
    """The files of a run folder that go with its run, as they are now and whenever they change.

    They lie in wandb's folder as links, relative ones so that the run folder can be moved before it is uploaded; the
    manifest as a copy, since its list of overrides may hold what the configuration in wandb does not show.

    Args:
        hides_overrides: the configuration has a secret, so the command line may have it too.
    """

    def __init__(self, run: "wandb.Run", run_dir: Path, hides_overrides: bool) -> None:
        self._run, self._run_dir, self._hides_overrides = run, run_dir, hides_overrides
        self._folder = Path(run.dir)
        self._told: set[str] = set()
        self._manifest_ns = -1

    def update(self) -> None:
        """Cheap where nothing is new: called with every row."""
        for name in KEPT:
            source = self._run_dir / name
            if name == MANIFEST:
                self._copy_manifest(source)
            elif name not in self._told and source.is_file():
                link = self._folder / name
                link.unlink(missing_ok=True)
                link.symlink_to(os.path.relpath(source.resolve(), self._folder.resolve()))
            if name not in self._told and (self._folder / name).is_file():
                self._told.add(name)
                self._run.save(str(self._folder / name), base_path=str(self._folder), policy="live", glob=False)

    def _copy_manifest(self, source: Path) -> None:
        try:
            changed_ns = source.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if changed_ns != self._manifest_ns:
            shown = shown_manifest(jsonl.read_json(source), self._hides_overrides)
            jsonl.write_json_atomic(self._folder / MANIFEST, shown)
            self._manifest_ns = changed_ns


def download(project: str, group: str | None, to: Path, origin: str) -> None:
    """Make a run folder below ``to`` for every run of ours.

    Args:
        project: ``ENTITY/PROJECT``, or ``PROJECT`` of the account's own entity.
        group: the name of a sweep, for its runs alone.
        origin: name of the file in it that gets the run's address.

    Raises:
        ConfigError: there is no such project, or no run of ours in it; or no wandb, no key.
        RunFailed: the server does not answer.
    """
    _check(project, "--wandb", "nothing was read")
    import wandb

    wandb.setup(wandb.Settings(silent=True))
    filters = {} if group is None else {"group": shorten(group, MAX_NAME)}
    try:
        api = wandb.Api(timeout=TIMEOUT_S)
        runs = [run for run in api.runs(project, filters, order="+created_at", lazy=False) if "run/name" in run.config]
        with ThreadPoolExecutor(NUM_FETCHES) as pool:  # nearly all of the time is waiting for answers
            list(pool.map(lambda run: _fetch(run, to / run.id, origin), runs))
    except ValueError as error:  # what wandb raises for a project that is not there
        raise ConfigError("--wandb", project, fix=_first_line(error)) from error
    except Exception as error:  # of the network, by several names
        raise RunFailed(f"wandb: {type(error).__name__}: {_first_line(error)}") from error
    if not runs:
        where = "no run" if group is None else f"no run of the group {group}"
        raise ConfigError("--wandb", project, fix=f"{where} that grpo-exp has logged is in it")


def upload_report(page: Path, project: str) -> None:
    """Log the HTML report as an artifact, in a run of its own.

    Args:
        project: as for :func:`download`.

    Raises:
        ConfigError: no wandb, no key, or no name of a project.
        RunFailed: it could not be uploaded.
    """
    _check(project, "--artifact", "nothing was uploaded")
    import wandb

    entity, _, name = project.rpartition("/")
    wandb.setup(wandb.Settings(silent=True))
    artifact = wandb.Artifact(f"report-{page.stem}", type="report")
    artifact.add_file(str(page))
    try:
        with TemporaryDirectory(prefix="grpo-exp-") as folder, wandb.init(
            mode="online", entity=entity or None, project=name, job_type="report", dir=folder,
            settings=wandb.Settings(silent=True, console="off", init_timeout=TIMEOUT_S),
        ) as run:  # fmt: skip
            run.log_artifact(artifact)  # the end of the run waits for it
    except Exception as error:  # of the network, by several names
        raise RunFailed(f"wandb: {type(error).__name__}: {_first_line(error)}") from error


def _check(project: str, key: str, so: str) -> None:
    if not re.fullmatch(r"([^/]+/)?[^/]+", project):
        raise ConfigError(key, project, "ENTITY/PROJECT, or PROJECT")
    if not is_installed("wandb"):
        raise ConfigError(key, project, "with the wandb package", "pip install wandb")
    if not has_api_key():
        raise ConfigError(key, project, "with an API key", "run `wandb login` or set WANDB_API_KEY")
    check_server(server_url(), so)


def _fetch(run: "Run", folder: Path, origin: str) -> None:
    """A file that is not there is found missing by who reads the folder."""
    folder.mkdir(parents=True)
    own = {key: value for key, value in run.config.items() if "/" not in key and not key.startswith("_")}
    (folder / "config.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
    for file in run.files(names=list(KEPT)):
        if file.name in KEPT:
            file.download(root=str(folder), replace=True).close()
    (folder / origin).write_text(run.url)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
