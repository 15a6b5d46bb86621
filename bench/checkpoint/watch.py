"""Memory seen from outside: what a container is charged for, the page cache included.

A process that writes through the page cache takes memory that its RSS does not show. The kernel gives it back when
others need it, but charges it to the process's cgroup until then, and writes back what is dirty first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from larger.watch import sample

EVERY = 0.05
"""Seconds between two samples."""


@dataclass(slots=True)
class Charge:
    """Bytes in each sample: anonymous memory of the processes, and the page cache of the machine."""

    samples: list[int] = field(default_factory=list)

    @property
    def rise(self) -> int:
        """From the first sample to the highest."""
        return max(self.samples) - self.samples[0]

    def take(self, pids: Sequence[int]) -> None:
        """One more, unless a process is gone."""
        processes = [now for pid in pids if (now := sample(pid)) is not None]
        if len(processes) == len(pids):
            self.samples.append(sum(now.anonymous for now in processes) + processes[-1].page_cache)


@contextmanager
def charged(pids: Sequence[int]) -> Iterator[Charge]:
    """Sampled from before the block until behind it."""
    charge, over = Charge(), threading.Event()

    def follow() -> None:
        while not over.wait(EVERY):
            charge.take(pids)

    charge.take(pids)
    thread = threading.Thread(target=follow)
    thread.start()
    try:
        yield charge
    finally:
        over.set()
        thread.join()
    charge.take(pids)
