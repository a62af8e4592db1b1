"""Rows and small files on disk: strict JSON, never torn by a process, cut back for a resume."""

import json
import os
import signal
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_exp import jsonl


class Colour(int, Enum):
    red = 3


def test_a_row_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 1, "reward/mean": 0.1, "note": 'a "b"\né\u2028', "list": [1, None, True]}, {"step": 2}]
    for row in rows:
        jsonl.append(path, row)
    assert jsonl.read(path) == rows
    assert path.read_bytes().count(b"\n") == 2


@given(st.floats())
def test_every_float_is_strict_json_and_finite_ones_are_exact(value: float) -> None:
    text = json.dumps(jsonl.plain({"x": value}), allow_nan=False)
    assert json.loads(text)["x"] == (value if np.isfinite(value) else None)


def test_scalars_of_numpy_and_torch_are_numbers() -> None:
    import torch

    values = [np.float32(0.5), np.int64(3), np.bool_(True), np.float64("nan"), torch.tensor(0.25), torch.tensor([7])]
    assert jsonl.plain(values) == [0.5, 3, True, None, 0.25, 7]
    assert jsonl.plain(torch.tensor(float("inf"), dtype=torch.bfloat16)) is None


def test_an_enum_is_its_name_even_when_it_is_a_number() -> None:
    assert jsonl.plain({Colour.red: Colour.red}) == {"red": "red"}


def test_what_json_does_not_know_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with jsonl.JsonlWriter(path) as writer:
        for bad in ({"x": object()}, {1: 2}, {"x": {1, 2}}):
            with pytest.raises(TypeError):
                writer.append(bad)
    assert path.read_bytes() == b""


def test_a_file_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    assert jsonl.read(tmp_path / "none.jsonl") == []
    assert jsonl.truncate_after(tmp_path / "none.jsonl", 3) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "x": 0.', b"{", b'{"a": "\xc3', b"\0\0\0\0", b'{"step": 3}, {"step": 4}']
)
def test_a_torn_last_line_is_left_out_and_mended_by_the_next_writer(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    assert jsonl.read(path) == [{"step": 1}, {"step": 2}]
    jsonl.append(path, {"step": 3})
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_a_whole_last_row_without_line_break_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}')
    jsonl.append(path, {"step": 2})
    assert jsonl.read(path) == [{"step": 1}, {"step": 2}]


def test_a_long_torn_line_is_mended_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"x": "' + b"a" * 50_000)
    jsonl.append(path, {"step": 2})
    assert jsonl.read(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("bad", [b"nonsense", b"[1]", b'{"step": 1', b'{"step": 2}, {"step": 3}'])
def test_a_bad_line_in_the_middle_is_an_error_with_its_place(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 4}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a JSON object"):
        jsonl.read(path)


def test_rows_after_a_step_are_dropped_and_rows_without_one_stay(tmp_path: Path) -> None:
    """F5: after a resume the metric file has each step once."""
    path = tmp_path / "events.jsonl"
    rows = [{"step": 1}, {"step": None, "event": "a"}, {"step": 3}, {"event": "b"}, {"step": 2}]
    for row in rows:
        jsonl.append(path, row)
    assert jsonl.truncate_after(path, 2) == 1
    assert jsonl.read(path) == [row for row in rows if row.get("step") != 3]
    assert jsonl.truncate_after(path, 2) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["events.jsonl"]


def test_threads_that_write_together_never_mix_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with jsonl.JsonlWriter(path) as writer:

        def write(number: int) -> None:
            for index in range(200):
                writer.append({"thread": number, "index": index, "text": "x" * 500})

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = jsonl.read(path)
    for number in range(4):
        assert [row["index"] for row in rows if row["thread"] == number] == list(range(200))


def test_a_killed_writer_leaves_every_row_before_the_last(tmp_path: Path) -> None:
    """The kernel may end a write of more than a page in its middle: such a row is not read, and cut off by the next writer."""
    path = tmp_path / "metrics.jsonl"
    script = "import sys; from grpo_exp.jsonl import JsonlWriter; w = JsonlWriter(sys.argv[1]); i = 0\n"
    script += "while True: w.append({'step': i, 'text': 'x' * 9000}); i += 1"
    with subprocess.Popen([sys.executable, "-c", script, str(path)]) as writer:
        while not path.exists() or path.stat().st_size < 1_000_000:
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
    whole = path.read_bytes().count(b"\n")
    assert [row["step"] for row in jsonl.read(path)] == list(range(whole))
    with jsonl.JsonlWriter(path) as again:
        again.append({"step": whole})
    assert [row["step"] for row in jsonl.read(path)] == list(range(whole + 1))


def test_a_full_disk_leaves_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = """
import resource, signal, sys
from grpo_exp.jsonl import JsonlWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
with JsonlWriter(sys.argv[1]) as writer:
    try:
        for step in range(100):
            writer.append({"step": step})
    except OSError:
        print(step)
"""
    out = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True).stdout
    assert path.read_bytes().endswith(b"}\n")
    assert [row["step"] for row in jsonl.read(path)] == list(range(int(out)))


def test_a_json_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    jsonl.write_json_atomic(path, {"state": "running", "loss": float("nan"), "scale": np.float32(2)})
    before = path.stat().st_ino
    with pytest.raises(TypeError):
        jsonl.write_json_atomic(path, {"state": object()})
    assert json.loads(path.read_text()) == {"state": "running", "loss": None, "scale": 2}
    jsonl.write_json_atomic(path, {"state": "done"})
    assert json.loads(path.read_text()) == {"state": "done"}
    assert path.stat().st_ino != before
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "status.json"
    folder.mkdir()
    (folder / "kept").touch()
    with pytest.raises(OSError, match=r"status\.json"):
        jsonl.write_json_atomic(folder, {})
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]
