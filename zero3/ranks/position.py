"""The position of a rank: its activity, the collective that it waits for, and the last collectives that it reached."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from types import MappingProxyType

from zero3.ranks.store import MEMORY


class Position:
    """The position of this rank. The thread that trains writes it, and the heartbeat's thread reads it.

    The first four fields are replaced as a whole, so they need no lock. ``members`` are the ranks by group, of groups
    that not all ranks belong to.
    """

    def __init__(self, members: Mapping[str, Collection[int]] = MappingProxyType({})) -> None:
        self.activity = ""
        self.remark = ""  # see Beat
        self.waits: tuple[str, int, str] | None = None  # group, number, label
        self.changes = 0
        self._members = members
        self._lock = threading.Lock()  # guards the fields below
        self._last: dict[str, int] = {}
        self._labels: defaultdict[str, dict[int, str]] = defaultdict(dict)

    def issue(self, group: str, label: str) -> int:
        """Count the next collective of ``group``, and store its label. Returns its number."""
        with self._lock:
            self.changes += 1
            number = self._last[group] = self._last.get(group, 0) + 1
            labels = self._labels[group]
            labels[number] = label
            labels.pop(number - MEMORY, None)
        return number

    def label_of(self, group: str, number: int) -> str | None:
        """The label of collective ``number`` of ``group``; None if this rank has not reached it."""
        with self._lock:
            return self._labels[group].get(number)

    def number(self, group: str, label: str) -> int:
        """The number of the last collective ``label`` of ``group``, or else of the last one of ``group``."""
        with self._lock:
            last = self._last.get(group, 0)
            labels = self._labels[group]
            return next((number for number in reversed(labels) if labels[number] == label), last)

    def last(self, engine: str = "") -> dict[str, tuple[int, str]]:
        """By group: number and label of the last collective. ``engine`` prefixes the names of groups."""
        with self._lock:
            last = self._last.items()
            return {
                _qualified(engine, group): (number, self._labels[group][number]) for group, number in last
            }

    def members(self, engine: str = "") -> dict[str, Collection[int]]:
        """The ranks by group, as ``last`` names groups, of those that not all ranks belong to."""
        return {_qualified(engine, group): ranks for group, ranks in self._members.items()}

    def waits_of(self, engine: str) -> tuple[str, int, str] | None:
        """``waits``, with ``engine`` before the name of the group."""
        waits = self.waits
        return None if waits is None else (_qualified(engine, waits[0]), *waits[1:])


def _qualified(engine: str, group: str) -> str:
    return f"{engine} {group}".lstrip()
