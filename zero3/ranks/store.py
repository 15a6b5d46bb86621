"""The rank store, where ranks publish outside of collectives: beats, proposals of collectives, and the first failure.

It is a part of the rendezvous store, which outlives any rank under torchrun. Keys, under a prefix of their own:

    beat/RANK              the last `Beat` of that rank, which alone writes it
    failure                the first `Failure`, which ended the run
    proposed/GROUP         number of proposals so far
    proposed/GROUP/I       number of the collective in proposal I
    proposal/GROUP/N       rank and label of the first proposal for collective N
    confirmed/GROUP/N      number of ranks that have confirmed it

An operation can hang for as long as the store's process is frozen or the link to it is cut: its time-outs do not cover
the wait for an answer. So only the heartbeat's thread may call these, for which no thread waits without a limit.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch.distributed.distributed_c10d import PrefixStore, Store

from tiering.errors import DistributedError, RankLostError, RankOrderError

ERRORS: dict[str, type[DistributedError]] = {
    "lost": RankLostError,
    "order": RankOrderError,
    "stuck": DistributedError,
}

MEMORY = 4096  # collectives, and proposals, that are remembered; far more than are ever in flight


@dataclass(frozen=True)
class Process:
    """The process of a rank. ``started`` (clock ticks since boot) distinguishes it from a later one with its pid.

    ``pids`` names the PID namespace, and the boot of the kernel, in which ``pid`` is its number; empty if unknown.
    ``place`` is that of its rank in a mesh, such as "data 1, sequence 0".
    """

    host: str
    pid: int
    started: int
    pids: str = ""
    place: str = ""

    @classmethod
    def this(cls, place: str = "") -> Process:
        stat = _stat(os.getpid())
        return cls(socket.gethostname(), os.getpid(), stat[1] if stat else 0, _pid_namespace(), place)

    def state(self) -> str | None:
        """The kernel's letter for its state (R, S, D, T, Z, ...); None if it is not visible from here."""
        stat = _stat(self.pid)
        return stat[0] if stat and stat[1] == self.started else None

    def cpu_ticks(self) -> int | None:
        """CPU time that it has spent, in clock ticks; None if it is not visible from here."""
        stat = _stat(self.pid)
        return stat[2] if stat and stat[1] == self.started else None

    def is_dead(self) -> bool:
        """Whether it has ended. Only for a visible process: others may live on another host, or in a namespace."""
        return self.state() in (None, "Z", "X")

    def is_visible(self) -> bool:
        """Whether it is, or was, in this process's PID namespace, or is alive and visible now."""
        return self.pids == _pid_namespace() != "" or not self.is_dead()


def _pid_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int, int] | None:
    """State, start, and CPU time in user and system mode; the latter two in clock ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19]), int(fields[11]) + int(fields[12])


@dataclass(frozen=True)
class Beat:
    """The sign of life of a rank, with its position."""

    count: int
    process: Process
    activity: str
    waits: tuple[str, int, str] | None  # the collective that it waits for: group, number, label
    last: dict[str, tuple[int, str]]  # by group of collectives: number and label of the last one
    state: Literal["running", "failed", "closed"] = "running"
    remark: str = ""  # an event that may explain a later failure: "a forward that raised ..."
    computing: tuple[int, ...] = ()  # ranks of its host that give no beat and spend CPU time
    waits_elsewhere: tuple[str, int, str] | None = None  # as ``waits``, in a collective of another engine
    last_elsewhere: dict[str, tuple[int, str]] = field(default_factory=dict)  # as ``last``, of other engines

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Beat:
        fields: dict[str, Any] = json.loads(text)
        fields["process"] = Process(**fields["process"])
        for waits in ("waits", "waits_elsewhere"):
            fields[waits] = tuple(fields[waits]) if fields[waits] else None
        fields["computing"] = tuple(fields["computing"])
        for key in ("last", "last_elsewhere"):
            fields[key] = {group: (number, label) for group, (number, label) in fields[key].items()}
        return cls(**fields)

    def reached(self, group: str) -> int:
        """Number of its last collective in ``group``, which may belong to another engine."""
        return (self.last.get(group) or self.last_elsewhere.get(group, (0, "")))[0]

    @property
    def waiting(self) -> tuple[str, int, str] | None:
        """The collective that it waits for, of any engine."""
        return self.waits or self.waits_elsewhere

    def position(self) -> str:
        """Its position, as text for errors."""
        if self.state == "closed":
            return self.activity
        if self.state == "failed":
            return "failed"
        if self.waiting is not None:
            return "waiting to {2} ({0} {1})".format(*self.waiting)
        last = [f"{group} {number}" for group, (number, _) in self.last.items()]
        return f"in {self.activity or 'code outside the engine'}" + (
            f", after {', '.join(last)}" if last else ""
        )


@dataclass(frozen=True)
class Failure:
    """The reason why no rank can continue."""

    kind: str  # a key of ERRORS
    rank: int  # that caused it, or that found it
    text: str

    def error(self, addition: str = "") -> DistributedError:
        return ERRORS[self.kind](self.text + addition)


class RankStore:
    """Typed access to the rank store. Not for several threads: operations of one connection wait for each other."""

    def __init__(self, store: Store) -> None:
        inner = _innermost(store)
        self.served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        server = "rank 0" if self.served_by_rank_0 else "torchrun"
        host, port = getattr(inner, "host", None), getattr(inner, "port", None)  # attributes of a TCPStore
        address = f" at {host}:{port}" if host else ""
        self.served = f"the rendezvous store{address} (served by {server})"
        clone = getattr(store, "clone", None)  # torch 2.8; an older one shares its connection
        # A connection of its own: on a shared one, an operation waits until those of other threads have ended.
        self._store = PrefixStore("peers", clone() if clone else store)

    def disconnect(self) -> None:
        """Close the connection. No operation may follow."""
        del self._store

    def write_beat(self, rank: int, beat: Beat) -> None:
        self._store.set(f"beat/{rank}", beat.encode())

    def read_beats(self, readable_ranks: Iterable[int], silent_ranks: Iterable[int]) -> dict[int, Beat]:
        """The last beats of ``readable_ranks``, which have a beat, and of those ``silent_ranks`` that have one now."""
        # Only ranks that have written a beat: ``multi_get`` waits for keys that are missing. A beat is never deleted.
        ranks = [*readable_ranks, *(rank for rank in silent_ranks if self._store.check([f"beat/{rank}"]))]
        if not ranks:
            return {}
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        return {rank: Beat.decode(text) for rank, text in zip(ranks, texts, strict=True)}

    def post_failure(self, failure: Failure) -> Failure:
        """Publish ``failure``, unless there is one already. Returns the first one."""
        # The store compares and sets in one operation: the first failure stays, and every rank reads the same one.
        return Failure(**json.loads(self._store.compare_set("failure", "", json.dumps(asdict(failure)))))

    def failure(self) -> Failure | None:
        """The failure that ended the run."""
        return Failure(**json.loads(self._store.get("failure"))) if self._store.check(["failure"]) else None

    def propose(self, group: str, number: int, rank: int, label: str) -> tuple[int, str]:
        """Propose ``label`` as collective ``number`` of ``group``. Returns rank and label of its first proposal."""
        proposal = json.dumps([rank, label])
        # In one operation, as above: ranks that propose the same collective at once agree on the first proposal.
        first = json.loads(self._store.compare_set(f"proposal/{group}/{number}", "", proposal))
        if first[0] == rank:
            # The index first, then the number: readers stop at an index that has no number yet.
            index = self._store.add(f"proposed/{group}", 1)
            self._store.set(f"proposed/{group}/{index}", str(number))
            if index > MEMORY:
                # Far behind the last one: no rank reads it any more.
                self._store.delete_key(f"proposed/{group}/{index - MEMORY}")
        return first[0], first[1]

    def proposal_count(self, group: str) -> int:
        """Number of proposals of ``group`` so far."""
        return self._store.add(f"proposed/{group}", 0)

    def proposed_number(self, group: str, index: int) -> int | None:
        """Number of the collective in proposal ``index``; None if it is not written yet."""
        # Looked for first: ``get`` waits for a key that is missing.
        key = f"proposed/{group}/{index}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def proposal(self, group: str, number: int) -> tuple[int, str]:
        """Rank and label of the proposal for ``number``. Only for a number that this rank has not confirmed yet."""
        rank, label = json.loads(self._store.get(f"proposal/{group}/{number}"))
        return rank, label

    def confirm(self, group: str, number: int) -> int:
        """Confirm the proposal, once for each rank. Returns how many ranks have, this one included."""
        return self._store.add(f"confirmed/{group}/{number}", 1)

    def confirmations(self, group: str, number: int) -> int:
        """How many ranks have confirmed the proposal."""
        return self._store.add(f"confirmed/{group}/{number}", 0)

    def delete_proposal(self, group: str, number: int) -> None:
        """Delete a proposal. Only after all ranks have confirmed a later one, so that none waits for this one."""
        self._store.delete_key(f"proposal/{group}/{number}")
        self._store.delete_key(f"confirmed/{group}/{number}")


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def spell(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    ranks = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(
        f"{a}" if a == b else f"{a}-{b}" for a, b in runs
    )
