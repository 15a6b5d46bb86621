"""Where a rank is: what it does, what it waits for, and the collectives that it has come to."""

from __future__ import annotations

import threading
from collections import defaultdict

from zero3.ranks.store import MEMORY


class Position:
    """Where this rank is. Written by the thread that trains; read by the heartbeat."""

    def __init__(self) -> None:
        self.doing = ""
        self.remark = ""  # see Beat
        self.waits: tuple[str, int, str] | None = None  # group, number, what
        self.changes = 0
        self._lock = threading.Lock()  # of what follows
        self._last: dict[str, int] = {}
        self._said: defaultdict[str, dict[int, str]] = defaultdict(dict)

    def issue(self, group: str, what: str) -> int:
        """Count and remember the next collective of ``group``."""
        with self._lock:
            self.changes += 1
            number = self._last[group] = self._last.get(group, 0) + 1
            said = self._said[group]
            said[number] = what
            said.pop(number - MEMORY, None)
        return number

    def said(self, group: str, number: int) -> str | None:
        """What this rank's collective ``number`` of ``group`` is, once it is known."""
        with self._lock:
            return self._said[group].get(number)

    def number(self, group: str, what: str) -> int:
        """The last collective of that name, or the last one of ``group``."""
        with self._lock:
            last = self._last.get(group, 0)
            said = self._said[group]
            return next((number for number in reversed(said) if said[number] == what), last)

    def last(self, engine: str = "") -> dict[str, tuple[int, str]]:
        """By group: the last collective. Groups are named after their ``engine``, if that is given."""
        with self._lock:
            last = self._last.items()
            return {_full(engine, group): (number, self._said[group][number]) for group, number in last}

    def waits_of(self, engine: str) -> tuple[str, int, str] | None:
        """``waits``, its group named after its ``engine``."""
        waits = self.waits
        return None if waits is None else (_full(engine, waits[0]), *waits[1:])


def _full(engine: str, group: str) -> str:
    return f"{engine} {group}".lstrip()
