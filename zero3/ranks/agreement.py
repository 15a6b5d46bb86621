"""Agreement: ranks go on together, or none of them does. Who cannot tells the others, so nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tiering.errors import CheckpointError, SwapError, TieringError, WeightsError
from tiering.storage.file_system import remedy
from zero3.ranks.collectives import Collectives

T = TypeVar("T")


def together(collectives: Collectives | None, what: str, work: Callable[[], T]) -> list[T]:
    """What ``work`` gives on each rank. An error on one is an error on all of them: its own there, CheckpointError.

    Errors of files and disks are CheckpointError on the rank that has them, too.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = work()
    except Exception as caught:  # also of the user's: nobody may wait for this rank
        error = _of_checkpoint(caught)
    if collectives is None:
        if error is not None:
            raise error
        return [value]  # type: ignore[list-item] # no error: it is there
    said = collectives.say((value, None if error is None else _in_words(error)), what)
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(said):
        if message is not None:
            raise CheckpointError(f"rank {rank} could not {what}: {message}")
    return [theirs for theirs, _ in said]  # type: ignore[misc] # no rank had an error: it is there


class Leading:
    """What the first of the ranks does for all. Its failure is theirs at the next ``settle``."""

    def __init__(self, collectives: Collectives | None, what: str) -> None:
        self._collectives = collectives
        self._what = what
        self._error: Exception | None = None

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Do it, on the first rank, unless something has failed there."""
        if self._error is None and (self._collectives is None or self._collectives.world.rank == 0):
            try:
                return action()
            except Exception as error:
                self._error = error
        return None

    def settle(self) -> None:
        """Raise what has failed, on every rank."""
        told = None
        if self._collectives is not None:
            mine = None if self._error is None else _in_words(self._error)
            told = self._collectives.say(mine, self._what)[0]
        if self._error is not None:
            raise self._error
        if told is not None:
            raise CheckpointError(f"rank 0, which writes for all, could not {self._what}: {told}")


def _of_checkpoint(error: Exception) -> Exception:
    if isinstance(error, WeightsError | SwapError):
        told = CheckpointError(error.message)
    elif isinstance(error, OSError):
        told = CheckpointError(
            f"{error.filename or 'a file'}: {error.strerror or error}; {remedy(error.errno or 0)}"
        )
    else:
        return error
    told.__cause__ = error
    return told


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, TieringError) else f"{type(error).__name__}: {error}"
