"""What every test runs under: no model hub, one thread per process, a time limit.

The environment is set before any test module is imported, so that spawned processes inherit it and torch, which is not
imported here, starts with it.
"""

import os
import sys

import pytest

SLOW_TIMEOUT_S = 900

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked slow get a longer limit than the default, unless they name their own."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Undo what an earlier test, or an import with other settings, did to torch's thread count."""
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
