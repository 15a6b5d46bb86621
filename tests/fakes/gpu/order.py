"""What happens before what: vector clocks, and the last accesses of every byte.

An agent is something that works through its own list in order: a stream, a thread of the CPU, a transfer of NVMe. Its
clock says, of each agent, up to where that one's work is over before this one's next. An access of memory that touches
an earlier one's bytes, one of them writing, must know of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

Clock = dict[int, int]  # an agent's number -> how many of its accesses are over
Place = tuple[tuple[str, int, str], ...]  # file, line and function, the innermost first

_numbers = count()


@dataclass(eq=False)
class Agent:
    """Who accesses memory."""

    name: str
    number: int = field(default_factory=lambda: next(_numbers))
    clock: Clock = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock[self.number] = 0

    @property
    def now(self) -> int:
        return self.clock[self.number]

    def tick(self) -> int:
        """Begin something new; its number."""
        self.clock[self.number] += 1
        return self.now

    def learn(self, clock: Clock) -> None:
        """From now on all that ``clock`` knows of is over."""
        merge(self.clock, clock)


def merge(mine: Clock, other: Clock) -> None:
    """Add to ``mine`` what ``other`` knows, which another thread may be adding to."""
    for number, moment in tuple(other.items()):
        if mine.get(number, -1) < moment:
            mine[number] = moment


def knows(clock: Clock, access: Access) -> bool:
    """Whether ``access`` is over for who has ``clock``."""
    return clock.get(access.agent.number, -1) >= access.moment


class Access(NamedTuple):
    """One agent touches a range of bytes; ``moment`` is in its own count."""

    agent: Agent
    moment: int
    writes: bool
    what: str
    place: Place

    def __str__(self) -> str:
        lines = "".join(f"\n        {file}:{line} in {function}" for file, line, function in self.place)
        return f"{'write' if self.writes else 'read'} by {self.agent.name}: {self.what}{lines}"


class _Span(NamedTuple):
    """Bytes with the same past: the last write, and each agent's last read since."""

    start: int
    end: int
    written: Access | None
    read: dict[int, Access]


class History:
    """The past of every byte that was accessed."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._spans: list[_Span] = []

    def note(self, start: int, end: int, access: Access, clock: Clock) -> list[Access]:
        """Add an access of [start, end) by who has ``clock``; the earlier ones that it collides with."""
        first, last = self._cut(start, end)
        collisions: dict[Access, None] = {}
        spans, at = list[_Span](), start
        for span in self._spans[first:last]:
            earlier = [span.written] if span.written is not None else []
            if access.writes:
                earlier += span.read.values()
            collisions |= dict.fromkeys(each for each in earlier if not knows(clock, each))
            if not access.writes:
                if at < span.start:
                    spans.append(_Span(at, span.start, None, {access.agent.number: access}))
                span.read[access.agent.number] = access
                spans.append(span)
                at = span.end
        if access.writes:
            spans.append(_Span(start, end, access, {}))
        elif at < end:
            spans.append(_Span(at, end, None, {access.agent.number: access}))
        self._replace(first, last, spans)
        return list(collisions)

    def accesses(self, start: int, end: int) -> Iterator[Access]:
        """The last ones of [start, end)."""
        first, last = self._cut(start, end)
        for span in self._spans[first:last]:
            if span.written is not None:
                yield span.written
            yield from span.read.values()

    def rename(self, start: int, end: int, old: Agent, new: Access) -> None:
        """What ``old`` did in [start, end) counts as done by ``new``'s agent, who has seen it end."""
        first, last = self._cut(start, end)
        for index in range(first, last):
            span = self._spans[index]
            written = span.written
            if written is not None and written.agent is old:
                written = new._replace(writes=True)
            if old.number in span.read:
                del span.read[old.number]
                span.read[new.agent.number] = new._replace(writes=False)
            self._spans[index] = span._replace(written=written)

    def forget(self, start: int, end: int) -> None:
        """The bytes of [start, end) are other memory from now on."""
        first, last = self._cut(start, end)
        self._replace(first, last, [])

    def _cut(self, start: int, end: int) -> tuple[int, int]:
        """Cut spans at both ends; the indices between which those within lie."""
        for at in (start, end):
            index = bisect_right(self._starts, at) - 1
            if index >= 0 and self._starts[index] < at < (span := self._spans[index]).end:
                parts = [span._replace(end=at), span._replace(start=at, read=dict(span.read))]
                self._replace(index, index + 1, parts)
        return bisect_left(self._starts, start), bisect_left(self._starts, end)

    def _replace(self, first: int, last: int, spans: list[_Span]) -> None:
        self._spans[first:last] = spans
        self._starts[first:last] = [span.start for span in spans]
