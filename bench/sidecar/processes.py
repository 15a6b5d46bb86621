"""The two processes beside the clients: the engine and the sidecar, as the benchmark sees them."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

BENCH = Path(__file__).resolve().parents[1]
PATIENCE = 120.0  # seconds until a process that says nothing is given up
TICK = os.sysconf("SC_CLK_TCK")


class ProcessError(RuntimeError):
    """A process did not start, ended, or said nothing in time; the message has its last words."""


def busy_seconds(core: int) -> float:
    """In which the core did anything at all so far, interrupts included."""
    line = next(
        line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")
    )
    user, nice, system, _idle, _waiting, *interrupts = map(int, line.split()[1:8])
    return (user + nice + system + sum(interrupts)) / TICK


@dataclass(frozen=True, slots=True)
class Step:
    """When it began and was over, by the monotonic clock."""

    began: float
    ended: float


class _Process:
    """A child whose first line says that it is ready. Closing it ends it."""

    name: str

    def __init__(self, command: Sequence[str], first: str, **environment: str) -> None:
        # close() closes it.
        self._errors = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=BENCH,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        try:
            in_time = select.select([self._process.stdout], [], [], PATIENCE)[0]
            self.first_line = self._process.stdout.readline() if in_time else ""
            if first not in self.first_line:
                raise self._failed("did not start")
        except BaseException:
            self.close()
            raise

    def _failed(self, state: str) -> ProcessError:
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        output = " / ".join(self._errors.read().strip().splitlines()[-5:]) or "nothing"
        return ProcessError(f"{self.name} {state}; the last it said: {output}")

    def cpu_seconds(self) -> float:
        """Of all its threads so far, in user space and in the kernel."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Trainer(_Process):
    """Trains on one core all the time. Raises ProcessError."""

    name = "the engine"

    def __init__(self, core: int, directory: Path, run_directory: Path, *, width: int, layers: int) -> None:
        settings = {
            "core": core,
            "directory": str(directory),
            "run_directory": str(run_directory),
            "width": width,
            "layers": layers,
        }
        command = ["-m", "sidecar.trainer", json.dumps(settings)]
        super().__init__(command, "ready", TIERING_DEVICE="cpu", OMP_NUM_THREADS="1")
        self.core = core
        self._steps: list[Step] = []
        self._said = threading.Condition()
        self._publishes = True
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # closed meanwhile
            for line in self._process.stdout:
                began, end = map(float, line.split())
                with self._said:
                    self._steps.append(Step(began, end))
                    self._said.notify()

    def publish(self, publishing: bool) -> None:
        """Have its page on or off from its next step on."""
        if publishing != self._publishes:
            print("publish" if publishing else "hush", file=self._process.stdin)
            self._publishes = publishing

    def others_seconds(self) -> float:
        """In which its core did something else than its own work so far."""
        return busy_seconds(self.core) - self.cpu_seconds()

    def between(self, began: float, end: float) -> list[float]:
        """Seconds of every step that began and was over in that time. Forgets what was before."""
        with self._said:
            if not self._said.wait_for(lambda: self._steps and self._steps[-1].ended >= end, PATIENCE):
                raise self._failed("makes no steps any more")
            self._steps = [step for step in self._steps if step.began >= began]
            return [step.ended - step.began for step in self._steps if step.ended <= end]


class Nodes(_Process):
    """Simulated nodes, all of one run. Raises ProcessError."""

    name = "the simulated nodes"

    def __init__(self, nodes: int, ranks: int) -> None:
        super().__init__(["-m", "sidecar.nodes", json.dumps({"nodes": nodes, "ranks": ranks})], "127.0.0.1:")
        self.addresses = self.first_line.strip()


class Sidecar(_Process):
    """A ``tierd`` of a run directory (``--dir``) or of nodes (``--of``), on the cores of this process.

    Raises ProcessError.
    """

    name = "tierd"

    def __init__(self, *source: str) -> None:
        super().__init__(["-m", "service.cli", "--port", "0", *source], "http://")
        match = re.search(r"http://127\.0\.0\.1:(\d+)/", self.first_line)
        if match is None:
            raise self._failed(f"named no address of this machine: {self.first_line}")
        self.port = int(match[1])

    def pause(self) -> None:
        """Keep it from running at all, as if it were not there."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def peak_bytes(self) -> int:
        """The most memory that it ever had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
