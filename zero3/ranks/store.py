"""What ranks tell each other outside of collectives: signs of life, questions of order, and the first failure.

All of it lives in the rendezvous store, which outlives any rank under torchrun. Keys, under a prefix of their own:

    beat/RANK              that rank's last `Beat`, written by it alone
    failure                the `Failure` that ended the run: the first one stays
    asked/GROUP            how many questions there were
    asked/GROUP/I          number of the collective in question I
    question/GROUP/N       what the rank that asked first is about to do
    said/GROUP/N           how many ranks are about to do the same

An operation can hang for as long as the store's process is frozen or the link to it is cut (its time-outs do not cover
waiting for an answer), so only a thread that nobody waits for without a limit may call these.
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

MEMORY = 4096  # collectives, and questions, that can still be asked about; far more than are ever in flight


@dataclass(frozen=True)
class Process:
    """Where a rank runs; ``started`` (clock ticks since boot) tells it from a later process of the same number.

    ``pids`` names the PID namespace of the running kernel in which ``pid`` is its number; empty if that is unknown.
    """

    host: str
    pid: int
    started: int
    pids: str = ""

    @classmethod
    def this(cls) -> Process:
        stat = _stat(os.getpid())
        return cls(socket.gethostname(), os.getpid(), stat[1] if stat else 0, _pid_namespace())

    def state(self) -> str | None:
        """The kernel's letter for it (R, S, D, T, Z, ...), or None where no such process can be seen from here."""
        stat = _stat(self.pid)
        return stat[0] if stat and stat[1] == self.started else None

    def cpu_ticks(self) -> int | None:
        """CPU time that it has spent, in clock ticks; None where no such process can be seen from here."""
        stat = _stat(self.pid)
        return stat[2] if stat and stat[1] == self.started else None

    def is_dead(self) -> bool:
        """Only for a process that can be seen from here: others may live on another host, or behind a namespace."""
        return self.state() in (None, "Z", "X")

    def can_be_seen(self) -> bool:
        """Whether it is, or was, in this process's PID namespace, or is seen alive now."""
        return self.pids == _pid_namespace() != "" or not self.is_dead()


def _pid_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, start, CPU time in user and system mode), the latter two in clock ticks."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19]), int(fields[11]) + int(fields[12])


@dataclass(frozen=True)
class Beat:
    """One sign of life."""

    count: int
    process: Process
    doing: str
    waits: tuple[str, int, str] | None  # for which collective: group, number, what it is
    said: dict[str, tuple[int, str]]  # by group of collectives: number of the last one, and what it is
    state: Literal["running", "failed", "closed"] = "running"
    remark: str = ""  # what has happened on this rank that may explain a failure: "a forward that raised ..."
    computing: tuple[int, ...] = ()  # ranks of its host that give no beat, and spend CPU time
    waits_elsewhere: tuple[str, int, str] | None = None  # as ``waits``, in a collective of another engine
    said_elsewhere: dict[str, tuple[int, str]] = field(default_factory=dict)  # as ``said``, of other engines

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Beat:
        fields: dict[str, Any] = json.loads(text)
        fields["process"] = Process(**fields["process"])
        for waits in ("waits", "waits_elsewhere"):
            fields[waits] = tuple(fields[waits]) if fields[waits] else None
        fields["computing"] = tuple(fields["computing"])
        for said in ("said", "said_elsewhere"):
            fields[said] = {group: (number, what) for group, (number, what) in fields[said].items()}
        return cls(**fields)

    def reached(self, group: str) -> int:
        """Number of its last collective in ``group``, which may be another engine's."""
        return (self.said.get(group) or self.said_elsewhere.get(group, (0, "")))[0]

    @property
    def waiting(self) -> tuple[str, int, str] | None:
        """The collective that it waits for, of whichever engine."""
        return self.waits or self.waits_elsewhere

    def position(self) -> str:
        if self.state == "closed":
            return self.doing
        if self.state == "failed":
            return "failed"
        if self.waiting is not None:
            return "waiting to {2} ({0} {1})".format(*self.waiting)
        last = [f"{group} {number}" for group, (number, _) in self.said.items()]
        return f"in {self.doing or 'code outside the engine'}" + (
            f", after {', '.join(last)}" if last else ""
        )


@dataclass(frozen=True)
class Failure:
    """Why no rank can go on."""

    kind: str  # a key of ERRORS
    rank: int  # that it began with, or that found out
    text: str

    def error(self, addition: str = "") -> DistributedError:
        return ERRORS[self.kind](self.text + addition)


class Board:
    """The store in this module's words. Not thread-safe in time: operations of one connection wait for each other."""

    def __init__(self, store: Store) -> None:
        inner = _innermost(store)
        self.served_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        server = "rank 0" if self.served_by_rank_0 else "torchrun"
        host, port = getattr(inner, "host", None), getattr(inner, "port", None)  # a TCPStore has them
        address = f" at {host}:{port}" if host else ""
        self.served = f"the rendezvous store{address} (served by {server})"
        clone = getattr(store, "clone", None)  # torch 2.8; an older one shares its connection
        self._store = PrefixStore("peers", clone() if clone else store)

    def leave(self) -> None:
        """Nobody asks any more: give its connection up."""
        del self._store

    def write(self, rank: int, beat: Beat) -> None:
        self._store.set(f"beat/{rank}", beat.encode())

    def read(self, known: Iterable[int], unknown: Iterable[int]) -> dict[int, Beat]:
        """The last beats of ranks that have given one (``known``) or may have."""
        ranks = [*known, *(rank for rank in unknown if self._store.check([f"beat/{rank}"]))]
        if not ranks:
            return {}
        texts = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        return {rank: Beat.decode(text) for rank, text in zip(ranks, texts, strict=True)}

    def post(self, failure: Failure) -> Failure:
        """The failure that counts: this one, unless there is one already."""
        return Failure(**json.loads(self._store.compare_set("failure", "", json.dumps(asdict(failure)))))

    def failure(self) -> Failure | None:
        return Failure(**json.loads(self._store.get("failure"))) if self._store.check(["failure"]) else None

    def ask(self, group: str, number: int, rank: int, what: str) -> tuple[int, str]:
        """Who asked first what comes as ``number`` of ``group``, and what for; this rank, if nobody has."""
        mine = json.dumps([rank, what])
        first = json.loads(self._store.compare_set(f"question/{group}/{number}", "", mine))
        if first[0] == rank:
            index = self._store.add(f"asked/{group}", 1)
            self._store.set(f"asked/{group}/{index}", str(number))
            if index > MEMORY:
                self._store.delete_key(f"asked/{group}/{index - MEMORY}")
        return first[0], first[1]

    def questions(self, group: str) -> int:
        """How many there were."""
        return self._store.add(f"asked/{group}", 0)

    def number(self, group: str, index: int) -> int | None:
        """Of the collective in that question; None if it is not there yet."""
        key = f"asked/{group}/{index}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def question(self, group: str, number: int) -> tuple[int, str]:
        """Only for a number that was asked for and that this rank has not answered yet."""
        rank, what = json.loads(self._store.get(f"question/{group}/{number}"))
        return rank, what

    def say_the_same(self, group: str, number: int) -> int:
        """How many ranks have, this one included. Once for each rank and number."""
        return self._store.add(f"said/{group}/{number}", 1)

    def same(self, group: str, number: int) -> int:
        return self._store.add(f"said/{group}/{number}", 0)

    def forget(self, group: str, number: int) -> None:
        """Only when every rank has answered a later one: whoever asked for this one has gone on then."""
        self._store.delete_key(f"question/{group}/{number}")
        self._store.delete_key(f"said/{group}/{number}")


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
