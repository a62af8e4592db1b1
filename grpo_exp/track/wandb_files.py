"""Runs of a wandb project as run folders again: what ``grpo-exp compare --wandb`` compares.

wandb's own history is sampled when it is read, and has no row for what was null. So a run keeps the files that make up its
folder beside its metrics in wandb, and here they are fetched as they are, with wandb's own client.
"""

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ..errors import ConfigError, RunFailed
from .sync import check_server
from .wandb_options import has_api_key, is_installed, server_url

if TYPE_CHECKING:
    from wandb.apis.public import Run

KEPT = ("manifest.json", "status.json", "metrics.jsonl", "events.jsonl")
"""Files of a run folder that are uploaded with a run; the configuration is in wandb as such, without secrets."""
TIMEOUT_S = 30


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
    filters = {} if group is None else {"group": group}
    try:
        api = wandb.Api(timeout=TIMEOUT_S)
        runs = [run for run in api.runs(project, filters, order="+created_at", lazy=False) if "run/name" in run.config]
        for run in runs:
            _fetch(run, to / run.id)
            (to / run.id / origin).write_text(run.url)
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
        with wandb.init(
            entity=entity or None, project=name, job_type="report", dir=tempfile.mkdtemp(prefix="grpo-exp-"),
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


def _fetch(run: "Run", folder: Path) -> None:
    """A file that is not there is found missing by who reads the folder."""
    folder.mkdir(parents=True)
    own = {key: value for key, value in run.config.items() if "/" not in key and not key.startswith("_")}
    (folder / "config.yaml").write_text(yaml.safe_dump(own, sort_keys=False))
    for file in run.files(names=list(KEPT)):
        if file.name in KEPT:
            file.download(root=str(folder), replace=True).close()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
