"""Recorded rollouts on disk: what a run trained, step by step, for a replay; and what a replay made of them. No torch.

The layout is that of :mod:`grpo_exp.config.replays`, which says before a replay whether all is intact. A step is one file,
written beside its place and renamed, and then one row of the index; after an interruption both are cut back to the
checkpoint. A replay leaves ``trace-NNNNNN.safetensors`` in the same folder, for a comparison with other replays.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from . import jsonl
from .config.replays import ABOUT, FOLDER, INDEX, step_file
from .errors import RunFailed
from .rollout.types import Group, Rollout

TRACES = "traces.json"
Arrays = dict[str, NDArray[Any]]


def trace_file(step: int) -> str:
    return f"trace-{step:06d}.safetensors"


class Recording:
    """The rollouts folder of a run that is being recorded.

    Args:
        about: what recording.json says.
        after_step: the checkpoint that the run goes on from; what was recorded later is written anew. None: from the start.
    """

    def __init__(self, run: Path, about: dict[str, Any], after_step: int | None) -> None:
        self.folder = run / FOLDER
        self.folder.mkdir(exist_ok=True)
        jsonl.truncate_after(self.folder / INDEX, after_step or 0)
        cut_after(self.folder, step_file, after_step or 0)
        jsonl.write_json_atomic(self.folder / ABOUT, about)
        self._index = jsonl.JsonlWriter(self.folder / INDEX)

    def write(self, step: int, version: int, groups: Sequence[Group], rows: Sequence[int]) -> None:
        """Keep the groups of a step that version ``version`` is trained on; ``rows`` are their rows of the data set.

        Raises:
            RunFailed: if that is not possible.
        """
        arrays = _packed(groups, rows)
        data = write_arrays(self.folder / step_file(step), arrays)
        entry = {"step": step, "version": version, "groups": len(groups), "completions": len(arrays["lengths"])}
        self._index.append({**entry, "tokens": len(arrays["token_ids"]), "crc32": zlib.crc32(data)})

    def close(self) -> None:
        self._index.close()


def cut_after(folder: Path, name: Callable[[int], str], step: int) -> None:
    """Remove the files of later steps, and what was left of one that was being written."""
    for path in folder.iterdir():
        number = path.stem.rpartition("-")[2]
        if path.suffix == ".tmp" or (number.isdigit() and int(number) > step and path.name == name(int(number))):
            path.unlink()


def write_arrays(path: Path, arrays: Arrays) -> bytes:
    """Write a file of arrays, whole or not at all, and return its bytes.

    Raises:
        RunFailed: if the disk does not take it.
    """
    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    try:
        jsonl.replace_bytes(path, data)
    except OSError as error:
        raise RunFailed(f"{path} could not be written: {error}") from error
    return data


def _packed(groups: Sequence[Group], rows: Sequence[int]) -> Arrays:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return {
        "serials": np.array([group.serial for group in groups], np.int64),
        "rows": np.array(rows, np.int64),
        "group_versions": np.array([group.version for group in groups], np.int32),
        "group_sizes": np.array([len(group.rollouts) for group in groups], np.int32),
        "prompt_lengths": np.array([len(group.prompt_ids) for group in groups], np.int32),
        "prompt_ids": np.concatenate([np.array(group.prompt_ids, np.int32) for group in groups]),
        "rewards": np.array([reward for group in groups for reward in group.rewards], np.float32),
        "lengths": np.array([len(rollout.token_ids) for rollout in rollouts], np.int32),
        "finished": np.array([rollout.finished for rollout in rollouts], np.uint8),
        "token_ids": np.concatenate([np.array(rollout.token_ids, np.int32) for rollout in rollouts]),
        "mu": np.concatenate([rollout.mu for rollout in rollouts]),
        "versions": np.concatenate([rollout.versions for rollout in rollouts]),
    }


def read_step(run: Path, step: int) -> tuple[list[Group], list[int]]:
    """The groups of a recorded step, without the rows of the data set themselves, and the numbers of these.

    Raises:
        RunFailed: if its file is gone or damaged.
    """
    path = run / FOLDER / step_file(step)
    try:
        arrays = load(path.read_bytes())
        rollouts = _rollouts(arrays)
        sizes, rewards = arrays["group_sizes"], arrays["rewards"].tolist()
        groups, first = [], 0
        prompts = _split(arrays["prompt_ids"], arrays["prompt_lengths"])
        for place, (serial, prompt) in enumerate(zip(arrays["serials"].tolist(), prompts, strict=True)):
            last = first + int(sizes[place])
            version = int(arrays["group_versions"][place])
            groups.append(Group(serial, prompt.tolist(), {}, rollouts[first:last], version, rewards[first:last]))
            first = last
        return groups, arrays["rows"].tolist()
    except (OSError, SafetensorError, LookupError, ValueError, struct.error) as error:
        raise RunFailed(f"{path} cannot be replayed: {error}") from error


def _rollouts(arrays: Arrays) -> list[Rollout]:
    parts = (_split(arrays[name], arrays["lengths"]) for name in ("token_ids", "mu", "versions"))
    finished = arrays["finished"].astype(bool).tolist()
    return [Rollout(ids.tolist(), *rest) for ids, *rest in zip(*parts, finished, strict=True)]


def _split(flat: NDArray[Any], lengths: NDArray[Any]) -> list[NDArray[Any]]:
    """Raises ValueError if the lengths are not those of the array."""
    if lengths.sum() != len(flat):
        raise ValueError(f"{len(flat)} entries, not the {lengths.sum()} that their lengths say")
    return np.split(flat, lengths.cumsum()[:-1])


def read_trace(run: Path, step: int) -> Arrays | None:
    """What a replay traced of a step; None where there is nothing that can be read."""
    try:
        return dict(load((run / FOLDER / trace_file(step)).read_bytes()))
    except (OSError, SafetensorError):
        return None
