"""Ranks that are threads of one process, and collectives that end when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tiering.errors import DistributedError
from zero3.ranks.heartbeat import Limits
from zero3.ranks.peers import Peers

SOON = 20.0  # seconds that a wait for something certain may take


class Transfer:
    """A collective of a backend that can say when its time is up: gloo's words."""

    def __init__(self) -> None:
        self.error: str | None = None
        self._ended = threading.Event()

    def end(self, error: str | None = None) -> None:
        self.error = error
        self._ended.set()

    def wait(self, timeout: timedelta = timedelta(seconds=SOON)) -> bool:
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True


class Device:
    """A device whose collectives are in ``queued``, and the reasons for which they were aborted."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.reasons: list[str] = []

    def unended(self) -> str | None:
        return self.queued[0] if self.queued else None

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)


class Together:
    """Ranks as threads of one process; each call runs on a thread of its own."""

    def __init__(self, world_size: int, **settings: Any) -> None:
        store = dist.HashStore()
        self._threads = ThreadPoolExecutor(2 * world_size)
        device, members = settings.pop("device", None), settings.pop("members", {})
        limits = Limits(**{"timeout": SOON, "silence": SOON, "beat": 0.05, "patience": SOON} | settings)
        self.ranks = [
            Peers(store, rank, world_size, limits, device=device, members=members)
            for rank in range(world_size)
        ]
        for peers in self.ranks:
            eventually(lambda peers=peers: len(peers._heartbeat.observed) == world_size - 1)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        return self._threads.submit(function, *args, **kwargs)

    def wait(self, rank: int, label: str, transfer: Transfer | None = None) -> Future[Any]:
        self.ranks[rank].issue(label)
        return self.call(self.ranks[rank].wait, transfer or Transfer(), label)

    def note(self, rank: int, activity: str) -> None:
        """Note, and wait until it is in the store."""
        self.ranks[rank].note(activity)
        eventually(
            lambda: self.ranks[rank]._heartbeat.store.read_beats([rank], [])[rank].activity == activity
        )

    def silence(self, rank: int) -> None:
        """Its process is frozen, as far as the others can tell."""
        self.ranks[rank]._heartbeat.store.write_beat = lambda *_: None

    def close(self) -> None:
        for peers in self.ranks:
            peers.close()
        self._threads.shutdown()


class Done:
    def wait(self, timeout: timedelta | None = None) -> bool:
        return False


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


def refusal(call: Future[Any]) -> DistributedError:
    error = call.exception(SOON)
    assert isinstance(error, DistributedError), error
    return error
