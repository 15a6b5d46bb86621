"""Shared by the commands: ``--version``, completion, suggestions for a mistyped word, errors of standard output."""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tiering._text import similar
from tiering._version import __version__

PIPE_CLOSED = 128 + signal.SIGPIPE
"""The exit code that a shell reports for a command whose reader (for example `head`) closed the pipe."""
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests a subcommand for a mistyped one."""

    def parse_args(self, *arguments: Any, **options: Any) -> Any:
        """Parse the arguments, or print completions if the shell asks for them."""
        complete(self)
        return super().parse_args(*arguments, **options)

    def error(self, message: str) -> NoReturn:
        """Print ``message`` with a suggestion, and exit with status 2."""
        match = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if match and (choice := similar(match[1], re.findall(r"[\w-]+", match[2]))):
            message += f"; did you mean {choice}?"
        super().error(message)


def complete(parser: argparse.ArgumentParser) -> None:
    """Print completions of the command line and exit, if a shell with argcomplete asks for them."""
    if "_ARGCOMPLETE" in os.environ:
        try:
            import argcomplete
        except ImportError:
            # The shell has argcomplete, this environment has not: a press of Tab must not run the command.
            parser.exit(1)
        argcomplete.autocomplete(parser)


class Version(argparse.Action):
    """The option ``--version``: print the version and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        print(f"{parser.prog} {__version__}")
        parser.exit()


def run_printing(program: str, run: Callable[[], int], *, unwritable: int) -> int:
    """Call ``run``, which prints, and return its exit code.

    Returns PIPE_CLOSED if the reader of standard output has closed it, and ``unwritable``, with a message on stderr,
    if standard output cannot be written.
    """
    # The encoding of the terminal may not have all printed characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = run()
        print(end="", flush=True)
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _discard_output()
        print(
            f"{program}: standard output cannot be written: {error.strerror}; free space, or redirect it elsewhere",
            file=sys.stderr,
        )
        return unwritable
    return code


def _discard_output() -> None:
    """Redirect standard output to /dev/null: Python flushes its buffer at exit, which would raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
