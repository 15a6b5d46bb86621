"""Proposals: a rank proposes its next collective of a group, and the others confirm that theirs is the same."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zero3.ranks.store import MEMORY


@dataclass
class Proposal:
    """A call of ``agree`` in progress."""

    group: str
    number: int
    label: str
    is_posted: bool = False


class Answers:
    """The proposals that this rank has confirmed in one group of collectives. The heartbeat's thread alone uses it."""

    def __init__(self) -> None:
        self.read_count = 0  # proposals that this rank has read, in the order of their indices
        # Collectives that other ranks propose and that this rank has not reached.
        self.open_numbers: set[int] = set()
        self.numbers: dict[int, None] = {}  # collectives that this rank has confirmed, the last ones
        self.deletable: deque[int] = deque(maxlen=16)  # confirmed ones that may still be in the rank store

    def add(self, number: int) -> None:
        self.numbers[number] = None
        self.numbers.pop(number - MEMORY, None)
        self.deletable.append(number)
