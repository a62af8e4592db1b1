"""Mends the record file of a run that was killed, so that wandb uploads it.

wandb gives up at a record that was not written to its end, with whatever attempts of the run come after it. The file has seven
header bytes, then records framed as in a LevelDB log: blocks of 32 KiB, each fragment with a header of crc32, length and type
(1 full, 2 first, 3 middle, 4 last); fewer than seven bytes at the end of a block are padding.
"""

import os
import struct
from pathlib import Path

MAGIC = b":W&B"
HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024
FULL, LAST = 1, 4


def mend(path: Path) -> int:
    """Cuts what was begun after the last complete record; only of a run that does not go on.

    Returns:
        The number of bytes cut; 0 for a file that is whole, or is none of wandb's.
    """
    data = path.read_bytes()
    end = _end_of_records(data)
    if not data.startswith(MAGIC) or not any(data[end:]):  # zeros are padding
        return 0
    os.truncate(path, end)
    return len(data) - end


def _end_of_records(data: bytes) -> int:
    end = position = HEADER_BYTES
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER_BYTES + length
        if position > len(data):
            break
        if kind in (FULL, LAST):
            end = position
    return end
