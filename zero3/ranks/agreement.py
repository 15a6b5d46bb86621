"""Agreement: all ranks continue, or none does. A rank that fails informs the others, so that none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tiering.errors import CheckpointError, SwapError, TieringError, WeightsError
from tiering.storage.file_system import remedy
from zero3.ranks.collectives import Collectives

T = TypeVar("T")


def together(collectives: Collectives | None, label: str, work: Callable[[], T]) -> list[T]:
    """Do ``work`` on all ranks, and return its result on each of them, in their order.

    An error on one rank is an error on all: its own there, CheckpointError on the others. Errors of files and disks are
    CheckpointError on the rank that has them, too.
    """
    value: T | None = None
    error: Exception | None = None
    try:
        value = work()
    except Exception as caught:  # any error: the other ranks wait in the collective below
        error = _of_checkpoint(caught)
    if collectives is None:
        if error is not None:
            raise error
        return [value]  # type: ignore[list-item] # without an error it has a value
    results = collectives.run_tables.gather_objects(
        (value, None if error is None else _message_of(error)), label
    )
    if error is not None:
        raise error
    for rank, (_, message) in enumerate(results):
        if message is not None:
            raise CheckpointError(f"rank {rank} could not {label}: {message}")
    return [result for result, _ in results]  # type: ignore[misc] # without an error each has a value


class Leading:
    """Actions of rank 0 for all ranks. A failure is raised on all of them by the next ``settle``."""

    def __init__(self, collectives: Collectives | None, label: str) -> None:
        self._collectives = collectives
        self._label = label
        self._error: Exception | None = None

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` on rank 0, unless an earlier one has failed. None on other ranks and after an error."""
        if self._error is None and (self._collectives is None or self._collectives.world.rank == 0):
            try:
                return action()
            except Exception as error:
                self._error = error
        return None

    def settle(self) -> None:
        """Raise the first failure, on every rank."""
        message = None
        if self._collectives is not None:
            own_message = None if self._error is None else _message_of(self._error)
            message = self._collectives.run_tables.gather_objects(own_message, self._label)[0]
        if self._error is not None:
            raise self._error
        if message is not None:
            raise CheckpointError(f"rank 0, which writes for all, could not {self._label}: {message}")


def _of_checkpoint(error: Exception) -> Exception:
    if isinstance(error, WeightsError | SwapError):
        converted = CheckpointError(error.message)
    elif isinstance(error, OSError):
        converted = CheckpointError(
            f"{error.filename or 'a file'}: {error.strerror or error}; {remedy(error.errno or 0)}"
        )
    else:
        return error
    converted.__cause__ = error
    return converted


def _message_of(error: Exception) -> str:
    return str(error) if isinstance(error, TieringError) else f"{type(error).__name__}: {error}"
