"""Which micro-batch an update is made of."""

from __future__ import annotations


class Accumulation:
    """Counts micro-batches: ``steps`` of them make an update, unless the script sets ``boundary``.

    ``waiting`` of all ``micro_steps`` wait for their update. ``scaled`` counts losses that were scaled and not sent
    backward yet. ``syncing`` is False inside no_sync.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.micro_steps = 0
        self.waiting = 0
        self.boundary: bool | None = None
        self.scaled = 0
        self.syncing = True

    @property
    def at_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one before an update."""
        return self.waiting + 1 >= self.steps if self.boundary is None else self.boundary

    def count(self, *, updated: bool) -> None:
        """A micro-batch has ended, and with it an update or not."""
        self.micro_steps += 1
        self.waiting = 0 if updated else self.waiting + 1

    def drop(self) -> None:
        """The gradients since the last update are gone: their micro-batches do not count."""
        self.micro_steps -= self.waiting
        self.waiting = 0

    def resume(self, micro_steps: int) -> None:
        """Go on after so many micro-batches, those behind the last update waiting."""
        self.micro_steps = micro_steps
        self.waiting = micro_steps % self.steps
