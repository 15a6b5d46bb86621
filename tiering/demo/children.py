"""The demo's child processes seen from outside: the worker, and the sidecar. None outlives its ``with``."""

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

# OpenMP threads that spin for long stall every other process of a busy machine, and are no faster on an idle one.
_ENVIRONMENT = {"GOMP_SPINCOUNT": "5000"}
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
GRACE = 10.0  # seconds from being asked to end to being killed


class ChildError(TieringError):
    """A child process of the demo failed; the message is its own."""

    code = "TIER-DEMO"


def _end_with_the_parent() -> None:
    # A parent that is killed outright cannot clean up after itself.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _python_path() -> str:
    """Children import the package that this process runs, installed or not."""
    return os.pathsep.join(
        filter(None, [str(Path(tiering.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )


class Child:
    """A Python module that runs as a process in a session of its own: Ctrl-C reaches it only through us."""

    def __init__(
        self, module: str, *arguments: str, pass_fds: tuple[int, ...] = (), pipe: bool = False
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipe else None,
            stderr=subprocess.STDOUT if pipe else None,
            text=True,
            # The demo compares with a plain loop on the CPU, so that is where it computes, GPU or not.
            env=_ENVIRONMENT | os.environ | {"PYTHONPATH": _python_path(), "TIERING_DEVICE": "cpu"},
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=_end_with_the_parent,  # one prctl, which is safe after a fork
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Asks the process to end, and ends it if it does not."""
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
    """A training process; iterate over :meth:`events` until it is done."""

    def __init__(
        self, way: Way, settings: Settings, directory: Path, *, run_name: str, columns: int, plant_fault: bool
    ) -> None:
        reading, writing = os.pipe()
        self.pipe: IO[str] = os.fdopen(reading, encoding="utf-8")
        self.way = way
        try:
            super().__init__(
                "tiering.demo.worker",
                *("--way", way, "--settings", settings.to_json(), "--dir", str(directory)),
                *("--run-name", run_name, "--events", str(writing), "--columns", str(columns)),
                *(["--plant-fault"] if plant_fault else []),
                pass_fds=(writing,),
            )
        finally:
            os.close(writing)

    def events(self) -> Iterator[dict[str, Any]]:
        """What the worker tells, as it tells it. Raises :class:`ChildError` when it fails."""
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

    def stop(self) -> None:
        super().stop()
        self.pipe.close()


class Sidecar(Child):
    """``tierd`` on a port of this machine."""

    def __init__(self, port: int) -> None:
        super().__init__("service.cli", "--port", str(port), pipe=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.search(r"http://\S+/", said)
        if found is None:
            said += self.process.stdout.read()
            self.stop()
            raise ChildError(f"the sidecar did not start: {said.strip() or 'it said nothing'}")
        self.url = found.group()

    def rank(self, run_name: str) -> dict[str, Any] | None:
        """What ``GET /v1/status`` shows of rank 0 of a live run, or ``None``."""
        try:
            with urllib.request.urlopen(f"{self.url}v1/status", timeout=5) as answer:  # noqa: S310 (loopback)
                runs = json.load(answer)["runs"]
        except OSError:  # it does not answer; the verdict says so in the end, and training goes on
            return None
        ranks = [rank for run in runs if run["name"] == run_name for rank in run["ranks"]]
        return next((rank for rank in ranks if rank["state"] == "live"), None)
