"""The view of the other ranks: a collective that cannot end becomes an error on every rank instead of a hang.

The thread that trains reports here what it does and what it waits for. It never accesses the rank store, because an
operation on a store can hang. The thread in `heartbeat.py` does that, and judges the other ranks. A wait ends early for
these reasons, each on all ranks, with an error that names the rank that caused it:

    another rank failed, closed its engine, died, or gave no sign of life for ``silence`` seconds
    another rank is in, or about to enter, a different collective
    the rank store cannot be reached, and the collective does not end either
    no rank has made progress for ``timeout`` seconds

If only the device waits for a collective, the CPU is not in a wait that could end. A thread watches for that case: see
`DeviceCollectives`.
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
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Literal, Protocol, Self, TypeVar

from torch.distributed.distributed_c10d import Store, Work

from tiering.errors import DistributedError
from zero3.ranks import futures
from zero3.ranks.heartbeat import SIGNS, Heartbeat, Limits
from zero3.ranks.position import Position
from zero3.ranks.store import Failure, RankStore, spell

log = logging.getLogger(__name__)

T = TypeVar("T")

COLLECTIVE = "collective"
FIRST_SLICE = 0.2  # seconds of waiting before the other ranks are watched
SLICE = 1.0
TIMED_OUT = "Operation timed out"  # in gloo's error at the end of a slice; the collective continues
QUOTED = 1000  # characters of an error that other ranks show


_sequence = itertools.count()
_open: weakref.WeakValueDictionary[int, Peers] = weakref.WeakValueDictionary()  # by number, newest last


def newest() -> Peers | None:
    """The peers of this process's newest engine that is open."""
    numbers = [number for number, peers in list(_open.items()) if peers.of_this_process]
    return _open.get(max(numbers)) if numbers else None


def _of_other_engines(rank: int, engine: str) -> dict[str, Position]:
    """By name of the engine: the position of ``rank`` with the other open engines of this process."""
    open_ = [peers for peers in list(_open.values()) if peers.of_this_process and peers.rank == rank]
    return {peers.engine: peers.position for peers in open_ if peers.engine != engine}


def has_ended(work: Work, within: float) -> bool:
    """Wait up to ``within`` seconds; whether ``work`` has ended by then. RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=within))
    except RuntimeError as error:
        if TIMED_OUT not in str(error):
            raise
        # Only this wait has ended. The collective continues, and uses its buffers.
        return False
    return True


class DeviceCollectives(Protocol):
    """Collectives that a device waits for (NCCL). A thread of `Peers` calls these methods."""

    def unended(self) -> str | None:
        """The label of a collective that was queued and has not ended; None if there is none."""

    def abort(self, reason: str) -> None:
        """A failure has ended the run: abort the collectives that the device waits for. Called at most once."""


class Peers:
    """One for each engine and rank. Calls come from one thread at a time: the one that trains.

    ``store`` is for this engine alone (it has its own prefix), and has its own connection if torch can create one. The
    time-out of the process groups should be longer than ``limits.timeout``; otherwise torch's error comes first.

    ``engine`` is a name that is unique in this process and the same on all ranks. With ``device``, ranks are watched
    also while this rank does not wait, and a collective that the device has not ended counts as a wait of this rank.
    ``place`` is that of this rank in a mesh, for errors. ``members`` are the ranks by group of collectives, of groups
    that not all ranks belong to.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        limits: Limits,
        *,
        engine: str = "",
        device: DeviceCollectives | None = None,
        place: str = "",
        members: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self.rank = rank
        self.engine = engine
        self.limits = limits
        self._pid = os.getpid()
        self._closed = False
        self.failed_by: BaseException | str | None = None  # on this rank
        # The failure that this rank has raised, and a sentence about its wait at that time. Every later call raises the
        # same error again.
        self._final: tuple[Failure, str] | None = None
        self._heartbeat = Heartbeat(
            RankStore(store),
            rank,
            world_size,
            limits,
            strict=device is not None,
            elsewhere=partial(_of_other_engines, rank, engine),
            place=place,
            members=members,
            engine=engine,
        )
        self._position = self._heartbeat.position
        self._number = next(_sequence)
        _open[self._number] = self
        atexit.register(self._at_exit)
        if device is not None:
            # A daemon: it may be inside a call to the device that never returns, and must keep no process alive.
            threading.Thread(target=self._watch, args=(device,), name="watch over ranks", daemon=True).start()

    @property
    def position(self) -> Position:
        """The position of this rank with this engine."""
        return self._position

    def note(self, activity: str) -> None:
        """Set the current activity of this rank, which errors of other ranks show: "backward of 'layers.3'"."""
        self._position.activity = activity
        self._position.changes += 1

    def remark(self, text: str) -> None:
        """Publish an event of this rank that may explain a later failure. An empty text removes it."""
        self._position.remark = text[:QUOTED]

    def remarks(self) -> str:
        """The remarks of all ranks as sentences, for an error that is about to be raised. Waits for two beats."""
        self._heartbeat.watch()
        self._heartbeat.wait_for_failure(2 * self.limits.beat)
        self._heartbeat.end_watch()
        return self._heartbeat.observed.remarks()

    def issue(self, label: str, *, group: str = COLLECTIVE) -> None:
        """This rank has entered the next collective of ``group`` without an agreement.

        ``label`` describes it ("gather 'layers.3'"), with the same text on all ranks, which compare it. Collectives
        whose order may differ from rank to rank belong to different groups, which are numbered separately.
        """
        self._position.issue(group, label)

    def agree(self, label: str, *, group: str = COLLECTIVE) -> None:
        """Wait until all ranks confirm that their next collective of ``group`` is ``label``.

        Another rank confirms when it calls ``agree`` or ``issue`` with the same label.

        Raises:
            RankOrderError: on all ranks, if the label differs on one of them.
            DistributedError: as `wait`.
        """
        self.check()
        # Count the collective first: another rank may propose it before this rank has written its own proposal.
        question = self._heartbeat.propose(group, label)
        with _Delay(self, group, question.number, label) as delay:
            while not self._heartbeat.confirmed(question, FIRST_SLICE):
                if self._heartbeat.store_lost is not None:
                    raise self._cause_of("no answer from the store", delay)
                delay.check()

    def meet(self, label: str, within: float) -> bool:
        """Wait up to ``within`` seconds for all ranks to call ``meet(label)``. Returns whether they did."""
        return self._heartbeat.confirmed(self._heartbeat.propose(label, label), within)

    def wait(self, work: Work, label: str, *, group: str = COLLECTIVE) -> None:
        """Wait for one collective that was issued or agreed on as ``label``.

        Raises:
            RankLostError, RankOrderError, DistributedError: see the top of this file. They are final: every later call
                raises the same error again.
        """
        self.check()
        with _Delay(self, group, self._position.number(group, label), label) as delay:
            slice_s = FIRST_SLICE
            while True:
                try:
                    if has_ended(work, slice_s):
                        return
                except RuntimeError as error:
                    raise self._cause_of(str(error), delay) from error
                slice_s = SLICE
                delay.check()

    def follow(self, has_ended: Callable[[float], bool], label: str) -> None:
        """Wait for ``label``, a collective of the user's program, until ``has_ended(seconds)`` returns True.

        It has no number, because it may belong to any group, and it may take as long as torch allows. Raises
        RankLostError (or the error of the failure that ended the run) as soon as a rank is lost. If the collective
        fails, waits a moment for the failure of a rank that explains it, and raises that instead.
        """
        self.check()
        activity, self._position.activity = self._position.activity, label
        slice_s, waiting = FIRST_SLICE, f"waiting in {label}"
        try:
            while not has_ended(slice_s):
                self._heartbeat.watch()
                if self._heartbeat.failure is not None:
                    raise self._final_error(self._heartbeat.failure, waiting)
                slice_s = SLICE
        except RuntimeError as error:
            failure = self._loss_that_broke(label)
            if failure is None:
                raise
            raise self._final_error(failure, waiting) from error
        finally:
            self._position.activity = activity
            self._heartbeat.end_watch()

    def follow_call(self, call: Callable[[], T], label: str) -> T:
        """Run ``call`` on another thread, wait as ``follow`` does, and return its result. A stuck call is abandoned."""
        # On another thread, because a call of torch that hangs cannot be left.
        future = futures.run_in_thread(call, label)

        def has_ended(seconds: float) -> bool:
            with contextlib.suppress(TimeoutError):
                future.exception(seconds)
            if not future.done():
                return False
            future.result()  # raises the call's exception
            return True

        self.follow(has_ended, label)
        return future.result()

    def cause_of(self, error: str, label: str, *, group: str) -> DistributedError:
        """The error for the collective ``label``, the last one of ``group``, which could not begin."""
        with _Delay(self, group, self._position.number(group, label), label) as delay:
            return self._cause_of(error, delay)

    @property
    def of_this_process(self) -> bool:
        """Whether the calling process is the rank itself, not a child that it has forked."""
        return os.getpid() == self._pid

    @property
    def broken(self) -> bool:
        """Whether a failure of this rank, or a known failure of another one, has ended the run."""
        return self._heartbeat.failure is not None or self.failed_by is not None

    @property
    def failure_began_with(self) -> int | None:
        """The rank that caused the failure which ended the run; None while there is no failure."""
        failure = self._heartbeat.failure
        return None if failure is None else failure.rank

    def fail(self, error: BaseException | str) -> None:
        """This rank ends with ``error``: publish it to the other ranks, unless the run has failed before."""
        if os.getpid() != self._pid or self._closed:
            return
        # First: the watching thread ends, so that it does not abort a device that this rank closes itself.
        self._closed = True
        self.failed_by = error
        rank, position = self._heartbeat.observed.describe(self.rank), self._heartbeat.beat().position()
        message = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._heartbeat.publish(
            Failure(
                "lost", self.rank,
                f"{rank} failed {position}: {message[:QUOTED]} (the log of rank {self.rank} has its traceback).",
            )
        )  # fmt: skip
        self._end("failed")

    def close(self) -> None:
        """This rank closes its engine. A rank that still waits for it gets an error."""
        self._leave("has closed its engine")

    def _leave(self, activity: str) -> None:
        # A forked child publishes nothing: the rank itself continues.
        if os.getpid() == self._pid and not self._closed:
            self.note(activity)
            self._end("failed" if self._heartbeat.failure else "closed")

    def _end(self, state: Literal["failed", "closed"]) -> None:
        self._closed = True
        _open.pop(self._number, None)
        atexit.unregister(self._at_exit)
        self._heartbeat.end(state)

    def _at_exit(self) -> None:
        uncaught = getattr(sys, "last_value", None)  # set when an exception ends the interpreter
        if uncaught is not None:
            self.fail(uncaught)
        else:
            self._leave("has ended its program")

    def check(self) -> None:
        """DistributedError if a failure that this rank knows of has ended the run."""
        if self._final is None and self._heartbeat.failure is not None:
            self._final = self._heartbeat.failure, ""
        if self._final is not None:
            failure, addition = self._final
            raise failure.error(addition)
        assert not self._closed, "a closed engine enters no collective"

    def _final_error(self, failure: Failure, waiting: str) -> DistributedError:
        """The error for ``failure``, which ended this rank's wait ``waiting``. Later calls raise the same error."""
        addition = "" if failure.rank == self.rank else f" Rank {self.rank} was {waiting}."
        self._final = failure, addition
        return failure.error(addition)

    def _cause_of(self, error: str, delay: _Delay) -> DistributedError:
        """The error for a collective that failed with ``error``: if a rank is the cause, the error names it."""
        heartbeat, turns = self._heartbeat, self._heartbeat.turns
        failure = self._wait_for_reason()
        if failure is not None:
            return self._final_error(failure, delay.waiting)
        if heartbeat.store_lost is not None or heartbeat.turns - turns < 2:
            lost = heartbeat.publish(self._store_out_of_reach(error), within=0.0)
            return self._final_error(lost, delay.waiting)
        failure = Failure(
            "stuck", self.rank,
            f"{heartbeat.observed.describe(self.rank)} could not {delay.label} ({delay.group} {delay.number}): {error}."
            f" Every rank gives signs of life: {heartbeat.observed.positions()}. Check the network between the hosts.",
        )  # fmt: skip
        return self._final_error(heartbeat.publish(failure), delay.waiting)

    def _wait_for_reason(self) -> Failure | None:
        """The known failure, after a wait for one: a collective may fail before its lost rank is detected."""
        heartbeat = self._heartbeat
        heartbeat.watch(urgent=True)
        patience = min(self.limits.silence, SIGNS * self.limits.beat) + 2 * self.limits.beat
        began = time.monotonic()
        while heartbeat.wait_for_failure(0.1) is None and time.monotonic() - began < patience:
            if heartbeat.store_lost is not None:
                # Without the rank store, only processes of this host can be judged.
                patience = min(patience, 2 * self.limits.beat)
        return heartbeat.failure

    def _loss_that_broke(self, label: str) -> Failure | None:
        """The failure of a rank that explains why ``label``, a collective of the program, has failed."""
        failure = self._wait_for_reason()
        if failure is None and (closed := self._heartbeat.observed.first_closed()) is not None:
            failure = self._heartbeat.publish(
                Failure(
                    "lost",
                    closed[0],
                    f"{self._heartbeat.observed.describe(closed[0])} {closed[1]}, and {label} needs it.",
                )
            )
        return failure

    def _store_out_of_reach(self, consequence: str) -> Failure:
        heartbeat = self._heartbeat
        reason = heartbeat.store_lost or "no answer"
        server = heartbeat.server_state()
        return Failure(
            "stuck", self.rank,
            f"{heartbeat.observed.describe(self.rank)} cannot reach {heartbeat.store.served}: {reason}{server}; and "
            f"{consequence}. Last known: {heartbeat.observed.positions()}. Check that the first host is up and"
            " reachable; restart from the last checkpoint.",
        )  # fmt: skip

    def _stalled_failure(self, waiting: str = "") -> Failure:
        observed = self._heartbeat.observed
        return Failure(
            "stuck", self.rank,
            f"no rank has made progress for {self.limits.timeout:.0f} s: {observed.positions()}{waiting}. To see"
            " why, print the stacks of the ranks that do not wait (py-spy dump --pid PID); if their work takes this"
            f" long, raise tiering.distributed.timeout.{observed.remarks()}",
        )  # fmt: skip

    def _watch(self, device: DeviceCollectives) -> None:
        """Watch the waits of the device, as `_Delay` watches the waits of the thread that trains."""
        heartbeat = self._heartbeat
        store, ranks = Stillness(2 * self.limits.beat), Stillness(2 * self.limits.beat)
        watches_all = False
        while not self._closed:
            failure = heartbeat.wait_for_failure(self.limits.beat)
            if failure is None and not self._closed:
                moves = heartbeat.turns if heartbeat.store_lost is None else None
                if store.seconds((moves, self._position.changes)) > self.limits.silence:
                    failure = heartbeat.publish(
                        self._store_out_of_reach("this rank has made no progress either"), within=0.0
                    )
                label = device.unended()
                still = ranks.seconds((label, heartbeat.observed.moves, self._position.changes))
                # To judge that no rank moves, all beats must be read: without watch() only the successor's is.
                if watches_all is not (label is not None and still > self.limits.timeout / 2):
                    watches_all = not watches_all
                    heartbeat.watch() if watches_all else heartbeat.end_watch()
                if label is not None and still > self.limits.timeout and failure is None:
                    waiting = f"; the device of rank {self.rank} is waiting to {label}"
                    failure = heartbeat.publish(self._stalled_failure(waiting))
            if failure is not None:
                if not self._closed:
                    # Once: the thread ends here.
                    device.abort(str(failure.error()))
                return


class Stillness:
    """The seconds for which a value has not changed, without time in which this process was suspended."""

    def __init__(self, longest: float) -> None:
        self._longest = longest  # seconds between two calls of a process that is not suspended
        self._last: object = None
        self._called_at = time.monotonic()
        self._seconds = 0.0

    def seconds(self, value: object) -> float:
        """``value`` is the current one. Returns the seconds since it changed."""
        now = time.monotonic()
        passed, self._called_at = min(now - self._called_at, self._longest), now
        self._seconds = self._seconds + passed if value == self._last else 0.0
        self._last = value
        return self._seconds


class _Delay:
    """One wait of the thread that trains: its duration, and whether other ranks have moved meanwhile."""

    def __init__(self, peers: Peers, group: str, number: int, label: str) -> None:
        self.group = group
        self.number = number
        self.label = label
        self.waiting = f"waiting to {label} ({group} {number})"
        self._peers = peers
        self._heartbeat = peers._heartbeat
        self._began = time.monotonic()
        self._watching = False
        self._missing: str | None = None  # ranks or collective that the warning has named
        self._store = Stillness(2 * SLICE)
        self._moves = Stillness(2 * SLICE)

    def __enter__(self) -> Self:
        # A new tuple in one assignment: the heartbeat's thread reads it without a lock.
        self._heartbeat.position.waits = self.group, self.number, self.label
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._heartbeat.position.waits = None
        # Only the thread that trains counts, and other threads only compare.
        self._heartbeat.position.changes += 1
        if self._watching:
            self._heartbeat.end_watch()
        if self._missing is not None and kind is None:
            log.info("%s came after %.1f s", self._missing, time.monotonic() - self._began)

    def check(self) -> None:
        """After a slice of the wait: raise if it cannot end, warn if it is long."""
        peers, heartbeat = self._peers, self._heartbeat
        heartbeat.watch()
        self._watching = True
        if heartbeat.failure is not None:
            raise peers._final_error(heartbeat.failure, self.waiting)
        unanswered = self._store.seconds(heartbeat.turns if heartbeat.store_lost is None else None)
        if unanswered > peers.limits.silence:
            lost = heartbeat.publish(peers._store_out_of_reach(f"is {self.waiting}"), within=0.0)
            raise peers._final_error(lost, self.waiting)
        if self._moves.seconds(heartbeat.observed.moves) > peers.limits.timeout:
            raise peers._final_error(heartbeat.publish(peers._stalled_failure()), self.waiting)
        waited = time.monotonic() - self._began
        if waited > peers.limits.patience and self._missing is None:
            members = heartbeat.ranks_of(self.group)
            behind = heartbeat.observed.ranks_behind(self.group, self.number, members)
            self._missing = spell(behind) if behind else f"{self.label} ({self.group} {self.number})"
            state = (
                heartbeat.observed.positions(behind)
                if behind
                else "all ranks have entered it, and the transfer is in progress"
            )
            log.warning("rank %d has been %s for %.0f s; %s", peers.rank, self.waiting, waited, state)
