"""The ranks of one side as the benchmark sees them: processes that train when told to, and sleep otherwise."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from step.side import Round, SideError, free_port

from .network import Network
from .serve import Work

_BENCH = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn came to on each rank. ``wire``: bytes that the kernel saw on a network of their own, or None."""

    ranks: list[Round]
    wire: int | None

    @property
    def steps(self) -> int:
        return self.ranks[0].steps

    @property
    def per_step(self) -> float:
        """Seconds, of the rank that took longest."""
        return max(one.per_step for one in self.ranks)

    @property
    def loss(self) -> float:
        """Of the last step; the mean over the ranks, as the gradient is."""
        return sum(one.loss for one in self.ranks) / len(self.ranks)

    def counted(self, rank: int, *prefixes: str) -> float:
        """What a rank has counted per step, in everything whose name begins in one of these ways."""
        counts = self.ranks[rank].counted.items()
        return sum(count for name, count in counts if name.startswith(prefixes)) / self.steps

    @property
    def peak(self) -> int:
        return max(one.peak for one in self.ranks)


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start: ``module`` of this package on ``world_size`` ranks."""

    name: str
    module: str
    work: Work
    world_size: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where sides run: ``directory`` for swap space, ``threads`` for each rank, networks of their own or not."""

    directory: Path
    threads: int
    patience: float
    networks: bool


class Ranks:
    """As many processes, which have built what ``spec`` says. Raises SideError.

    ``facts`` are what rank 0 says of it; ``baseline`` is the resident memory of a rank before that, ``built`` the peak
    behind it, each of the rank that has most.
    """

    def __init__(self, spec: Spec, place: Place) -> None:
        self.name, self.module, self.world_size = spec.name, spec.module, spec.world_size
        self.turns: list[Turn] = []
        self._patience = place.patience
        self._processes: list[subprocess.Popen[str]] = []
        self._said = [tempfile.TemporaryFile(mode="w+") for _ in range(spec.world_size)]  # noqa: SIM115 - closed by close()
        self._directory = tempfile.TemporaryDirectory(dir=place.directory, prefix="side.")
        self._network = Network() if place.networks else None
        try:
            self._start(spec, place)
            told = self._ask({"threads": place.threads, "work": asdict(spec.work)})
            self.baseline = max(one["baseline"] for one in told)
            self.build(spec.settings)
        except BaseException:
            self.close(at_once=True)
            raise

    def build(self, settings: dict[str, Any]) -> None:
        """Build it anew; the one before is closed."""
        told = self._ask({"build": {"directory": self._directory.name, **settings}})
        self.facts: dict[str, Any] = told[0]
        self.built = max(one["peak"] for one in told)
        self.turns.clear()

    def run(self, steps: int) -> Turn:
        """Train ``steps`` steps."""
        before = self._network.sent() if self._network is not None else 0
        told = [Round(**one) for one in self._ask({"steps": steps})]
        wire = self._network.sent() - before if self._network is not None else None
        self.turns.append(Turn(told, wire))
        return self.turns[-1]

    def trace(self, path: Path) -> list[Path]:
        """Have a whole step written on every rank; the files, whose names begin with ``path``."""
        self._ask({"trace": str(path), "steps": 2})  # it begins where one ends
        return [Path(f"{path}.rank{rank}.json") for rank in range(self.world_size)]

    def close(self, *, at_once: bool = False) -> None:
        """End the processes, which end by themselves when their input does; those that do not are killed."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            if at_once:
                process.kill()
        deadline = time.monotonic() + self._patience
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()
        if self._network is not None:
            self._network.close()
        for said in self._said:
            said.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def _start(self, spec: Spec, place: Place) -> None:
        port = free_port()
        for rank in range(spec.world_size):
            variables = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(spec.world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(spec.world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": str(place.threads),
                "TIERING_DEVICE": "cpu",
            }
            command = [sys.executable, "-m", f"ranks.{spec.module}"]
            self._processes.append(
                subprocess.Popen(
                    [*(self._network.enter if self._network is not None else ()), *command],
                    cwd=_BENCH,
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said[rank],
                    text=True,
                )
            )

    def _ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer of every rank, in their order."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it has ended, which is seen below
                print(json.dumps(question), file=process.stdin, flush=True)
        waiting = dict(enumerate(self._processes))
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._patience
        while waiting:
            # An answer is one short write and nothing else is in the pipe: a readable pipe holds the whole line.
            pipes: dict[Any, int] = {process.stdout: rank for rank, process in waiting.items()}
            ready = select.select(list(pipes), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                rank = min(waiting)
                raise SideError(
                    f"rank {rank} of {self.name} gave no answer within {self._patience:g} s; the last it said:"
                    f" {self._last_words(rank)}"
                )
            for pipe in ready:
                rank = pipes[pipe]
                process = waiting.pop(rank)
                line = pipe.readline()
                if not line:
                    raise SideError(
                        f"rank {rank} of {self.name} ended with status {process.wait()}; the last it said:"
                        f" {self._last_words(rank)}"
                    )
                answers[rank] = json.loads(line)
        return [answers[rank] for rank in sorted(answers)]

    def _last_words(self, rank: int) -> str:
        self._said[rank].seek(0)
        lines = self._said[rank].read().strip().splitlines()
        return lines[-1] if lines else "nothing"
