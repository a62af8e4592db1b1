import gc
import os
import subprocess
import sys

from grpo_exp.allocator import YOUNG_OBJECTS, fewer_collections

PROGRAM = """
import ctypes, resource, sys
from grpo_exp.allocator import keep_freed_memory
done = keep_freed_memory() if sys.argv[1] == "keep" else False
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def work():
    blocks = [libc.malloc(1 << 20) for _ in range(16)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks:
        libc.free(block)
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*arguments: str, **environment: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    out = subprocess.run(command, env=clean | environment, check=True, capture_output=True, text=True).stdout.split()
    return out[0] == "True", int(out[1])


def test_memory_that_was_freed_is_used_again_without_asking_the_kernel() -> None:
    done, kept = page_faults("keep")
    _, given_back = page_faults("leave")
    assert done == (sys.platform == "linux")
    assert not done or kept < given_back / 10


def test_what_the_user_has_set_for_malloc_wins() -> None:
    done, _ = page_faults("keep", MALLOC_ARENA_MAX="2")
    assert not done


def test_the_collector_looks_less_often_while_a_run_trains_and_as_often_as_before_afterwards() -> None:
    before = gc.get_threshold()
    with fewer_collections():
        assert gc.get_threshold() == (max(before[0], YOUNG_OBJECTS), *before[1:])
    assert gc.get_threshold() == before


def test_a_collector_that_the_user_has_turned_off_stays_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with fewer_collections():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
