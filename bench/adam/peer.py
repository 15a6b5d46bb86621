"""DeepSpeedCPUAdam as the benchmark sees it: a process that does a job when told to, and sleeps otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from .steps import Model

RECIPE = (
    "make one with `python -m venv DIR && DIR/bin/pip install torch deepspeed==0.19.8 ninja` (a C++ compiler is"
    " needed, for a minute, at its first use) and pass --peers DIR/bin/python"
)

_BENCH = Path(__file__).resolve().parents[1]


class PeerError(RuntimeError):
    """The peers' environment is not there, or does not work."""


def environment(python: Path, threads: int) -> dict[str, str]:
    """OpenMP with as many threads as we have; the JIT finds ninja beside the interpreter."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"}


class Peer:
    """A worker with ``threads`` threads, run by the interpreter ``python``, that steps the arrays of ``model``.

    ``idle_cpu`` are the CPU seconds that it used between its jobs, and ``our_cpu`` those that this process used during
    them: either side is to leave the machine to the other. Raises PeerError when it does not start.
    """

    def __init__(self, python: Path, model: Model, threads: int) -> None:
        self.idle_cpu = self.our_cpu = self.busy = 0.0
        self._last: float | None = None
        self._said = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                [python, "-m", "adam.worker"],
                cwd=_BENCH,
                env=environment(python, threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                pass_fds=(model.pages.descriptor,),
                text=True,
            )
        except OSError as error:
            self._said.close()
            raise PeerError(
                f"--peers {python} cannot be run ({error.strerror}): it names the interpreter of a virtual"
                f" environment; {RECIPE}"
            ) from error
        try:
            told = self._ask({"threads": threads, **model.for_peer()})
            if "error" in told:
                raise PeerError(f"--peers {python} has no DeepSpeedCPUAdam ({told['error']}); {RECIPE}")
        except PeerError:
            self.close()
            raise
        self.about: str = told["about"]

    def run(self, job: str) -> float:
        """Do ``job``, "step" or "whole", and return its milliseconds, as the worker measured them."""
        before = time.process_time()
        told = self._ask(job)
        self.our_cpu += time.process_time() - before
        self.busy += told["ms"] / 1e3
        if self._last is not None:
            self.idle_cpu += told["asked"] - self._last
        self._last = told["done"]
        return float(told["ms"])

    def check(self) -> dict[str, Any]:
        """``odd`` values found in its state, its and its ``step``."""
        return self._ask("check")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # a question that an ended process never read
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            self._said.seek(0)
            last = " / ".join(self._said.read().strip().splitlines()[-3:]) or "nothing"
            raise PeerError(f"the peers' process ended with status {status}; the last it said: {last}")
        told: dict[str, Any] = json.loads(line)
        return told
