"""Which recording a replay is of, and what speaks against replaying it. Imports no torch and no numpy.

    RUN/rollouts/recording.json            what the rollouts belong to: vocabulary, sampling, sizes
    RUN/rollouts/steps.jsonl               a row per step, with the checksum of its file
    RUN/rollouts/step-000001.safetensors   the groups of a step

:mod:`grpo_exp.recording` writes and reads the last ones. Everything is looked at before a replay begins, checksums too:
a file that is damaged would be noticed only hours later.
"""

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .. import jsonl
from ..assets import locate
from ..errors import ConfigError
from .schema import Backend, Config, Normalization, Proximal

KEY = "rollout.replay_from"
FORMAT = 1
FOLDER, ABOUT, INDEX = "rollouts", "recording.json", "steps.jsonl"


def step_file(step: int) -> str:
    return f"step-{step:06d}.safetensors"


def find_recording(path: str, seed: int) -> Path:
    """The run folder that is meant: ``path`` itself, or of the runs in it the one that recorded with this seed.

    Raises:
        ConfigError: there is no such folder, nothing was recorded, or several runs are meant.
    """
    folder = Path(path).expanduser().resolve()
    if not path.strip() or not folder.is_dir():
        raise ConfigError(KEY, path, "the folder of a run with rollout.record=true", "no such folder")
    if (folder / FOLDER / ABOUT).is_file():
        return folder
    runs = sorted(about.parents[1] for about in folder.glob(f"*/{FOLDER}/{ABOUT}"))
    if not runs:
        reason = "nothing was recorded there: rollout.record=true does so while a run trains"
        raise ConfigError(KEY, path, "the folder of a run with recorded rollouts, or of such runs", reason)
    meant = [run for run in runs if len(runs) == 1 or _about(run).get("seed") == seed]
    if len(meant) != 1:
        reason = f"{len(meant) or 'none'} of the {len(runs)} runs in it recorded with seed={seed}"
        raise ConfigError(KEY, path, "the folder of one run, or of runs of which one has this seed", reason)
    return meant[0]


def read_about(run: Path) -> dict[str, Any]:
    """recording.json of a run.

    Raises:
        ConfigError: if it cannot be read, or is of another version of this program.
    """
    about = _about(run)
    if about.get("format") != FORMAT:
        found = f"format {about['format']}" if "format" in about else "it cannot be read"
        raise ConfigError(KEY, str(run), f"a recording in format {FORMAT}", f"{FOLDER}/{ABOUT}: {found}")
    return about


def _about(run: Path) -> dict[str, Any]:
    try:
        return jsonl.read_json(run / FOLDER / ABOUT)
    except (OSError, ValueError):
        return {}


def read_index(run: Path) -> list[dict[str, Any]]:
    """The rows of the recorded steps, from step 1 on without a gap.

    Raises:
        ConfigError: if it is damaged.
    """
    try:
        rows: list[dict[str, Any]] = list(jsonl.read(run / FOLDER / INDEX))
    except (OSError, ValueError) as error:
        raise ConfigError(KEY, str(run), "", f"damaged: {error}") from None
    for place, row in enumerate(rows, start=1):
        if row.get("step") != place:
            raise ConfigError(KEY, str(run), "", f"damaged: {FOLDER}/{INDEX} has no step {place}")
    return rows


def replay_problems(config: Config) -> list[ConfigError]:
    """What is wrong with the settings of recording and replaying, and with the recording that is to be replayed."""
    rollout = config.rollout
    if rollout.backend is not Backend.replay:
        unused = rollout.replay_from is not None
        return [ConfigError(KEY, rollout.replay_from, "null", "rollout=replay replays")] if unused else []
    problems = list(_refused_settings(config))
    if rollout.replay_from is None:
        reason = "rollout=replay trains on what an earlier run recorded"
        return [*problems, ConfigError(KEY, None, "the folder of a run with rollout.record=true", reason)]
    try:
        run = find_recording(rollout.replay_from, config.seed)
        about, index = read_about(run), read_index(run)
    except ConfigError as error:
        return [*problems, error]
    problems += _differences(config, about, run)
    most = config.trainer.max_steps
    if not index:
        problems.append(ConfigError(KEY, str(run), "a run with recorded steps", "no step was recorded"))
    elif most is not None and most > len(index):
        reason = f"so many steps were recorded in {run}"
        problems.append(ConfigError("trainer.max_steps", most, f"1 to {len(index)}", reason))
    return problems or list(_damage(run, index[:most]))


def _refused_settings(config: Config) -> Iterable[ConfigError]:
    rollout = config.rollout
    if rollout.record:
        yield ConfigError("rollout.record", True, "false", "what is replayed is recorded already")
    if rollout.num_workers:
        yield ConfigError("rollout.num_workers", rollout.num_workers, "0", "rollout=replay has no generator workers")
    if rollout.max_staleness is not None:
        reason = "with rollout=replay tokens are as stale as they were when they were recorded"
        yield ConfigError("rollout.max_staleness", rollout.max_staleness, "null", reason)
    if config.trainer.max_epochs is not None:
        reason = "what was recorded says which prompts come when"
        yield ConfigError("trainer.max_epochs", config.trainer.max_epochs, "null", reason)
    if config.correction.proximal is Proximal.beta_removal:
        reason = "the weights that sampled the tokens were another run's"
        yield ConfigError("correction.proximal", Proximal.beta_removal.name, "rollout, recompute, interpolate", reason)


def _differences(config: Config, about: Mapping[str, Any], run: Path) -> Iterable[ConfigError]:
    """Where the recording does not go with the settings of the replay."""
    same: dict[str, Any] = {
        "trainer.prompts_per_step": config.trainer.prompts_per_step,
        "algo.group_size": config.algo.group_size,
        "rollout.temperature": config.rollout.temperature,
    }
    if config.algo.normalization is Normalization.constant:  # the loss is divided by it
        same["task.max_completion_tokens"] = config.task.max_completion_tokens
    for key, value in same.items():
        if about.get(key) != value:
            yield ConfigError(key, value, str(about.get(key)), f"as recorded in {run}")
    staleness = about.get("rollout.max_staleness")
    if config.correction.proximal is Proximal.interpolate and isinstance(staleness, int) and staleness < 2:
        reason = f"it is mu for tokens that are 0 or 1 versions old, and {run} has no others"
        yield ConfigError("correction.proximal", Proximal.interpolate.name, Proximal.rollout.name, reason)
    known, ours = about.get("vocabulary_file"), vocabulary_of(config.model.tokenizer or config.model.name_or_path)
    if known is not None and ours is not None and known != ours:
        yield other_vocabulary(config.model.name_or_path, run, str(about.get("model")))


def other_vocabulary(model: str, run: Path, recorded: str) -> ConfigError:
    """The problem that token ids of a recording would be other tokens here."""
    fix = f"{run} was recorded with {recorded}, whose vocabulary is another"
    return ConfigError("model.name_or_path", model, "a model with the vocabulary of the recording", fix)


def _damage(run: Path, index: Iterable[Mapping[str, Any]]) -> Iterable[ConfigError]:
    """The first file that is not what was written."""
    for row in index:
        file = run / FOLDER / step_file(row["step"])
        try:
            intact = zlib.crc32(file.read_bytes()) == row.get("crc32")
        except OSError as error:
            yield ConfigError(KEY, str(run), "", f"damaged: {file.name}: {error.strerror or error}")
            return
        if not intact:
            yield ConfigError(KEY, str(run), "", f"damaged: {file.name} is not the file that was recorded")
            return


def vocabulary_of(name_or_path: str) -> str | None:
    """A fingerprint of the tokenizer in a folder, from its tokenizer.json; None where there is none to be read."""
    file = Path(locate(name_or_path)).expanduser() / "tokenizer.json"
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        pairs = vocabulary if isinstance(vocabulary, dict) else {entry[0]: n for n, entry in enumerate(vocabulary)}
        return fingerprint(pairs | {token["content"]: token["id"] for token in content["added_tokens"]})
    except (OSError, ValueError, LookupError, TypeError):
        return None


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Of the pairs of token and id."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()[:16]
