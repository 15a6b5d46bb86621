"""Child processes of the demo, worker and sidecar. Each ends with its ``with`` block."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import tiering
from tiering.demo.settings import Settings, Way
from tiering.errors import TieringError

# Long spinning of OpenMP threads stalls other processes on a busy machine, and brings no speed on an idle one.
_ENVIRONMENT = {"GOMP_SPINCOUNT": "5000"}
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
# Seconds from SIGTERM to SIGKILL.
GRACE = 10.0


class ChildError(TieringError):
    """A child process of the demo failed. The message contains the error of the child."""

    code = "TIER-DEMO"


def _end_with_the_parent() -> None:
    # A parent that SIGKILL ends cannot stop its children.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _python_path() -> str:
    """PYTHONPATH for children, so that they import the package of this process, installed or not."""
    return os.pathsep.join(
        filter(None, [str(Path(tiering.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )


class Child:
    """A Python module that runs as a process in its own session, so that Ctrl-C reaches only the parent."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        pass_fds: tuple[int, ...] = (),
        stdin: int = subprocess.DEVNULL,
        pipe: bool = False,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE if pipe else None,
            stderr=subprocess.STDOUT if pipe else None,
            text=True,
            # The plain loop computes on the CPU, so the engine must do so, too, even if there is a GPU.
            env=_ENVIRONMENT | os.environ | {"PYTHONPATH": _python_path(), "TIERING_DEVICE": "cpu"},
            pass_fds=pass_fds,
            start_new_session=True,
            # It calls only prctl, which is safe after a fork.
            preexec_fn=_end_with_the_parent,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the process has not ended after GRACE seconds."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Worker(Child):
    """A training process; iterate over :meth:`events` until it ends."""

    def __init__(
        self, way: Way, settings: Settings, directory: Path, *, run_name: str, columns: int, plant_fault: bool
    ) -> None:
        read_fd, write_fd = os.pipe()
        self.pipe: IO[str] = os.fdopen(read_fd, encoding="utf-8")
        self.way = way
        try:
            super().__init__(
                "tiering.demo.worker",
                *("--way", way, "--settings", settings.to_json(), "--dir", str(directory)),
                *("--run-name", run_name, "--events", str(write_fd), "--columns", str(columns)),
                *(["--plant-fault"] if plant_fault else []),
                pass_fds=(write_fd,),
                stdin=subprocess.PIPE,
            )
        finally:
            # events() sees the end of the pipe only if no other process holds its write end.
            os.close(write_fd)

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of the worker, as they arrive. Raises :class:`ChildError` if the worker fails."""
        for line in self.pipe:
            event = json.loads(line)
            if event["event"] == "error":
                self.process.wait(GRACE)
                raise ChildError(f"training with the state in {self.way} failed: {event['message']}")
            yield event
        code = self.process.wait()
        if code:
            raise ChildError(
                f"the worker that trains with {self.way} ended with code {code}; see its output above"
            )

    def release(self) -> None:
        """Let the worker, which waits after its last step, finish. Idempotent."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def stop(self) -> None:
        super().stop()
        self.release()
        self.pipe.close()


class Sidecar(Child):
    """``tierd`` on a port of this machine."""

    def __init__(self, port: int) -> None:
        super().__init__("service.cli", "--port", str(port), pipe=True)
        assert self.process.stdout is not None
        output = self.process.stdout.readline()
        match = re.search(r"http://\S+/", output)
        if match is None:
            output += self.process.stdout.read()
            self.stop()
            raise ChildError(f"the sidecar did not start: {output.strip() or 'it printed nothing'}")
        self.url = match.group()

    def rank(self, run_name: str) -> dict[str, Any] | None:
        """Rank 0 of the live run ``run_name`` in ``GET /v1/status``, or ``None``."""
        try:
            # The scheme is http: the sidecar printed the URL.
            with urllib.request.urlopen(f"{self.url}v1/status", timeout=5) as answer:  # noqa: S310
                runs = json.load(answer)["runs"]
        except OSError:
            # The sidecar does not answer. Training continues; the verdict reports it at the end.
            return None
        ranks = [rank for run in runs if run["name"] == run_name for rank in run["ranks"]]
        return next((rank for rank in ranks if rank["state"] == "live"), None)
