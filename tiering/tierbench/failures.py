"""Turns an error into a message on stderr and an exit code, for every command."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tiering.config.fields import legible
from tiering.errors import SwapError, TieringError, UnsafeTargetError
from tiering.tierbench.exits import FAILED, UNSAFE, USAGE


def run(prog: str, command: Callable[[], int]) -> int:
    """Run ``command`` and return its exit code; for a TieringError, print it and return the code for its class."""
    try:
        return command()
    except TieringError as error:
        print(f"{prog}: " + "\n".join(map(legible, str(error).split("\n"))), file=sys.stderr)
        if isinstance(error, UnsafeTargetError):
            return UNSAFE
        return FAILED if isinstance(error, SwapError) else USAGE
