"""A network that only the ranks of one side are in, so that the kernel counts what they send."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

QUIET = 0.02
"""Seconds without a byte after which everything that was sent has arrived."""


class NetworkError(RuntimeError):
    """This process may not make a network namespace; the message says what the kernel or a command said."""


class Network:
    """A network namespace with nothing but its loopback interface. It lasts as long as the process that is in it."""

    def __init__(self) -> None:
        command = "ip link set lo up && echo up && exec cat"
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise NetworkError(f"unshare cannot be run: {error.strerror}") from error
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            message = self._holder.stderr.read().strip()
            self.close()
            raise NetworkError(message or "unshare said nothing")

    @property
    def enter(self) -> list[str]:
        """The beginning of a command that is to run in it."""
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]

    def sent(self) -> int:
        """Bytes that went over the loopback interface so far, TCP's and IP's headers included; when it is quiet."""
        last = self._counted()
        while True:
            time.sleep(QUIET)
            now = self._counted()
            if now == last:
                return now
            last = now

    def close(self) -> None:
        assert self._holder.stdin is not None
        with suppress(BrokenPipeError):
            self._holder.stdin.close()
        self._holder.wait()
        for pipe in (self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _counted(self) -> int:
        for line in Path(f"/proc/{self._holder.pid}/net/dev").read_text().splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "lo":
                return int(counts.split()[8])  # transmitted
        raise NetworkError("the namespace has no loopback interface")
