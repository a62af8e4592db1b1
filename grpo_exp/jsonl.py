"""Strict JSON on disk: files of one row per line that only grow, and small files that are replaced whole.

A row goes to the file in one ``write``, so a signal or another process can never leave half a row between two others;
only a lost machine or a full disk can tear the last one, and :func:`read` skips that. NaN and infinities become null,
because strict readers refuse the literals. Nothing here imports numpy or torch: their scalars are known by ``.item()``.
"""

import errno
import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Row = dict[str, Json]


@runtime_checkable
class _Scalar(Protocol):
    def item(self) -> object: ...


def plain(value: object) -> Json:
    """``value`` in the types of JSON: NaN and infinities as None, an enum as its name, an array of one as its number.

    Raises:
        TypeError: for anything else, named with its type.
        ValueError or RuntimeError: from ``.item()`` of an array of several numbers.
    """
    match value:
        case Enum():  # before int and str, which an enum may also be
            return value.name
        case None | bool() | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {_key(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _Scalar():
            return plain(value.item())
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


class JsonlWriter:
    """Appends rows to one file, which is made if needed. Usable from several threads and as a context manager.

    A last row that an earlier process left torn is cut off when the file is opened, so a file has one writer process.
    """

    def __init__(self, path: Path | str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        _mend(self._fd)

    def append(self, row: Mapping[str, object]) -> None:
        """Adds one row.

        Raises:
            TypeError: when a value has no form in JSON; nothing is written then.
            OSError: when the disk is full; the file then ends with the row before.
        """
        data = json.dumps(plain(row), allow_nan=False).encode() + b"\n"
        written = os.write(self._fd, data)
        if written != len(data):
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def append(path: Path | str, row: Mapping[str, object]) -> None:
    """Adds one row to ``path``; see :meth:`JsonlWriter.append`."""
    with JsonlWriter(path) as writer:
        writer.append(row)


def read(path: Path | str) -> list[Row]:
    """All rows of ``path``; none where there is no file yet. A torn last line is left out.

    Raises:
        ValueError: when another line is not a JSON object, with file and line number.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    together = _parse_together([line for _, line in numbered])
    if together is not None:
        return together
    rows: list[Row] = []
    for number, line in numbered:
        row = _parse(line)
        if row is not None:
            rows.append(row)
        elif number != numbered[-1][0]:
            raise ValueError(f"{path}:{number}: not a JSON object")
    return rows


def truncate_after(path: Path | str, step: int) -> int:
    """Drops the rows with ``row["step"] > step``, in one atomic replacement, and returns how many.

    Rows without a step stay. For a resume, before the file is opened for writing again: a writer that is open would go
    on writing to the old file.
    """
    path = Path(path)
    rows = read(path)
    kept = [row for row in rows if not _is_after(row.get("step"), step)]
    if len(kept) < len(rows):
        replace_rows(path, kept)
    return len(rows) - len(kept)


def replace_rows(path: Path | str, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes a file anew with these rows, atomically; not while a writer has it open."""
    replace_bytes(Path(path), b"".join(json.dumps(plain(row), allow_nan=False).encode() + b"\n" for row in rows))


def write_json_atomic(path: Path | str, obj: object) -> None:
    """Replaces ``path`` with ``obj`` as indented strict JSON: a reader sees the old file or the new, even after a crash."""
    replace_bytes(Path(path), json.dumps(plain(obj), indent=2, allow_nan=False).encode() + b"\n")


def read_json(path: Path | str) -> dict[str, Any]:
    """The object in a file of :func:`write_json_atomic`.

    Raises:
        ValueError: if the file does not hold one JSON object.
    """
    value = json.loads(Path(path).read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def _key(key: object) -> str:
    match key:
        case Enum():
            return key.name
        case str():
            return key
        case _:
            raise TypeError(f"a key of a JSON object must be a string, not {key!r}")


def _parse_together(lines: list[bytes]) -> list[Row] | None:
    """All lines in one call, in half the time, or None when one of them is not an object."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return None
    return rows if len(rows) == len(lines) and all(isinstance(row, dict) for row in rows) else None


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:  # also of bytes that are no UTF-8
        return None
    return row if isinstance(row, dict) else None


def _is_after(value: Json, step: int) -> bool:
    return isinstance(value, int | float) and value > step


def _mend(fd: int) -> None:
    """Makes the file behind ``fd`` end with a complete row and a line break."""
    size = os.fstat(fd).st_size
    tail = b""
    while len(tail) < size and b"\n" not in tail:
        length = min(size, 2 * len(tail) + 4096)
        tail = os.pread(fd, length, size - length)
    last = tail[tail.rfind(b"\n") + 1 :]
    if not last:
        return
    if _parse(last) is not None:
        os.write(fd, b"\n")
    else:
        os.ftruncate(fd, size - len(last))


def replace_bytes(path: Path, data: bytes) -> None:
    """Replaces a file: a reader sees the old one or the new, even after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The new name must reach the disk too, or a crash brings the old file back."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(fd)
