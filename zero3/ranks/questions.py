"""Questions of order: what a rank asks the others about a collective, and what it has answered them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zero3.ranks.store import MEMORY


@dataclass
class Question:
    """``agree`` in progress."""

    group: str
    number: int
    what: str
    asked: bool = False


class Answers:
    """What this rank has answered in one group of collectives."""

    def __init__(self) -> None:
        self.read = 0  # questions, by index
        self.open: set[int] = set()  # numbers that others ask about and that this rank has not reached
        self.given: dict[int, None] = {}  # numbers, the last ones
        self.kept: deque[int] = deque(maxlen=16)  # of those, what may still be in the store

    def give(self, number: int) -> None:
        self.given[number] = None
        self.given.pop(number - MEMORY, None)
        self.kept.append(number)
