"""From an error to a message on stderr and an exit code, the same for every command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tiering.errors import SwapError, TieringError, UnsafeTargetError
from tiering.fields import legible

FAILED, USAGE, UNSAFE = 1, 2, 3


@dataclass
class Told:
    """The exit code."""

    code: int = 0


@contextlib.contextmanager
def exit_code(prog: str) -> Iterator[Told]:
    """Let the block set ``code``; an error that has words for its user sets it, and they are printed."""
    told = Told()
    try:
        yield told
    except UnsafeTargetError as error:
        told.code = _say(prog, error, UNSAFE)
    except SwapError as error:
        told.code = _say(prog, error, FAILED)
    except TieringError as error:
        told.code = _say(prog, error, USAGE)


def _say(prog: str, error: TieringError, code: int) -> int:
    print(f"{prog}: " + "\n".join(map(legible, str(error).split("\n"))), file=sys.stderr)
    return code
