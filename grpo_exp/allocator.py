"""How memory is treated between two steps: by glibc's malloc on a CPU, and by Python's collector. Imports no torch.

By default malloc hands large blocks back to the kernel as soon as torch frees them, and a training pass, which allocates
the same sizes again and again, pays for every page anew (``benchmarks/allocator.py``).
"""

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names and numbers of mallopt(3)
MMAP_BYTES = 32 << 20
"""Blocks from here on are mapped one by one and given back at once: few enough, and too large to be left in pieces."""
TRIM_BYTES = 256 << 20
"""Free memory at the end of the heap that is kept."""

YOUNG_OBJECTS = 20_000
"""Objects made, less objects gone, between two looks of the garbage collector; Python's own default is 700."""


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed for the next pass. What the user has set in the environment wins.

    Returns:
        Whether it was done: only where the C library is glibc, and says yes.
    """
    if sys.platform != "linux" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)) and bool(mallopt(M_TRIM_THRESHOLD, TRIM_BYTES))


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let Python's collector look for cycles once in some steps, not several times in each: a step leaves next to none."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], YOUNG_OBJECTS) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
