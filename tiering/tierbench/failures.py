"""From an error to a message on stderr and an exit code, the same for every command."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tiering.config.fields import legible
from tiering.errors import SwapError, TieringError, UnsafeTargetError
from tiering.tierbench.exits import FAILED, UNSAFE, USAGE


def run(prog: str, command: Callable[[], int]) -> int:
    """The exit code of ``command``, or that of an error that has words for its user, which are printed."""
    try:
        return command()
    except TieringError as error:
        print(f"{prog}: " + "\n".join(map(legible, str(error).split("\n"))), file=sys.stderr)
        if isinstance(error, UnsafeTargetError):
            return UNSAFE
        return FAILED if isinstance(error, SwapError) else USAGE
