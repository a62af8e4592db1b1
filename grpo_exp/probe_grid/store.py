"""The folder of a probe: ``probe.json`` with every number, ``tokens.safetensors`` with every token that was scored.

Arrays, all flat, sequence after sequence: ``prompts`` (int32) and ``prompts.lengths``; of generator i ``gi.tokens`` and
``gi.tokens.lengths``, in fp32 ``gi.mu`` and what the trainer in fp32 says, ``gi.reference``; of trainer j on these ``gi.tj``.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import jsonl
from ..errors import ConfigError

FORMAT = 1
REPORT, TOKENS, FIGURE = "probe.json", "tokens.safetensors", "figure.svg"
Arrays = dict[str, NDArray[Any]]


def new_folder(out: Path | None, model: str) -> Path:
    """An empty folder. Raises ConfigError if it is there already: what was measured is not overwritten."""
    name = "".join(char if char.isalnum() or char in "._-" else "-" for char in model.rpartition("/")[2])
    stem = out or Path("probes") / f"{name.rpartition('fetched-')[2]}_{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        stem.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        raise ConfigError("--out", str(stem), "a new folder", "this one is there already") from None
    except OSError as error:
        raise ConfigError("--out", str(stem), "", f"{error.strerror or error}: name one that can be written") from None
    return stem


def packed(name: str, sequences: Sequence[Sequence[int]]) -> Arrays:
    """Sequences of token ids as two arrays."""
    flat = [token for sequence in sequences for token in sequence]
    lengths = [len(sequence) for sequence in sequences]
    return {name: np.array(flat, np.int32), f"{name}.lengths": np.array(lengths, np.int64)}


def write(folder: Path, report: Mapping[str, Any], arrays: Arrays) -> None:
    """Replace both files; the tokens first, so that a report never speaks of some that are not there."""
    from safetensors.numpy import save_file

    part = folder / f"{TOKENS}.part"
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, part)
    part.replace(folder / TOKENS)
    jsonl.write_json_atomic(folder / REPORT, report)


def read_report(folder: Path) -> dict[str, Any]:
    """Raises ConfigError if it is no folder of a probe, or one of another version."""
    file = folder / REPORT
    if not file.is_file() or not (folder / TOKENS).is_file():
        raise ConfigError("--against", str(folder), "the folder of an earlier probe", f"there is no {REPORT} in it")
    try:
        report = jsonl.read_json(file)
    except ValueError as error:
        raise ConfigError("--against", str(file), "the report of a probe", str(error)) from None
    if report.get("format") != FORMAT:
        raise ConfigError("--against", str(folder), f"format {FORMAT}", f"this is format {report.get('format')}")
    return report


def read_arrays(folder: Path) -> Arrays:
    from safetensors.numpy import load_file

    return dict(load_file(folder / TOKENS))
