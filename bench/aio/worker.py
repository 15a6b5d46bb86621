"""Our side, in a process that does nothing else: one AioContext over one file, driven from standard input.

The first line of input describes the context, each further one a run, or with nothing in it asks to fill the file; each
is answered by a line of JSON. Between runs every thread sleeps.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from tiering.aio import AioContext, Ticket
from tiering.arena import Arena
from tiering.errors import TieringError
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


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Worker:
    """Keeps a context full of requests for a while, and counts."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.size: int = setup["size"]
        self.arena = Arena.map(setup["memory"], "bench")
        self.lease = self.arena.lease(setup["memory"], "bench")
        flags = os.O_RDWR | (os.O_DIRECT if setup["direct"] else 0)
        self.fd = os.open(setup["path"], flags)
        self.context = AioContext(
            engine=setup["engine"],
            block_size=setup["bs"],
            queue_depth=setup["iodepth"],
            verify=setup["verify"],
        )
        self.context.register(self.lease)
        self.file = self.context.add_file(self.fd, direct=setup["direct"], name=setup["path"])
        # What is in use is known once something was: the kernel takes the file with its first operation.
        self.context.read(self.file, self.lease, 0, setup["bs"]).wait()
        words = np.frombuffer(self.lease.view, dtype=np.uint64)
        words[:] = np.random.default_rng(0).integers(0, 2**63, size=words.size, dtype=np.uint64)

    def describe(self) -> dict[str, Any]:
        return {"engine": self.context.engine, "flags": self.context.info.flags}

    def fill(self) -> dict[str, Any]:
        """Write the whole file, in requests of all the memory there is."""
        tickets = [
            self.context.write(self.file, self.lease, at, min(self.lease.nbytes, self.size - at))
            for at in range(0, self.size, self.lease.nbytes)
        ]
        return {"nbytes": sum(ticket.wait() for ticket in tickets)}

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """Two batches of ``batch`` requests at a time, each waited for as a whole, until ``seconds`` have passed.

        Request i, of ``request`` bytes, uses the bytes at i * request of a window of ``window`` bytes, cyclically.
        """
        request, rw = task["request"], task["rw"]
        parts = [self.lease.part(at, request) for at in range(0, task["window"], request)]
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
                for way, places in itertools.islice(ways, task["batch"])
            ]

        before = self.context.stats()[self.file]
        cpu, start = cpu_seconds(), time.perf_counter()
        deadline = start + task["seconds"]
        under_way = deque([submit(), submit()])
        while under_way:
            # The last one first: who waits for it sleeps once, and finds the others done.
            for ticket in reversed(under_way.popleft()):
                ticket.wait()
            if time.perf_counter() < deadline:
                under_way.append(submit())
        seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
        after = self.context.stats()[self.file]
        return {
            "read": after.read.bytes - before.read.bytes,
            "write": after.write.bytes - before.write.bytes,
            "seconds": seconds,
            "cpu_seconds": cpu,
        }

    def close(self) -> None:
        self.context.close()
        os.close(self.fd)


def answer(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    lines = iter(sys.stdin)
    try:
        worker = Worker(json.loads(next(lines)))
    except (TieringError, OSError) as error:
        answer({"error": str(error)})
        return
    answer(worker.describe())
    for line in lines:
        task = json.loads(line)
        answer(worker.run(task) if task else worker.fill())
    worker.close()


if __name__ == "__main__":
    main()
