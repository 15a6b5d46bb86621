"""Our side, in a process that does nothing else: one AioContext over one file. Between calls every thread sleeps."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from frame.child import serve
from frame.process import cpu_seconds, driver_seconds

from tiering.storage.aio import AioContext
from tiering.storage.arena import Arena
from tiering.storage.tickets import Ticket
from tiering.tierbench.words import is_random


def offsets(size: int, request: int, *, scattered: bool) -> Iterator[int]:
    """Where the requests of one direction go, for ever. Raises ValueError when not one fits."""
    count = size // request
    if count == 0:
        raise ValueError(f"a file of {size} bytes has no room for a request of {request}")
    if scattered:
        source = random.Random()
        while True:
            yield source.randrange(count) * request
    yield from itertools.cycle(range(0, count * request, request))


class Worker:
    """Keeps a context full of requests for a while, and counts."""

    # Eight parameters, because they are the fields of a request: the parent process sends them by name, as JSON.
    def __init__(
        self,
        path: str,
        size: int,
        direct: bool,
        bs: int,
        iodepth: int,
        engine: str,
        verify: bool,
        memory: int,
    ) -> None:
        self.size = size
        self.arena = Arena.map(memory, "bench")
        self.lease = self.arena.lease(memory, "bench")
        self.fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        self.context = AioContext(engine=engine, block_size=bs, queue_depth=iodepth, verify=verify)
        self.context.register(self.lease)
        self.file = self.context.add_file(self.fd, direct=direct, name=path)
        # What is in use is known once something was: the kernel takes the file with its first operation.
        self.context.read(self.file, self.lease, 0, bs).wait()
        words = np.frombuffer(self.lease.view, dtype=np.uint64)
        words[:] = np.random.default_rng(0).integers(0, 2**63, size=words.size, dtype=np.uint64)

    def facts(self) -> dict[str, Any]:
        return {"engine": self.context.engine, "flags": self.context.info.flags}

    def fill(self) -> dict[str, Any]:
        """Write the whole file, in requests of all the memory there is."""
        tickets = [
            self.context.write(self.file, self.lease, at, min(self.lease.nbytes, self.size - at))
            for at in range(0, self.size, self.lease.nbytes)
        ]
        return {"nbytes": sum(ticket.wait() for ticket in tickets)}

    def run(self, rw: str, request: int, batch: int, window: int, seconds: float) -> dict[str, Any]:
        """Two batches of ``batch`` requests at a time, each waited for as a whole, until ``seconds`` have passed.

        Request i, of ``request`` bytes, uses the bytes at i * request of a window of ``window`` bytes, cyclically.
        """
        parts = [self.lease.part(at, request) for at in range(0, window, request)]
        buffers = itertools.cycle(parts)
        reads, writes = (
            (way, offsets(self.size, request, scattered=is_random(rw)))
            for way in (self.context.read, self.context.write)
        )
        one_way = {"read": [reads], "write": [writes]}.get(rw.removeprefix("rand"))
        ways = itertools.cycle(one_way or [reads, writes])

        def submit() -> list[Ticket]:
            return [
                way(self.file, next(buffers), next(places), request)
                for way, places in itertools.islice(ways, batch)
            ]

        before = self.context.stats()[self.file]
        driver, cpu, start = driver_seconds(), cpu_seconds(), time.perf_counter()
        deadline = start + seconds
        under_way = deque([submit(), submit()])
        while under_way:
            # The last one first: who waits for it sleeps once, and finds the others done.
            for ticket in reversed(under_way.popleft()):
                ticket.wait()
            if time.perf_counter() < deadline:
                under_way.append(submit())
        elapsed, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        after = self.context.stats()[self.file]
        return {
            "read": after.read.bytes - before.read.bytes,
            "write": after.write.bytes - before.write.bytes,
            "seconds": elapsed,
            "cpu_seconds": cpu,
            "driver_seconds": driver_seconds() - driver,
        }

    def close(self) -> None:
        self.context.close()
        os.close(self.fd)


if __name__ == "__main__":
    serve(Worker)
