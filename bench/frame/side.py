"""A side as the benchmark sees it: processes that work when called, and sleep otherwise."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .child import ERROR, START
from .reference_model import Model
from .training import Round

PEER_RECIPE = (
    "make one with `python -m venv DIR && DIR/bin/pip install torch deepspeed==0.19.8 ninja` (its extensions need a C++"
    " compiler, libaio's headers and some minutes at their first use) and pass --peers DIR/bin/python"
)

BENCH = Path(__file__).resolve().parents[1]
LAST_LINES = 5  # of standard error, in the message of a side that failed


class SideError(RuntimeError):
    """A side did not start, ended, raised, or did not answer in time; the message has its last output."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start: ``module`` of bench/, run by ``python`` in ``ranks`` processes.

    ``on_disk``: it gets a directory for its state. ``grouped``: it gets the environment of a process group even if it
    has one rank, as DeepSpeed requires. ``descriptors`` are files that its processes inherit.
    """

    name: str
    module: str
    model: Model | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    on_disk: bool = False
    ranks: int = 1
    python: Path = Path(sys.executable)
    grouped: bool = False
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where sides run: ``directory`` on the disk, ``threads`` of each rank, and the seconds that a call may take."""

    directory: Path
    threads: int
    patience: float
    device: str = "cpu"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def group_variables(ranks: int) -> list[dict[str, str]]:
    """The environment of each rank of a process group, as torchrun sets it."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def environment(python: Path, threads: int, device: str = "cpu") -> dict[str, str]:
    """What every process has: as many threads, the same device, and the tools beside its interpreter (ninja)."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    variables = os.environ | {"PATH": path, "OMP_NUM_THREADS": str(threads), "TIERING_DEVICE": device}
    variables.pop("PYTHONSAFEPATH", None)  # the modules of bench/ are found in the working directory
    return variables | ({"DS_ACCELERATOR": "cpu"} if device == "cpu" else {})


class Side:
    """The processes of one side, which have built what ``spec`` says. Raises SideError.

    ``facts`` are what rank 0 says of itself, ``all_facts`` what each rank does. ``prefix`` begins the command.
    Without ``wait`` it is still building: ``built`` waits for that.
    """

    def __init__(self, spec: Spec, place: Place, *, prefix: Sequence[str] = (), wait: bool = True) -> None:
        self.spec, self.name, self.place = spec, spec.name, place
        self.rounds: list[Round] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._output = [tempfile.TemporaryFile(mode="w+") for _ in range(spec.ranks)]  # noqa: SIM115 - see close()
        self._directory = (
            tempfile.TemporaryDirectory(dir=place.directory, prefix="side.") if spec.on_disk else None
        )
        try:
            self._start(prefix)
            self._send(START, self.arguments())
            if wait:
                self.built(place.patience)
        except BaseException:
            self.close(at_once=True)
            raise

    def built(self, seconds: float) -> None:
        """Wait until the worker is built."""
        self._set_facts(self._results(seconds))

    def arguments(self) -> dict[str, Any]:
        """Of the worker's constructor."""
        model = asdict(self.spec.model) if self.spec.model is not None else None
        return {
            "threads": self.place.threads,
            "model": model,
            "settings": self.settings(self.spec.settings),
        }

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """``settings`` with the directory for the side's state, None if it has none."""
        return {"directory": self._directory.name if self._directory is not None else None, **settings}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def train(self, steps: int) -> Round:
        """Train ``steps`` steps on one rank."""
        self.rounds.append(Round(**self.call("train", steps=steps)[0]))
        return self.rounds[-1]

    def trace(self, path: Path, steps: int = 3) -> None:
        """Write a whole step of the next ``steps`` to ``path``, in which RANK stands for the rank."""
        self.call("trace", path=str(path), steps=steps)

    def rebuild(self, settings: Mapping[str, Any]) -> None:
        """Build it anew, with other settings, in the same processes."""
        self._set_facts(self.call("rebuild", settings=self.settings(settings)))
        self.rounds.clear()

    def call(self, method: str, *, patience: float | None = None, **arguments: Any) -> list[Any]:
        """Call ``method`` of every rank's worker; the results in the order of ranks.

        SideError, and all ranks are killed, if one fails or the call takes longer than ``patience`` seconds.
        """
        self._send(method, arguments)
        return self._results(self.place.patience if patience is None else patience)

    def leave(self) -> None:
        """Let the processes end, without waiting for that."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # a call that an ended process never read
                process.stdin.close()

    def close(self, *, at_once: bool = False) -> None:
        """End the processes and remove their directory. Those that do not end with their input are killed."""
        self.leave()
        deadline = time.monotonic() + (0 if at_once else self.place.patience)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()
        for output in self._output:
            output.close()
        if self._directory is not None:
            self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def _start(self, prefix: Sequence[str]) -> None:
        spec, place = self.spec, self.place
        every = environment(spec.python, place.threads, place.device)
        ranks = group_variables(spec.ranks) if spec.grouped or spec.ranks > 1 else [{}]
        for variables, output in zip(ranks, self._output, strict=True):
            try:
                process = subprocess.Popen(
                    [*prefix, str(spec.python), "-m", spec.module],
                    cwd=BENCH,
                    env=every | variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    pass_fds=spec.descriptors,
                    text=True,
                    start_new_session=True,  # what it starts, for example a compiler, is killed with it
                )
            except OSError as error:
                raise SideError(f"{spec.name}: {spec.python} cannot be run ({error.strerror})") from error
            self._processes.append(process)

    def _set_facts(self, facts: list[dict[str, Any]]) -> None:
        self.all_facts, self.facts = facts, facts[0]

    def _send(self, method: str, arguments: Mapping[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, which the missing answer shows
                print(json.dumps([method, arguments]), file=process.stdin, flush=True)

    def _results(self, seconds: float) -> list[Any]:
        try:
            return self._awaited(time.monotonic() + seconds, seconds)
        except SideError:
            for process in self._processes:
                _kill(process)
            raise

    def _awaited(self, deadline: float, seconds: float) -> list[Any]:
        waiting = dict(enumerate(self._processes))
        results: dict[int, Any] = {}
        while waiting:
            # An answer is one short write and nothing else is in the pipe: a readable pipe holds the whole line.
            pipes: dict[Any, int] = {process.stdout: rank for rank, process in waiting.items()}
            ready = select.select(list(pipes), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                late = min(waiting)
                raise SideError(
                    f"{self._title(late)} gave no answer within {seconds:.0f} s and was ended; its last output:"
                    f" {self._last_output(late)}"
                )
            for pipe in ready:
                rank = pipes[pipe]
                results[rank] = self._result(rank, waiting.pop(rank))
        return [results[rank] for rank in sorted(results)]

    def _result(self, rank: int, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SideError(
                f"{self._title(rank)} ended with status {process.wait()}; its last output: {self._last_output(rank)}"
            )
        result = json.loads(line)
        if isinstance(result, dict) and ERROR in result:
            raise SideError(f"{self._title(rank)} failed: {result[ERROR]}")
        return result

    def _title(self, rank: int) -> str:
        return f"rank {rank} of {self.name}" if self.spec.ranks > 1 else self.name

    def _last_output(self, rank: int) -> str:
        self._output[rank].seek(0)
        return " / ".join(self._output[rank].read().strip().splitlines()[-LAST_LINES:]) or "nothing"


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
