"""Our side as the benchmark sees it: a worker process that runs a load when told to."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiering.arena import round_up
from tiering.tierbench.comparison.fio import Job, Reading
from tiering.tierbench.words import READ_WRITE, is_random, reads, writes

_BENCH = Path(__file__).resolve().parents[1]


class CannotStart(RuntimeError):  # noqa: N818 # says what happened, as a sentence would
    """The engine does not start on this machine; the message says why."""


def request_blocks(job: Job) -> int:
    """Blocks per request. Sequential requests fill the queue, as a layer's parameters do.

    Mixed ones do, too: blocks of a read and a write take turns. Random ones are single blocks, because blocks of one
    request follow each other on disk.
    """
    if is_random(job.rw):
        return 1
    return max(job.iodepth, 4)


BATCH = 256
"""Blocks waited for at a time; two batches are submitted, so the queue stays full.

Large, because a process that sleeps wakes up with cold caches: a hundred microseconds of Python each time, here.
"""


class Ours:
    """A worker with a context for the file, block and depth of ``job``; jobs that differ in ``rw`` may follow.

    Memory is what fio has, ``iodepth`` blocks (twice that when mixed), which requests that follow one another use in
    turn. ``private`` gives every request submitted memory of its own: checksums of a buffer need it to themselves.
    """

    def __init__(self, job: Job, engine: str, *, private: bool = False, verify: bool = False) -> None:
        self.private = private
        self.job = job
        jobs = [replace(job, rw=rw) for rw in READ_WRITE]
        memory = max(self._window(one, blocks) for one in jobs for blocks in (1, request_blocks(one)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aio.worker"],
            cwd=_BENCH,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        setup = {
            "path": job.paths[0],
            "size": job.size,
            "direct": job.direct,
            "bs": job.bs,
            "iodepth": job.iodepth,
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

    def run(self, job: Job, seconds: float, *, blocks: int | None = None) -> Reading:
        """Run ``job`` for ``seconds``, in requests of ``blocks`` blocks."""
        blocks = blocks or request_blocks(job)
        told = self._ask(
            {
                "rw": job.rw,
                "request": blocks * job.bs,
                "batch": self._batch(blocks),
                "window": self._window(job, blocks),
                "seconds": seconds,
            }
        )
        return Reading(told["read"], told["write"], told["seconds"], told["cpu_seconds"])

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
        return -(-max(BATCH, self.job.iodepth) // blocks)

    def _window(self, job: Job, blocks: int) -> int:
        """Bytes of memory in use by requests of ``blocks`` blocks; mixed ones do not share theirs."""
        shared = max(blocks * (1 + (reads(job.rw) and writes(job.rw))), job.iodepth)
        wanted = 2 * blocks * self._batch(blocks) if self.private else shared
        return self.job.bs * round_up(wanted, blocks)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with status {self._process.wait()}; its message is above")
        told: dict[str, Any] = json.loads(line)
        return told
