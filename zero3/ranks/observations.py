"""The other ranks as this rank observes them, and their positions as text for errors.

Note [A rank that computes without a beat]
    The heartbeat is a Python thread. A call that keeps the GIL for long (a large json.load, a regular expression, an
    extension) stops it, although the rank is alive. So while a rank gives no beat, the ranks of the same host
    observe its process: CPU time that it spends counts as a sign of life. They report it to other hosts in their own
    beats, for ``timeout`` seconds at most, because the process may be in an endless loop.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from zero3.ranks.store import Beat, Process, spell

TICKS = os.sysconf("SC_CLK_TCK")  # clock ticks of CPU time per second
BUSY = 0.05  # of one CPU: a process that only waits spends less, on background threads
INTERVAL = 0.5  # seconds over which CPU time is measured: one tick more or less does not matter
STOPPED = "TtZX"  # states of a process that does not run


@dataclass
class ObservedRank:
    """Another rank, as observed. Times are seconds of the heartbeat's clock. The heartbeat's thread writes it."""

    beat: Beat
    since: float  # when this beat was first read
    read_at: float  # when the store was last read for this rank, which may be long ago
    is_local: bool = False  # its process is visible from here, while it lives
    computed_at: float = float("-inf")  # when its process was last known to compute, after that beat
    _ticks: int | None = None  # CPU time when it was last measured
    _measured_at: float = 0.0
    _computes: bool = False  # at that time

    @property
    def silence(self) -> float:
        """Seconds for which the rank is known to have given no beat."""
        return self.read_at - self.since

    def stillness(self, timeout: float) -> float:
        """Seconds without a sign of life. Computation counts as one, up to ``timeout`` seconds of silence."""
        return self.silence if self.silence > timeout else self.read_at - max(self.since, self.computed_at)

    def update(self, beat: Beat, clock: float) -> None:
        """The rank has given another beat."""
        self.beat, self.since = beat, clock
        self._ticks, self._computes = None, False

    def is_computing(self, clock: float) -> bool:
        """Whether its process, on this host, computes. To be called at every look."""
        elapsed = clock - self._measured_at
        if self._ticks is None or elapsed >= INTERVAL:
            state, ticks, before = self.beat.process.state(), self.beat.process.cpu_ticks(), self._ticks
            self._ticks, self._measured_at = ticks, clock
            is_running = state is not None and state not in STOPPED
            spent = ticks - before if ticks is not None and before is not None else 0
            self._computes = is_running and spent > BUSY * TICKS * elapsed
        if self._computes:
            self.computed_at = clock
        return self._computes


class Observations:
    """The other ranks, as their beats show them. The heartbeat's thread writes it; any thread may read it.

    ``process`` is the process of this ``rank``, and ``beat`` returns its current beat. ``moves`` counts how often
    another rank was observed in a new position.
    """

    def __init__(self, rank: int, world_size: int, process: Process, beat: Callable[[], Beat]) -> None:
        self.other_ranks = [other for other in range(world_size) if other != rank]
        self.moves = 0
        self._rank = rank
        self._process = process
        self._beat = beat
        self._observed: dict[int, ObservedRank] = {}

    def __len__(self) -> int:
        return len(self._observed)

    def __contains__(self, rank: int) -> bool:
        return rank in self._observed

    def __getitem__(self, rank: int) -> ObservedRank:
        return self._observed[rank]

    def __iter__(self) -> Iterator[tuple[int, ObservedRank]]:
        """Each observed rank with its number, in the order in which they were observed first."""
        # A copy, because the heartbeat's thread may add a rank meanwhile.
        return iter(list(self._observed.items()))

    def get(self, rank: int) -> ObservedRank | None:
        """The rank; None before its first beat was read."""
        return self._observed.get(rank)

    def update(self, beats: Mapping[int, Beat], clock: float) -> None:
        """``beats`` were read at ``clock``, in seconds of the heartbeat's clock."""
        for rank, beat in beats.items():
            peer = self._observed.get(rank)
            if peer is None:
                peer = self._observed[rank] = ObservedRank(beat, clock, clock)
                self.moves += 1
            elif beat.count != peer.beat.count:
                last = peer.beat
                self.moves += (beat.last, beat.activity, beat.state) != (last.last, last.activity, last.state)
                peer.update(beat, clock)
                # See Note [A rank that computes without a beat].
                for computing in beat.computing:
                    if computing in self._observed:
                        self._observed[computing].computed_at = clock
            # Of every rank that was read, also without a new beat: silence counts only as far as this rank has looked.
            peer.read_at = clock
            peer.is_local = peer.is_local or beat.process.is_visible()

    def computing_here(self, clock: float, silence: float) -> tuple[int, ...]:
        """Ranks of this host that gave no beat for ``silence`` seconds, and spend CPU time.

        Ranks that share this process are left out: their CPU time is its own.
        """
        return tuple(
            rank
            for rank, peer in self
            if peer.is_local
            and peer.silence > silence
            and peer.beat.process.host == self._process.host
            and peer.beat.process.pid != self._process.pid
            and peer.is_computing(clock)
        )

    @property
    def running(self) -> dict[int, ObservedRank]:
        """The ranks that have published no end."""
        return {rank: peer for rank, peer in self if peer.beat.state == "running"}

    @property
    def dead(self) -> list[int]:
        """The ranks of this host whose process has ended."""
        return [rank for rank, peer in self if peer.is_local and peer.beat.process.is_dead()]

    def first_closed(self) -> tuple[int, str] | None:
        """The first rank that has closed its engine or ended its program, and which of them it did."""
        closed = [(rank, peer.beat.activity) for rank, peer in self if peer.beat.state == "closed"]
        return min(closed, default=None)

    def ranks_behind(self, group: str, number: int, members: Collection[int]) -> list[int]:
        """Those of ``members`` that have not reached collective ``number`` of ``group``, according to their beats."""
        peers = dict(self._observed)
        others = (rank for rank in self.other_ranks if rank in members)
        return [rank for rank in others if rank not in peers or peers[rank].beat.reached(group) < number]

    def describe(self, rank: int) -> str:
        """The rank in an error: ``rank 1 (host a, pid 7)``, with its place in a mesh before the host."""
        peer = self._observed.get(rank)
        process = self._process if rank == self._rank else peer.beat.process if peer else None
        if process is None:
            return f"rank {rank}"
        place = f"{process.place}, " if process.place else ""
        return f"rank {rank} ({place}host {process.host}, pid {process.pid})"

    def describe_all(self, ranks: list[int]) -> str:
        """Other ranks in an error; one of them as by ``describe``."""
        if len(ranks) == 1:
            return self.describe(ranks[0])
        hosts = sorted({self._observed[rank].beat.process.host for rank in ranks})
        return f"{spell(ranks)} ({'host' if len(hosts) == 1 else 'hosts'} {', '.join(hosts)})"

    def remarks(self) -> str:
        """The remarks of all ranks, as sentences; empty if there are none."""
        texts = {rank: peer.beat.remark for rank, peer in self} | {self._rank: self._beat().remark}
        return "".join(
            f" {self.describe(rank)} continued after {texts[rank]}." for rank in sorted(texts) if texts[rank]
        )

    def positions(self, ranks: list[int] | None = None) -> str:
        """The positions of ``ranks`` (by default all), as text. Ranks in the same place are named together."""
        places: defaultdict[str, list[int]] = defaultdict(list)
        for rank in sorted([*self.other_ranks, self._rank]) if ranks is None else ranks:
            peer = self._observed.get(rank)
            if rank == self._rank:
                places[self._beat().position()].append(rank)
            elif peer is None:
                places["without a sign of life since the start"].append(rank)
            else:
                places[peer.beat.position()].append(rank)
        return "; ".join(f"{spell(ranks)} {place}" for place, ranks in places.items())
