"""Several transfers as one, for a range of an extent that lies on more than one path."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeVar

from tiering.errors import SwapError
from tiering.storage.aio import Ticket
from tiering.storage.arena import Completion

Part = TypeVar("Part", bound=Completion)


class AllOf(Generic[Part]):
    """Several completions as one, for a lease that more than one transfer uses."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def done(self) -> bool:
        """True once every part is over."""
        return all(part.done() for part in self.parts)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all parts, then raise the first error: the memory is in use until then.

        Raises NotDoneError after ``timeout`` seconds in all, also if a part has failed: another one is under way.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        total, error = 0, None
        for part in self.parts:
            try:
                total += part.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
            # Go on: the other parts still use the memory, which the caller releases after this.
            except SwapError as failed:
                error = error or failed
        # Only after the last part.
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
        """Cancel the parts that have not started, from the last; whether there is one: ``wait`` raises ECANCELED then.
        The transfer is done when the other parts are."""
        # From the last one, because parts start from the first: where one has started, those before it probably have,
        # too.
        for part in reversed(self.parts):
            if not part.cancel():
                return part is not self.parts[-1]
        return bool(self.parts)


Transfer = Ticket | StripedTicket
