"""The arguments of a command beside the configuration: what is wrong with them is said in one line, with exit code 2."""

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """As argparse's, without the usage before an error."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message} ({self.prog} --help shows the usage)", file=sys.stderr)
        raise SystemExit(2)
