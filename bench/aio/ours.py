"""Our side as the benchmark sees it: a worker process that runs a load when told to."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from tiering.arena import round_up

from .load import Kind, Load, Reading

_BENCH = Path(__file__).resolve().parents[1]


class CannotStart(RuntimeError):  # noqa: N818
    """The engine does not start on this machine; the message says why."""


def request_blocks(load: Load) -> int:
    """Blocks per request. Sequential requests fill the queue, as a layer's parameters do.

    Mixed ones do, too: blocks of a read and a write take turns. Random ones are single blocks, because blocks of one
    request follow each other on disk.
    """
    if load.pattern == "random":
        return 1
    return max(load.depth, 4)


BATCH = 256
"""Blocks waited for at a time; two batches are submitted, so the queue stays full.

Large, because a process that sleeps wakes up with cold caches: a hundred microseconds of Python each time, here.
"""


class Ours:
    """A worker with a context for ``load``'s file, block and depth; loads that differ in kind may follow.

    Memory is what fio has, ``depth`` blocks (twice that when mixed), which requests that follow one another use in
    turn. ``private`` gives every request submitted memory of its own: checksums of a buffer need it to themselves.
    """

    def __init__(self, load: Load, engine: str, *, private: bool = False, verify: bool = False) -> None:
        self.private = private
        self.load = load
        loads = [replace(load, kind=kind) for kind in get_args(Kind)]
        memory = max(self._window(one, blocks) for one in loads for blocks in (1, request_blocks(one)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aio.worker"],
            cwd=_BENCH,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        setup = {
            "path": load.path,
            "size": load.size,
            "direct": load.direct,
            "block": load.block,
            "depth": load.depth,
            "engine": engine,
            "verify": verify,
            "memory": memory,
        }
        told = self._ask(setup)
        if "error" in told:
            self.close()
            raise CannotStart(told["error"])
        self.engine: str = told["engine"]
        self.flags: tuple[str, ...] = tuple(told["flags"])

    def run(self, load: Load, seconds: float, *, blocks: int | None = None) -> Reading:
        """Run ``load`` for ``seconds``, in requests of ``blocks`` blocks."""
        blocks = blocks or request_blocks(load)
        told = self._ask(
            {
                "kind": load.kind,
                "pattern": load.pattern,
                "request": blocks * load.block,
                "batch": self._batch(blocks),
                "window": self._window(load, blocks),
                "seconds": seconds,
            }
        )
        return Reading(told["nbytes"], told["seconds"], told["cpu_seconds"], load.block)

    def fill(self) -> None:
        """Write the whole file once."""
        self._ask({})

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batch(self, blocks: int) -> int:
        """Requests of ``blocks`` blocks per batch; a batch is never less than the queue."""
        return -(-max(BATCH, self.load.depth) // blocks)

    def _window(self, load: Load, blocks: int) -> int:
        """Bytes of memory in use by requests of ``blocks`` blocks; mixed ones do not share theirs."""
        shared = max(blocks * (1 + (load.kind == "mixed")), load.depth)
        wanted = 2 * blocks * self._batch(blocks) if self.private else shared
        return self.load.block * round_up(wanted, blocks)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with status {self._process.wait()}; its message is above")
        told: dict[str, Any] = json.loads(line)
        return told
