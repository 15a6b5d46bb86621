"""Several transfers as one: what is waited for when a range of an extent lies on more than one path."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from tiering.errors import SwapError
from tiering.storage.aio import Ticket
from tiering.storage.arena import Completion

Part = TypeVar("Part", bound=Completion)


class AllOf(Generic[Part]):
    """Several completions as one: what a lease retires on when more than one transfer uses it."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def done(self) -> bool:
        """True once every part is over."""
        return all(part.done() for part in self.parts)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all of them, then raise the first error if there is one: the memory is free only now.

        NotDoneError after ``timeout`` seconds in all, whatever has failed by then: a part is still under way.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        total, error = 0, None
        for part in self.parts:
            try:
                total += part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            except SwapError as failed:
                error = error or failed
        if error is not None:
            raise error
        return total


class StripedTicket(AllOf[Ticket]):
    """One transfer over several paths; otherwise like a Ticket."""

    __slots__ = ("nbytes",)

    def __init__(self, parts: Sequence[Ticket]) -> None:
        super().__init__(parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def cancel(self) -> bool:
        """Take back the parts that were not begun, from the last; True if there is one, and ``wait`` then raises
        ECANCELED. It is done once the parts that had begun are over."""
        for part in reversed(self.parts):
            if not part.cancel():
                return part is not self.parts[-1]
        return bool(self.parts)


Transfer = Ticket | StripedTicket
