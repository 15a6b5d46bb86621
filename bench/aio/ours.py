"""Our side as the benchmark sees it: a worker process that runs a load when told to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frame.side import Place, Side, Spec

from tiering.storage.arena import round_up
from tiering.tierbench.comparison.fio import FioJob, RunReading
from tiering.tierbench.words import READ_WRITE, is_random, reads, writes

PATIENCE = 600.0
"""Seconds that an answer may take: a file is written whole in one of them."""


def request_blocks(job: FioJob) -> int:
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


@dataclass(frozen=True)
class OurReading(RunReading):
    """A run of ours. ``driver_seconds`` are the CPU seconds of the driver thread."""

    driver_seconds: float = 0.0

    @property
    def driver_per_gb(self) -> float:
        """CPU seconds of the driver per 10^9 bytes."""
        return self.driver_seconds / (self.nbytes / 1e9)


class Ours(Side):
    """A worker with a context for the file, block and depth of ``job``; jobs that differ in ``rw`` may follow.

    Memory is what fio has, ``iodepth`` blocks (twice that when mixed), which requests that follow one another use in
    turn. ``private`` gives every request submitted memory of its own: checksums of a buffer need it to themselves.
    Raises SideError where the engine does not start.
    """

    def __init__(self, job: FioJob, engine: str, *, private: bool = False, verify: bool = False) -> None:
        self.private = private
        self.job = job
        jobs = [replace(job, rw=rw) for rw in READ_WRITE]
        memory = max(self._window(job, blocks) for job in jobs for blocks in (1, request_blocks(job)))
        self._setup = {
            "path": job.paths[0],
            "size": job.size,
            "direct": job.direct,
            "bs": job.bs,
            "iodepth": job.iodepth,
            "engine": engine,
            "verify": verify,
            "memory": memory,
        }
        super().__init__(Spec(engine, "aio.worker"), Place(Path(), 1, PATIENCE))
        self.engine: str = self.facts["engine"]
        self.flags: tuple[str, ...] = tuple(self.facts["flags"])

    def arguments(self) -> dict[str, Any]:
        return self._setup

    def run(self, job: FioJob, seconds: float, *, blocks: int | None = None) -> OurReading:
        """Run ``job`` for ``seconds``, in requests of ``blocks`` blocks."""
        blocks = blocks or request_blocks(job)
        (counted,) = self.call(
            "run",
            rw=job.rw,
            request=blocks * job.bs,
            batch=self._batch(blocks),
            window=self._window(job, blocks),
            seconds=seconds,
        )
        return OurReading(
            counted["read"],
            counted["write"],
            counted["seconds"],
            counted["cpu_seconds"],
            driver_seconds=counted["driver_seconds"],
        )

    def fill(self) -> None:
        """Write the whole file once."""
        self.call("fill")

    def _batch(self, blocks: int) -> int:
        """Requests of ``blocks`` blocks per batch; a batch is never less than the queue."""
        return -(-max(BATCH, self.job.iodepth) // blocks)

    def _window(self, job: FioJob, blocks: int) -> int:
        """Bytes of memory in use by requests of ``blocks`` blocks; mixed ones do not share theirs."""
        shared = max(blocks * (1 + (reads(job.rw) and writes(job.rw))), job.iodepth)
        window = 2 * blocks * self._batch(blocks) if self.private else shared
        return self.job.bs * round_up(window, blocks)
