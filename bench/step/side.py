"""A side as the benchmark sees it: a process that trains when told to, and sleeps otherwise."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .reference import Model

PEER_RECIPE = (
    "make one with `python -m venv DIR && DIR/bin/pip install torch deepspeed==0.19.8 ninja` (its extensions need a C++"
    " compiler, libaio's headers and some minutes at their first use) and pass --peers DIR/bin/python"
)

_BENCH = Path(__file__).resolve().parents[1]


class SideError(RuntimeError):
    """A side did not start, ended, or did not answer in time; the message says what it said last."""


@dataclass(frozen=True, slots=True)
class Round:
    """Some steps of a side, and what they came to: seconds and bytes of all of them together.

    ``settled`` is the part of ``seconds`` that it took to get idle behind the last step. ``disk`` is what the kernel
    counted, (read, written); ``counted`` what the side did itself. ``peak`` is VmHWM, ``age`` that of the process.
    """

    steps: int
    seconds: float
    forward: float
    backward: float
    update: float
    settled: float
    loss: float
    peak: int
    disk: tuple[int, int]
    counted: dict[str, float]
    age: float

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def moved(self) -> float:
        """Bytes over NVMe per step, both directions: as the side counts them, else as the kernel does."""
        counted = self.counted.get("read", 0) + self.counted.get("written", 0)
        return (counted or sum(self.disk)) / self.steps

    @property
    def stall_share(self) -> float:
        return self.counted.get("stalled", 0.0) / self.seconds


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start: ``module`` of this package, run by ``python``. ``on_disk``: it gets a directory for its state."""

    name: str
    module: str
    model: Model
    settings: dict[str, Any] = field(default_factory=dict)
    on_disk: bool = False
    python: Path = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class Place:
    """Where sides run: ``directory`` on the disk, ``threads`` each, and the seconds after which one is given up."""

    directory: Path
    threads: int
    patience: float


def environment(spec: Spec, threads: int) -> dict[str, str]:
    """As many threads for each. DeepSpeed's is that of one process without a launcher."""
    variables = os.environ | {"OMP_NUM_THREADS": str(threads)}
    if spec.module == "deepspeed":
        path = (
            f"{spec.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # its JIT looks for ninja
        )
        variables |= {"PATH": path, "DS_ACCELERATOR": "cpu"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    return variables


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Side:
    """A process that has built its model. ``facts`` are what it said of itself then. Raises SideError."""

    def __init__(self, spec: Spec, place: Place) -> None:
        self.name, self.module = spec.name, spec.module
        self.rounds: list[Round] = []
        self._patience = place.patience
        self._said = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by close()
        self._directory = (
            tempfile.TemporaryDirectory(dir=place.directory, prefix="side.") if spec.on_disk else None
        )
        try:
            self._process = subprocess.Popen(
                [spec.python, "-m", f"step.{spec.module}"],
                cwd=_BENCH,
                env=environment(spec, place.threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
        except OSError as error:
            self._clean()
            raise SideError(f"{spec.name}: {spec.python} cannot be run ({error.strerror})") from error
        directory = self._directory.name if self._directory is not None else None
        settings = {"directory": directory, **spec.settings}
        try:
            self.facts = self._ask(
                {"threads": place.threads, "model": asdict(spec.model), "settings": settings}
            )
        except BaseException:
            self.close()
            raise

    def run(self, steps: int) -> Round:
        """Train ``steps`` steps."""
        told = Round(**self._ask({"steps": steps}))
        self.rounds.append(told)
        return told

    def trace(self, path: Path, steps: int = 3) -> None:
        """Have a whole step of the next ``steps`` written to ``path``."""
        self._ask({"trace": str(path), "steps": steps})

    def close(self) -> None:
        """End the process and remove its directory. A process that does not end when its input does is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # a question that an ended process never read
            self._process.stdin.close()
        try:
            self._process.wait(self._patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._clean()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _clean(self) -> None:
        self._said.close()
        if self._directory is not None:
            self._directory.cleanup()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):
            print(json.dumps(question), file=self._process.stdin, flush=True)
            # An answer is one short write and nothing else is in the pipe: a readable pipe holds the whole line.
            if not select.select([self._process.stdout], [], [], self._patience)[0]:
                self._process.kill()
                raise SideError(
                    f"{self.name} gave no answer within {self._patience:g} s and was ended; the last it said:"
                    f" {self._last_words()}"
                )
            line = self._process.stdout.readline()
        if not line:
            raise SideError(
                f"{self.name} ended with status {self._process.wait()}; the last it said: {self._last_words()}"
            )
        told: dict[str, Any] = json.loads(line)
        return told

    def _last_words(self) -> str:
        self._said.seek(0)
        return " / ".join(self._said.read().strip().splitlines()[-5:]) or "nothing"
