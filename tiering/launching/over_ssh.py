"""Runs one command per node, on other nodes by ssh, and ends them together.

Signals reach a node by name through the standard input of its shell, which sends them to the command. When the input
ends, because ssh or this process is gone, the shell ends the command with SIGTERM: no node is left behind.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from tiering.launching.nodes import is_this_host

_FORWARDED = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")

# A shell starts background commands with input from /dev/null: descriptor 3 keeps its own input.
_SHELL = """\
exec 3<&0
( {line} ) & command=$!
{{ while read -r name; do kill -s "$name" $command; done; kill -s TERM $command; }} <&3 >/dev/null 2>&1 & watch=$!
wait $command; code=$?
kill $watch 2>/dev/null
exit $code
"""


def run(lines: Mapping[str, str], ssh_options: Sequence[str] = ()) -> int:
    """Run a line for the shell on each node, by its name. Returns 0, or the exit code of the first one that fails.

    The others are then ended. Signals to this process are sent to all nodes. Raises OSError if ssh cannot be started.
    """
    shells: dict[int, subprocess.Popen[bytes]] = {}
    with _forwarding(shells):
        try:
            for name, line in lines.items():
                command = _on_node(name, _SHELL.format(line=line), ssh_options)
                # In a session of its own, so that a terminal sends its signals to this process alone.
                shell = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
                shells[shell.pid] = shell
            return _wait(shells)
        finally:
            _end(shells)
            for shell in shells.values():
                shell.wait()


def _on_node(name: str, script: str, ssh_options: Sequence[str]) -> list[str]:
    shell = ["sh", "-c", script]
    # Without BatchMode, ssh would wait for a password that nobody is asked for.
    return (
        shell if is_this_host(name) else ["ssh", "-o", "BatchMode=yes", *ssh_options, name, shlex.join(shell)]
    )


def _wait(shells: Mapping[int, subprocess.Popen[bytes]]) -> int:
    """Wait for all shells, and end them once one has failed. Returns the first code that is not 0."""
    first = 0
    for _ in shells:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        shells[pid].returncode = code
        if code and not first:
            # As a shell reports a command that a signal ended.
            first = code if code > 0 else 128 - code
            _end(shells)
    return first


def _end(shells: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Close the input of each shell, which then ends its command."""
    for shell in shells.values():
        assert shell.stdin is not None
        with suppress(OSError):
            shell.stdin.close()


@contextmanager
def _forwarding(shells: Mapping[int, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Within the block, send signals to the commands of all shells."""

    def forward(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name.removeprefix("SIG")
        for shell in list(shells.values()):
            assert shell.stdin is not None
            # A shell that has ended, or is being ended, takes no more signals.
            with suppress(OSError, ValueError):
                os.write(shell.stdin.fileno(), f"{name}\n".encode())

    before = {
        number: signal.signal(number, forward) for number in (signal.Signals[f"SIG{n}"] for n in _FORWARDED)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
