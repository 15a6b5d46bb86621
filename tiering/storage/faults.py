"""Faults that an I/O context injects into its own operations, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tiering.storage.request import KINDS


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of operations ``first .. first + count - 1`` of a kind, of one file or of any.

    Operations are counted from 1; ``count=0`` has no end. An operation is a block of a request, or a continuation of a
    block; "register" is the registration of a buffer, which "any" does not cover. ``error`` is the errno of the
    failure, ``short`` the most bytes that the operation transfers (0: all), ``delay`` the seconds before it starts.
    """

    kind: Literal["read", "write", "flush", "any", "register"] = "any"
    first: int = 1
    count: int = 1
    error: int = 0
    short: int = 0
    delay: float = 0.0
    file: int | None = None

    def as_c(self) -> dict[str, int]:
        """The fields of an ``aio_fault``."""
        return {
            "kind": KINDS[self.kind],
            "file": -1 if self.file is None else self.file,
            "error": self.error,
            "first": self.first,
            "count": self.count,
            "short_bytes": self.short,
            "delay_ns": round(self.delay * 1e9),
        }


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults to inject; the first that matches an operation applies."""

    faults: tuple[Fault, ...]
