"""What the commands have in common: a version, suggestions for a mistyped word, and output that cannot be written."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from tiering.version import __version__

PIPE_CLOSED = 128 + signal.SIGPIPE
"""As the shell says of a command whose reader has seen enough, as `head` does."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Parser(argparse.ArgumentParser):
    """One that says which word was meant."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong and (meant := suggestion(wrong[1], re.findall(r"[\w-]+", wrong[2]))):
            message += f"; did you mean {meant}?"
        super().error(message)


class Version(argparse.Action):
    """``--version``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"{parser.prog} {__version__}")
        parser.exit()


def suggestion(word: str, known: Iterable[str]) -> str | None:
    """The one of ``known`` that ``word`` is likely meant to be."""
    return next(iter(get_close_matches(word, list(known), 1)), None)


def printing(program: str, run: Callable[[], int], *, failed: int) -> int:
    """The exit code of ``run``, or that of standard output which cannot be written: ``failed``, said on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may not have every character that is printed
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run()
        print(end="", flush=True)
    except BrokenPipeError:
        _give_up_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _give_up_output()
        print(
            f"{program}: what is to be printed cannot be written: {error.strerror}; make room, or print it elsewhere",
            file=sys.stderr,
        )
        return failed
    return code


def _give_up_output() -> None:
    """What is left to flush, which Python tries at its end, goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
