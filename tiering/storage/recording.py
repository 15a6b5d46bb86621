"""A recording of transfers: what was done in each file, and when. The trace of an engine is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiering._aio import ffi, lib
from tiering.storage.request import KIND_NAMES, Request

_RESULTS = ffi.typeof("aio_result[]")


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One transfer that is over, and when: nanoseconds of CLOCK_MONOTONIC, which ``time.monotonic_ns`` reads.

    C took the times of ``issued`` (its first block) and ``done``, however late the result was asked for.
    ``submitted`` is 0 if that was before recording began. ``error`` is an errno, 0 if all bytes were moved.
    """

    kind: str  # read, write or flush
    file: str
    names: tuple[str, ...]
    offset: int
    nbytes: int
    submitted: int
    issued: int
    done: int
    error: int


class Recording:
    """The transfers of the context ``handle`` that have ended since it began. ``files``: name, and whether direct."""

    def __init__(self, handle: Any, files: Mapping[int, tuple[str, bool]]) -> None:
        self._handle = handle
        self._files = files
        self._records: list[TransferRecord] = []

    def add(self, records: list[TransferRecord]) -> None:
        """Add the records of a request, once."""
        self._records += records

    def in_order(self) -> list[TransferRecord]:
        """All records, in the order of issue."""
        return sorted(self._records, key=lambda record: record.issued)

    def records_of(self, request: Request, result: Any) -> list[TransferRecord]:
        """What was done in each file of ``request``, whose whole result is ``result``. C has not released it yet."""
        results = [result]
        if request.vector:
            results = ffi.new(_RESULTS, len({piece.file for piece in request.vector}))
            # -ESTALE: another thread has just released it, and has these records.
            if lib.aio_vector_results(self._handle, request.ticket[0], results, len(results)) < 0:
                return []
        return [self._record(request, each) for each in results if each.issued_ns]

    def _record(self, request: Request, result: Any) -> TransferRecord:
        pieces = [piece for piece in request.vector if piece.file == result.file]
        return TransferRecord(
            kind=KIND_NAMES[request.kind],
            file=self._files[result.file][0],
            names=request.names,
            offset=pieces[0].offset if pieces else request.offset,
            nbytes=sum(piece.nbytes for piece in pieces) if pieces else request.nbytes,
            submitted=request.submitted,
            issued=result.issued_ns,
            done=result.done_ns,
            error=max(0, -result.bytes),
        )
