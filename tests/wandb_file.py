"""Reads the record file that wandb writes for a run (``wandb/*run-*/run-ID.wandb``), so that tests see what was logged.

Seven header bytes, then records as in a LevelDB log: blocks of 32 KiB, each fragment with a header of crc32, length and
type (1 full, 2 first, 3 middle, 4 last); fewer than seven bytes at the end of a block are padding. A record is a
protobuf message.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b":W&B"
HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024


@dataclass
class Segment:
    """One file. ``exit_code`` is None when the run was not finished; ``metrics`` are name -> step metric."""

    run_id: str = ""
    project: str = ""
    entity: str = ""
    name: str = ""
    group: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    artifacts: dict[str, dict[str, Path]] = field(default_factory=dict)  # "type/name" -> name -> where the file is
    exit_code: int | None = None


def segments(run_dir: Path) -> list[Segment]:
    """All segments of a run folder, the oldest first."""
    return [read_segment(path) for path in sorted(run_dir.glob("wandb/*run-*/run-*.wandb"))]


def read_segment(path: Path) -> Segment:
    from wandb.proto import wandb_internal_pb2

    segment = Segment()
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                segment.run_id, segment.project, segment.entity = run.run_id, run.project, run.entity
                segment.name, segment.group, segment.tags = run.display_name, run.run_group, list(run.tags)
                segment.config |= {item.key: json.loads(item.value_json) for item in run.config.update}
            case "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                segment.history.append(row)
            case "metric":
                segment.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            case "summary":
                segment.summary |= {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update
                }
            case "environment":
                segment.arguments += list(record.environment.args)
            case "artifact":
                files = {entry.path: Path(entry.local_path) for entry in record.artifact.manifest.contents}
                segment.artifacts[f"{record.artifact.type}/{record.artifact.name}"] = files
            case "exit":
                segment.exit_code = record.exit.exit_code
    return segment


def _records(data: bytes) -> Iterator[bytes]:
    assert data[:4] == MAGIC, data[:HEADER_BYTES]
    position, parts = HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        body = data[position + HEADER_BYTES : position + HEADER_BYTES + length]
        if kind == 0 or len(body) < length:  # not written to the end
            return
        assert zlib.crc32(bytes([kind]) + body) == checksum, f"damaged at byte {position}"
        position += HEADER_BYTES + length
        parts += body
        if kind in (1, 4):
            yield parts
            parts = b""
