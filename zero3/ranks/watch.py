"""Waits for collectives of one engine: they end with the error that names a lost rank, and keep it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from tiering.errors import DistributedError
from zero3.ranks.peers import Peers


class Watch:
    """The ``peers`` of one engine, and ``failure``, the first error of the ranks that this rank has raised."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.failure: DistributedError | None = None

    def check(self) -> None:
        """DistributedError if a failure of this rank or of another one has ended this engine."""
        if self.failure is not None:
            raise self.failure
        with self.failing():
            self.peers.check()

    def wait(self, work: dist.Work, label: str, group: str) -> None:
        """Wait for the collective ``label`` of ``group``. Raises as ``Peers.wait``."""
        with self.failing():
            self.peers.wait(work, label, group=group)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Keeps a DistributedError of the block as ``failure``."""
        try:
            yield
        except DistributedError as error:
            self.failure = self.failure or error
            raise
