"""A side as the benchmark sees it: a process that trains when told to, and sleeps otherwise."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from frame.side import SideError, free_port

from .work import Work

_BENCH = Path(__file__).resolve().parents[1]
LAST_WORDS = 5  # lines
GOODBYE = 10.0
"""Seconds that a side gets to close: the driver unpins gigabytes."""


@dataclass(frozen=True, slots=True)
class Round:
    """Some steps of a side, and what they came to: of all of them together, until nothing was in flight any more.

    ``update`` is how long the calls that step took. ``computed`` is what forward and backward took by the device's own
    clock; it, and what torch's allocator counted, is None on a CPU. ``counted`` is what the side counts itself.
    """

    tokens: int  # in a step
    steps: int
    seconds: float
    update: float
    loss: float
    counted: dict[str, float]
    host: int
    pinned: int | None
    allocated: int | None
    reserved: int | None
    unusable: int | None
    device_allocations: int | None
    retries: int | None
    computed: float | None

    @property
    def per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.per_step

    def share(self, what: str) -> float:
        """Of the round's seconds, those of a counter."""
        return self.counted.get(what, 0.0) / self.seconds


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start: ``module`` of this package, run by ``python``, which will take about so many bytes.

    ``on_disk``: it gets a directory for its state.
    """

    name: str
    module: str
    device: int
    host: int
    settings: dict[str, Any] = field(default_factory=dict)
    on_disk: bool = False
    python: Path = Path(sys.executable)


@dataclass(frozen=True, slots=True)
class Place:
    """Where sides run: ``directory`` on the disk, ``threads`` each."""

    directory: Path
    threads: int


def environment(spec: Spec, work: Work, threads: int) -> dict[str, str]:
    """As many threads for each. DeepSpeed's is that of one process without a launcher."""
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "TIERING_DEVICE": work.device}
    variables.pop("PYTHONSAFEPATH", None)  # the parts are found where they lie
    if spec.module == "deepspeed":
        path = (
            f"{spec.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # its JIT looks for ninja
        )
        variables |= {"PATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        if work.card is None:
            variables["DS_ACCELERATOR"] = "cpu"
    return variables


class Side:
    """A process that builds its model, from now on: ``wait`` says when it has. Raises SideError."""

    def __init__(self, spec: Spec, work: Work, place: Place) -> None:
        self.spec, self.name = spec, spec.name
        self.facts: dict[str, Any] = {}
        self._said = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - closed by close()
        self._directory = (
            tempfile.TemporaryDirectory(dir=place.directory, prefix="side.") if spec.on_disk else None
        )
        try:
            self._process = subprocess.Popen(
                [spec.python, "-m", f"gpu_step.{spec.module}"],
                cwd=_BENCH,
                env=environment(spec, work, place.threads),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                start_new_session=True,  # what it starts, a compiler say, is ended with it
            )
        except OSError as error:
            self._clean()
            raise SideError(f"{spec.name}: {spec.python} cannot be run ({error.strerror})") from error
        directory = self._directory.name if self._directory is not None else None
        settings = {"directory": directory, **spec.settings}
        self._tell({"threads": place.threads, "work": asdict(work), "settings": settings})

    def wait(self, seconds: float) -> None:
        """Until it has built its model; ``facts`` are what it says of itself then."""
        self.facts = self._answer(seconds)

    def run(self, tokens: int, steps: int, seconds: float) -> Round:
        """Train ``steps`` steps of ``tokens`` tokens; SideError if that takes longer than ``seconds``."""
        self._tell({"tokens": tokens, "steps": steps})
        return Round(tokens=tokens, **self._answer(seconds))

    def leave(self) -> None:
        """Let the process end, without waiting for that."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a question that an ended process never read
            self._process.stdin.close()

    def close(self) -> None:
        """End the process and remove its directory. A process that does not end when its input does is killed."""
        assert self._process.stdout is not None
        self.leave()
        try:
            self._process.wait(GOODBYE)
        except subprocess.TimeoutExpired:
            self._kill()
        self._process.stdout.close()
        self._clean()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _clean(self) -> None:
        self._said.close()
        if self._directory is not None:
            self._directory.cleanup()

    def _tell(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer that does not come says why
            print(json.dumps(question), file=self._process.stdin, flush=True)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        # An answer is one short write and nothing else is in the pipe: a readable pipe holds the whole line.
        if not select.select([self._process.stdout], [], [], max(0.0, seconds))[0]:
            self._kill()
            raise SideError(
                f"{self.name} gave no answer within {seconds:.0f} s and was ended; the last it said:"
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
        return " / ".join(self._said.read().strip().splitlines()[-LAST_WORDS:]) or "nothing"
