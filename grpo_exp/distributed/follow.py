"""A rank that does not lead: it builds what the leader's configuration says, and then does what the leader says."""

import os
import signal
import sys
from typing import TYPE_CHECKING

from ..errors import RunFailed
from .launched import launched

if TYPE_CHECKING:
    from .ranks import Ranks

FAILED = 1


def dismiss(code: int) -> None:
    """The leader has nothing for the other ranks to do, or could not come to it: they wait to be told."""
    from .ranks import Ranks

    if not Ranks.met:
        Ranks(launched()).end(code)


def follow() -> int:
    """Run as another rank than the first; returns the exit code.

    Signals that ask a run to stop go to every process that a launcher started: the leader deals with them.
    """
    from ..rollout.process import die_with_parent

    die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from .ranks import Ranks

    try:
        ranks = Ranks(launched())
        try:
            return _obey(ranks)
        finally:
            ranks.close()
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED


def _obey(ranks: "Ranks") -> int:
    name, arguments = ranks.broadcast()
    if name == "end":
        return int(arguments[0])
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    from .start import build_team

    return build_team(arguments[0], ranks).follow()
