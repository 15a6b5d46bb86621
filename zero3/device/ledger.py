"""Counts memory that torch allocates against the budget of a plan."""

from __future__ import annotations

from tiering.errors import ArenaError


class LedgerEntry:
    """Bytes counted in a Ledger."""

    def __init__(self, ledger: Ledger, nbytes: int) -> None:
        self.ledger = ledger
        self.nbytes = nbytes

    def release(self) -> None:
        self.ledger.used -= self.nbytes


class Ledger:
    """Counts bytes of memory that torch allocates, as ``name``, against a budget."""

    def __init__(self, capacity: int, name: str) -> None:
        self.capacity = capacity
        self.name = name
        self.used = 0
        self.peak = 0

    def try_lease(self, nbytes: int, kind: str, *, at: int | None = None) -> LedgerEntry | None:
        """Count ``nbytes`` if they fit. ``kind`` and ``at`` have no effect, because a ledger has no addresses."""
        if self.used + nbytes > self.capacity:
            return None
        # Without a lock: only one thread at a time runs a pass.
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return LedgerEntry(self, nbytes)

    def lease(self, nbytes: int, kind: str, *, at: int | None = None, alone: bool = True) -> LedgerEntry:
        """Count ``nbytes``. Raises ArenaError if they do not fit; a wait would not free any."""
        entry = self.try_lease(nbytes, kind)
        if entry is None:
            raise ArenaError(
                f"no {nbytes} bytes of device memory left for {kind} ({self.used} of {self.capacity} in use). This is a"
                " defect of the plan: please report it; a larger device_budget works around it"
            )
        return entry
