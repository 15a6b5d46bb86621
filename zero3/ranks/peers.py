"""What a rank knows of the others: a collective that cannot end becomes a message on every rank, not a hang.

The thread that trains says here what it does and what it waits for; it never touches the store. `heartbeat.py` does,
and judges. A wait ends early for these reasons, each on all ranks and with the rank that it began with by name:

    another rank failed, closed its engine, died, or gave no sign of life for ``silence`` seconds
    another rank is in, or about to enter, a different collective
    the store is out of reach, and the collective does not end either
    nobody has moved for ``timeout`` seconds

A wait that only the device knows of does not end here: a thread watches for it, see ``on_lost``.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Literal, Self, TypeVar

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store, Work

from tiering.errors import DistributedError
from zero3.ranks import futures
from zero3.ranks.heartbeat import SIGNS, Heartbeat
from zero3.ranks.position import Position
from zero3.ranks.store import Board, Failure, spell

log = logging.getLogger(__name__)

T = TypeVar("T")

COLLECTIVE = "collective"
FIRST_SLICE = 0.2  # seconds of waiting before anybody is asked
SLICE = 1.0
TIMED_OUT = "Operation timed out"  # gloo's words at the end of a slice; the collective goes on
SEVERED = 0x7EE5  # a tag that no message has
SEVERED_WITHIN = 60.0  # seconds
QUOTED = 1000  # characters of another rank's error


_ages = itertools.count()
_open: weakref.WeakValueDictionary[int, Peers] = weakref.WeakValueDictionary()  # by age


def newest() -> Peers | None:
    """The peers of this process's newest engine that is open."""
    mine = [age for age, peers in list(_open.items()) if peers.of_this_process]
    return _open.get(max(mine)) if mine else None


def _of_other_engines(rank: int, engine: str) -> dict[str, Position]:
    """Where this process is as ``rank`` with its other engines that are open."""
    open_ = [peers for peers in list(_open.values()) if peers.of_this_process and peers.rank == rank]
    return {peers.engine: peers.position for peers in open_ if peers.engine != engine}


def ended(work: Work, within: float) -> bool:
    """Whether ``work`` has ended, after so many seconds at most; RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=within))
    except RuntimeError as error:
        if TIMED_OUT not in str(error):
            raise
        return False
    return True


class Peers:
    """One for each engine and rank. Calls come from one thread at a time: the one that trains.

    ``store`` is for this engine alone (a prefix of its own); every operation is on a connection of its own where torch
    can give one. ``timeout`` and ``silence`` are seconds. The process group's own time-out should be longer than
    ``timeout``, or its message comes first.

    ``on_lost`` is called once, on a thread of its own, with the message of what ended the run, unless this rank did. It
    is for collectives that a device waits for (NCCL); with it, silence counts also while this rank does not wait.
    ``engine`` is a name that this process's engines have each for itself, the same on all ranks.
    ``unended`` says what the device was told and has not ended, if anything: that counts as a wait of this rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: float,
        silence: float = 30.0,
        on_lost: Callable[[str], None] | None = None,
        unended: Callable[[], str | None] = lambda: None,
        beat: float = 1.0,
        patience: float = 10.0,
        engine: str = "",
    ) -> None:
        self.rank = rank
        self.engine = engine
        self.timeout = timeout
        self.silence = silence
        self._beat = min(beat, silence / SIGNS)
        self._patience = patience
        self._pid = os.getpid()
        self._closed = False
        self.failed_by: BaseException | str | None = None  # on this rank
        self._final: tuple[Failure, str] | None = None  # what this rank was told, and what it then waited for
        self._heartbeat = Heartbeat(
            Board(store),
            rank,
            world_size,
            timeout=timeout,
            silence=silence,
            beat=self._beat,
            strict=on_lost is not None,
            elsewhere=partial(_of_other_engines, rank, engine),
        )
        self._position = self._heartbeat.position
        self._age = next(_ages)
        _open[self._age] = self
        atexit.register(self._at_exit)
        if on_lost is not None:
            threading.Thread(
                target=self._watch, args=(on_lost, unended), name="watch over ranks", daemon=True
            ).start()

    @property
    def position(self) -> Position:
        """Where this rank is with this engine."""
        return self._position

    def note(self, doing: str) -> None:
        """What this rank does now, for the others' messages: "backward of 'layers.3'"."""
        self._position.doing = doing
        self._position.changes += 1

    def remark(self, what: str) -> None:
        """Something has happened here that may explain a failure to come; empty: it no more does."""
        self._position.remark = what[:QUOTED]

    def remarks(self) -> str:
        """What ranks have remarked, in sentences, once their last beats are here: for an error that is about to be."""
        self._heartbeat.watch()
        self._heartbeat.failed(2 * self._beat)
        self._heartbeat.rest()
        return self._heartbeat.remarks()

    def issued(self, what: str, *, group: str = COLLECTIVE) -> None:
        """The next collective of ``group`` is on its way without having been agreed on.

        ``what`` is what it is to do ("gather 'layers.3'"), the same words on all ranks. Collectives whose order among
        each other may differ from rank to rank belong to different groups, and are numbered apart."""
        self._position.issue(group, what)

    def agree(self, what: str, *, group: str = COLLECTIVE) -> None:
        """Return when the next collective of ``group`` is ``what`` on every rank, asked here or issued there.

        Raises:
            RankOrderError: it is another one on some rank; on all ranks.
            DistributedError: as `wait`.
        """
        self.check()
        question = self._heartbeat.ask(group, what)
        with _Delay(self, group, question.number, what) as delay:
            while not self._heartbeat.answered(question, FIRST_SLICE):
                if self._heartbeat.store_lost is not None:
                    raise self._cause_of("no answer from the store", delay)
                delay.look()

    def meet(self, what: str, within: float) -> bool:
        """Whether all ranks come to ``what`` by this call while this one waits for them, ``within`` seconds at most."""
        return self._heartbeat.answered(self._heartbeat.ask(what, what), within)

    def wait(self, work: Work, what: str, *, group: str = COLLECTIVE) -> None:
        """Wait for one collective that was issued or agreed on as ``what``.

        Raises:
            RankLostError, RankOrderError, DistributedError: see the top of this file. They are final: every later call
                raises the same again.
        """
        self.check()
        with _Delay(self, group, self._position.number(group, what), what) as delay:
            slice_s = FIRST_SLICE
            while True:
                try:
                    if ended(work, slice_s):
                        return
                except RuntimeError as error:
                    raise self._cause_of(str(error), delay) from error
                slice_s = SLICE
                delay.look()

    def follow(self, has_ended: Callable[[float], bool], what: str) -> None:
        """Wait for ``what``, a collective of the program's own, until it ``has_ended`` (within so many seconds).

        It has no number, since it may be any group's, and may take as long as torch lets it. RankLostError (or what
        else has ended the run) as soon as a rank is lost: if it fails, then, too, when that is known soon after.
        """
        self.check()
        doing, self._position.doing = self._position.doing, what
        slice_s, waited = FIRST_SLICE, f"waiting in {what}"
        try:
            while not has_ended(slice_s):
                self._heartbeat.watch()
                if self._heartbeat.failure is not None:
                    raise self._told(self._heartbeat.failure, waited)
                slice_s = SLICE
        except RuntimeError as error:
            failure = self._loss_behind(what)
            if failure is None:
                raise
            raise self._told(failure, waited) from error
        finally:
            self._position.doing = doing
            self._heartbeat.rest()

    def follow_call(self, call: Callable[[], T], what: str) -> T:
        """What ``call`` gives, which is to be waited for like ``follow``'s, but not in parts. If stuck, it is left."""
        future = futures.begun(call, what)

        def has_ended(seconds: float) -> bool:
            with contextlib.suppress(TimeoutError):
                future.exception(seconds)
            if not future.done():
                return False
            future.result()  # raises what the call has raised
            return True

        self.follow(has_ended, what)
        return future.result()

    def cause_of(self, error: str, what: str, *, group: str) -> DistributedError:
        """Why the last collective of ``group``, ``what``, could not even begin."""
        with _Delay(self, group, self._position.number(group, what), what) as delay:
            return self._cause_of(error, delay)

    @property
    def of_this_process(self) -> bool:
        """Whether this is the rank itself, and not a process that it has forked."""
        return os.getpid() == self._pid

    @property
    def broken(self) -> bool:
        """Whether the run is over, by a failure of this rank or of another one that this one knows of."""
        return self._heartbeat.failure is not None or self.failed_by is not None

    @property
    def failure_began_with(self) -> int | None:
        """The rank that the failure which ended the run began with; None while there is none."""
        failure = self._heartbeat.failure
        return None if failure is None else failure.rank

    def fail(self, error: BaseException | str) -> None:
        """This rank gives up: the others are told why, unless there is a failure already."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        self.failed_by = error
        who, where = self._heartbeat.who(self.rank), self._heartbeat.beat().position()
        words = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._heartbeat.settle(
            Failure(
                "lost", self.rank,
                f"{who} failed {where}: {words[:QUOTED]} (the log of rank {self.rank} has its traceback).",
            )
        )  # fmt: skip
        self._end("failed")

    def close(self) -> None:
        """This rank is done. Others learn it if they still wait for it."""
        self._leave("has closed its engine")

    def _leave(self, how: str) -> None:
        if os.getpid() == self._pid and not self._closed:  # a forked child leaves, not the rank
            self.note(how)
            self._end("failed" if self._heartbeat.failure else "closed")

    def _end(self, state: Literal["failed", "closed"]) -> None:
        self._closed = True
        _open.pop(self._age, None)
        atexit.unregister(self._at_exit)
        self._heartbeat.end(state)

    def _at_exit(self) -> None:
        uncaught = getattr(sys, "last_value", None)  # set when the interpreter ends because of it
        if uncaught is not None:
            self.fail(uncaught)
        else:
            self._leave("has ended its program")

    def check(self) -> None:
        """DistributedError if a failure has ended the run, here or elsewhere, as far as this rank has heard."""
        if self._final is None and self._heartbeat.failure is not None:
            self._final = self._heartbeat.failure, ""
        if self._final is not None:
            failure, addition = self._final
            raise failure.error(addition)
        assert not self._closed, "a closed engine enters no collective"

    def _told(self, failure: Failure, waiting: str) -> DistributedError:
        """The error for a failure that ended this rank's ``waiting``; it stays the same from here on."""
        addition = "" if failure.rank == self.rank else f" Rank {self.rank} was {waiting}."
        self._final = failure, addition
        return failure.error(addition)

    def _cause_of(self, error: str, delay: _Delay) -> DistributedError:
        """Why a collective failed at once."""
        heartbeat, turns = self._heartbeat, self._heartbeat.turns
        failure = self._found_soon()
        if failure is not None:
            return self._told(failure, delay.waiting)
        if heartbeat.store_lost is not None or heartbeat.turns - turns < 2:
            lost = heartbeat.settle(self._store_out_of_reach(error), within=0.0)
            return self._told(lost, delay.waiting)
        failure = Failure(
            "stuck", self.rank,
            f"{heartbeat.who(self.rank)} could not {delay.what} ({delay.group} {delay.number}): {error}. Every rank "
            f"gives signs of life: {heartbeat.positions()}. See that the network between their hosts works.",
        )  # fmt: skip
        return self._told(heartbeat.settle(failure), delay.waiting)

    def _found_soon(self) -> Failure | None:
        """A failure that is known, or will be: the rank that broke a collective need not be known to be gone yet."""
        heartbeat = self._heartbeat
        heartbeat.watch(urgent=True)
        patience = min(self.silence, SIGNS * self._beat) + 2 * self._beat
        began = time.monotonic()
        while heartbeat.failed(0.1) is None and time.monotonic() - began < patience:
            if heartbeat.store_lost is not None:
                patience = min(patience, 2 * self._beat)  # processes on this machine can still be looked at
        return heartbeat.failure

    def _loss_behind(self, what: str) -> Failure | None:
        """Why ``what`` of the program has failed, if a rank that is gone is the reason."""
        failure = self._found_soon()
        if failure is None and (left := self._heartbeat.left()) is not None:
            failure = self._heartbeat.settle(
                Failure("lost", left[0], f"{self._heartbeat.who(left[0])} {left[1]}, and {what} needs it.")
            )
        return failure

    def _store_out_of_reach(self, consequence: str) -> Failure:
        heartbeat = self._heartbeat
        why = heartbeat.store_lost or "it does not answer"
        server = heartbeat.server_state()
        return Failure(
            "stuck", self.rank,
            f"{heartbeat.who(self.rank)} cannot reach {heartbeat.board.served}: {why}{server}; and {consequence}. Last "
            f"known: {heartbeat.positions()}. See that the first host is up and reachable; start again from the last "
            "checkpoint.",
        )  # fmt: skip

    def _nobody_moves(self, waiting: str = "") -> Failure:
        return Failure(
            "stuck", self.rank,
            f"no rank has moved for {self.timeout:.0f} s: {self._heartbeat.positions()}{waiting}. Stacks of the ranks "
            "that do not wait tell more (py-spy dump --pid PID); work that takes this long needs a longer "
            f"tiering.distributed.timeout.{self._heartbeat.remarks()}",
        )  # fmt: skip

    def _watch(self, on_lost: Callable[[str], None], unended: Callable[[], str | None]) -> None:
        """For collectives that a device waits for: what `_Delay` is for a wait that this class can see."""
        heartbeat = self._heartbeat
        deaf, idle, looks = Stillness(2 * self._beat), Stillness(2 * self._beat), False
        while not self._closed:
            failure = heartbeat.failed(self._beat)
            if failure is None and not self._closed:
                moves = heartbeat.turns if heartbeat.store_lost is None else None
                if deaf.seconds((moves, self._position.changes)) > self.silence:
                    failure = heartbeat.settle(
                        self._store_out_of_reach("this rank has not moved either"), within=0.0
                    )
                what = unended()
                still = idle.seconds((what, heartbeat.moves, self._position.changes))
                if looks is not (what is not None and still > self.timeout / 2):
                    looks = not looks
                    heartbeat.watch() if looks else heartbeat.rest()  # without it only the successor is seen
                if what is not None and still > self.timeout and failure is None:
                    waiting = f"; the device of rank {self.rank} is waiting to {what}"
                    failure = heartbeat.settle(self._nobody_moves(waiting))
            if failure is not None:
                if not self._closed:
                    on_lost(str(failure.error()))
                return


def sever(groups: Iterable[ProcessGroup]) -> None:
    """Break the connections of ``groups``, so that a collective which cannot end keeps nobody waiting.

    All at once: what NCCL does to abort a communicator may wait for the whole device, on which the kernel of another
    one hangs. It may also never return: then neither does anybody who waits for the device, but this one goes on.
    """
    threads = [
        threading.Thread(target=_sever, args=(group,), name="sever a group of ranks", daemon=True)
        for group in groups
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + SEVERED_WITHIN
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            log.error("connections with other ranks could not be broken within %.0f s", SEVERED_WITHIN)


def _sever(group: ProcessGroup) -> None:
    """Gloo's destructor waits for pending operations up to the group's time-out, minutes or more if the other side is
    frozen, and its ``abort`` does nothing. A receive whose time is up closes its connection, and all that hangs on it.
    """
    if group.name() != "gloo":
        try:
            group.abort()
        except RuntimeError as error:
            log.error("a communicator could not be aborted: %s", error)
        return
    for rank in range(group.size()):
        if rank != group.rank():
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1, device="cpu")], rank, SEVERED).wait(timedelta(milliseconds=1))


class Stillness:
    """How long something has not changed while this process was awake: a suspended job must not time out."""

    def __init__(self, longest: float) -> None:
        self._longest = longest  # between two looks of a process that is awake
        self._last: object = None
        self._looked = time.monotonic()
        self._seconds = 0.0

    def seconds(self, now: object) -> float:
        looked = time.monotonic()
        passed, self._looked = min(looked - self._looked, self._longest), looked
        self._seconds = self._seconds + passed if now == self._last else 0.0
        self._last = now
        return self._seconds


class _Delay:
    """One wait of the thread that trains: how long it has lasted, and what moved meanwhile."""

    def __init__(self, peers: Peers, group: str, number: int, what: str) -> None:
        self.group = group
        self.number = number
        self.what = what
        self.waiting = f"waiting to {what} ({group} {number})"
        self._peers = peers
        self._heartbeat = peers._heartbeat
        self._began = time.monotonic()
        self._looked = False
        self._missing: str | None = None  # what the warning said
        self._deaf = Stillness(2 * SLICE)
        self._idle = Stillness(2 * SLICE)

    def __enter__(self) -> Self:
        self._heartbeat.position.waits = self.group, self.number, self.what
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._heartbeat.position.waits = None
        self._heartbeat.position.changes += 1
        if self._looked:
            self._heartbeat.rest()
        if self._missing is not None and kind is None:
            log.info("%s came after %.1f s", self._missing, time.monotonic() - self._began)

    def look(self) -> None:
        """After a slice of waiting: raise if it cannot end, warn if it is long."""
        peers, heartbeat = self._peers, self._heartbeat
        heartbeat.watch()
        self._looked = True
        if heartbeat.failure is not None:
            raise peers._told(heartbeat.failure, self.waiting)
        deaf = self._deaf.seconds(heartbeat.turns if heartbeat.store_lost is None else None)
        if deaf > peers.silence:
            lost = heartbeat.settle(peers._store_out_of_reach(f"is {self.waiting}"), within=0.0)
            raise peers._told(lost, self.waiting)
        if self._idle.seconds(heartbeat.moves) > peers.timeout:
            raise peers._told(heartbeat.settle(peers._nobody_moves()), self.waiting)
        waited = time.monotonic() - self._began
        if waited > peers._patience and self._missing is None:
            behind = heartbeat.behind(self.group, self.number)
            self._missing = spell(behind) if behind else f"{self.what} ({self.group} {self.number})"
            where = heartbeat.positions(behind) if behind else "every rank has come, the transfer goes on"
            log.warning("rank %d has been %s for %.0f s; %s", peers.rank, self.waiting, waited, where)
