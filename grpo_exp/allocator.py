"""How glibc's malloc treats memory that torch has freed, for a process that computes on a CPU. Imports no torch.

By default it hands large blocks back to the kernel as soon as they are freed, and a training pass, which allocates the same
sizes again and again, pays for every page anew: some 5000 page faults and a sixth of the time of a step of the tiny model
(``benchmarks/allocator.py``).
"""

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names and numbers of mallopt(3)
MMAP_BYTES = 32 << 20
"""Blocks from here on are mapped one by one and given back at once: few enough, and too large to be left in pieces."""
TRIM_BYTES = 256 << 20
"""Free memory at the end of the heap that is kept."""


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
