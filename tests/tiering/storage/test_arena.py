"""The arena: exact sizes, both ends, and waiting for whoever holds the room."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tiering.errors import ArenaError, NotDoneError, SwapError
from tiering.storage import arena as arena_module
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE, Arena, Lease, round_up
from tiering.storage.tickets import Abandoned, AllOf, Ticket


class Transfer:
    """A completion under the test's control; ``error`` is what its wait raises."""

    def __init__(self, error: SwapError | None = None) -> None:
        self.error = error
        self.ended = threading.Event()
        self.awaited = threading.Event()

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: float | None = None) -> int:
        self.awaited.set()
        if not self.ended.wait(20 if timeout is None else timeout):
            assert timeout is not None, "nobody ended this transfer"
            raise NotDoneError
        if self.error is not None:
            raise self.error
        return 0


class Caller(threading.Thread):
    """Leases in a thread of its own; ``result`` waits for the lease or the error."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        super().__init__(daemon=True)
        self._arena, self._nbytes = arena, nbytes
        self._result: Lease | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._arena.lease(self._nbytes, "caller")
        except BaseException as error:
            self._result = error

    def result(self) -> Lease | BaseException:
        self.join(20)
        assert self._result is not None, "still waiting"
        return self._result


def failed(code: int = errno.EIO) -> SwapError:
    return SwapError("write of 'w' failed", errno=code, filename="swap", offset=0, names=("w",))


@pytest.fixture
def arena() -> Iterator[Arena]:
    mapped = Arena.map(4 * PAGE, "host")
    yield mapped
    assert mapped.used == sum(mapped.by_kind.values())


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 10 * PAGE - 1])
def test_its_size_is_exact_to_the_page(nbytes: int) -> None:
    arena = Arena.map(nbytes, "host")
    assert arena.capacity == len(arena.memory) == round_up(nbytes) == -(-nbytes // PAGE) * PAGE
    assert arena.address % PAGE == 0
    assert (arena.used, arena.peak, arena.by_kind) == (0, 0, {})


def test_every_byte_of_it_can_be_leased_and_no_more(arena: Arena) -> None:
    leases = [arena.lease(nbytes, "state") for nbytes in (1, PAGE, PAGE + 1)]
    assert [lease.nbytes for lease in leases] == [PAGE, PAGE, 2 * PAGE]
    assert [lease.address - arena.address for lease in leases] == [0, PAGE, 2 * PAGE]
    assert arena.used == arena.peak == arena.capacity
    assert arena.try_lease(1, "state") is None


def test_nothing_takes_no_room(arena: Arena) -> None:
    """A frozen group has no gradients: the plan counts 0 bytes, and an exact arena has no page to spare."""
    full = arena.lease(arena.capacity, "parameters")
    for nothing in (arena.lease(0, "gradients"), Arena.map(0, "device").lease(0, "gradients")):
        assert (nothing.nbytes, len(nothing.view)) == (0, 0)
        nothing.release()
        with pytest.raises(AssertionError, match="released twice"):
            nothing.release()
    assert arena.by_kind == {"parameters": arena.capacity}
    full.release()
    assert arena.lease(arena.capacity, "parameters").offset == 0


def test_the_view_is_the_memory_at_the_address(arena: Arena) -> None:
    below = arena.lease(PAGE, "below")
    lease = arena.lease(2 * PAGE, "state")
    assert below.offset + below.nbytes == lease.offset
    lease.view[:] = bytes(range(256)) * (2 * PAGE // 256)
    assert ctypes.string_at(lease.address, lease.nbytes) == bytes(lease.view)
    assert (
        ctypes.string_at(lease.address - 1, 1) == ctypes.string_at(lease.address + lease.nbytes, 1) == b"\0"
    )


def test_a_part_is_a_window_of_its_lease(arena: Arena) -> None:
    lease = arena.lease(2 * PAGE, "state")
    part = lease.part(PAGE, 512)
    assert (part.address, part.nbytes, part.lease) == (lease.address + PAGE, 512, lease)
    assert lease.part(2 * PAGE, 0).nbytes == 0
    for offset, nbytes in ((-1, 1), (0, 2 * PAGE + 1), (PAGE, PAGE + 1), (0, -1)):
        with pytest.raises(ValueError, match=rf"outside a lease of {2 * PAGE} bytes"):
            lease.part(offset, nbytes)


def test_long_lives_at_the_top_do_not_fragment_short_ones(arena: Arena) -> None:
    outer = arena.lease(PAGE, "root", at=3 * PAGE)
    assert outer.offset == 3 * PAGE
    assert arena.try_lease(PAGE, "root", at=3 * PAGE) is None
    short = [arena.lease(PAGE, "block") for _ in range(3)]
    assert [lease.offset for lease in short] == [0, PAGE, 2 * PAGE]
    for lease in short:
        lease.release()
    assert arena.lease(3 * PAGE, "block").offset == 0


def test_use_is_counted_by_kind_and_the_peak_stays(arena: Arena) -> None:
    first, second = arena.lease(1, "state"), arena.lease(2 * PAGE, "gradients")
    third = arena.lease(PAGE, "state")
    assert arena.by_kind == {"state": 2 * PAGE, "gradients": 2 * PAGE}
    second.release()
    first.release()
    assert arena.by_kind == {"state": PAGE}
    assert (arena.used, arena.peak) == (PAGE, 4 * PAGE)
    third.release()
    assert (arena.used, arena.peak, arena.by_kind) == (0, 4 * PAGE, {})


def test_released_twice_is_caught(arena: Arena) -> None:
    lease = arena.lease(PAGE, "state")
    lease.release()
    with pytest.raises(AssertionError, match="lease of 'state' in the host arena was released twice"):
        lease.release()
    assert arena.used == 0


def test_split_takes_its_bytes_out_for_good(arena: Arena) -> None:
    staging, none = arena.split(3 * PAGE, "staging"), arena.split(0, "gradient window")
    assert (staging.capacity, none.capacity) == (3 * PAGE, 0)
    assert arena.by_kind == {"staging": 3 * PAGE}
    lease = staging.lease(3 * PAGE, "slot")
    assert arena.address <= lease.address <= lease.address + lease.nbytes <= arena.address + arena.capacity
    other = arena.lease(PAGE, "state")
    lease.view[:] = b"s" * lease.nbytes
    assert bytes(other.view) == bytes(PAGE)
    assert arena.try_lease(1, "state") is None
    assert none.try_lease(1, "state") is None


def test_more_than_everything_is_refused_at_once(arena: Arena) -> None:
    with pytest.raises(ArenaError) as caught:
        arena.lease(4 * PAGE + 1, "state")
    assert str(caught.value) == (
        "[TIER-ARENA] a lease of 20480 bytes for 'state' exceeds the whole host arena of 16384 bytes;"
        " raise the host budget or lower sub_group_size"
    )


def test_a_lease_waits_for_the_transfer_that_owns_the_room(arena: Arena) -> None:
    transfer = Transfer()
    arena.lease(3 * PAGE, "staging").retire(transfer)
    assert arena.try_lease(2 * PAGE, "staging") is None
    caller = Caller(arena, 2 * PAGE)
    assert transfer.awaited.wait(20)
    assert arena.by_kind == {"staging": 3 * PAGE}  # not a byte before the transfer has ended
    transfer.ended.set()
    lease = caller.result()
    assert isinstance(lease, Lease)
    assert (lease.offset, lease.nbytes) == (0, 2 * PAGE)


def test_retired_room_comes_free_in_any_order(arena: Arena) -> None:
    slow, quick = Transfer(), Transfer()
    arena.lease(2 * PAGE, "slow").retire(slow)
    arena.lease(2 * PAGE, "quick").retire(quick)
    quick.ended.set()
    lease = arena.try_lease(2 * PAGE, "next")
    assert lease is not None
    assert lease.offset == 2 * PAGE
    slow.ended.set()
    arena.drain()
    assert arena.by_kind == {"next": 2 * PAGE}


def test_a_lease_takes_the_room_that_comes_free_first(arena: Arena) -> None:
    """Not that of the oldest transfer: one slow disk does not hold up what passes by the others."""
    slow, quick = Transfer(), Transfer()
    arena.lease(2 * PAGE, "slow").retire(slow)
    arena.lease(2 * PAGE, "quick").retire(quick)
    caller = Caller(arena, 2 * PAGE)
    assert slow.awaited.wait(20)
    quick.ended.set()
    lease = caller.result()
    assert isinstance(lease, Lease)
    assert lease.offset == 2 * PAGE
    slow.ended.set()


def test_a_lease_takes_what_another_thread_releases_while_a_transfer_runs(arena: Arena) -> None:
    slow, blocking = Transfer(), arena.lease(2 * PAGE, "held")
    arena.lease(2 * PAGE, "slow").retire(slow)
    caller = Caller(arena, 2 * PAGE)
    assert slow.awaited.wait(20)
    blocking.release()
    lease = caller.result()
    assert isinstance(lease, Lease)
    assert lease.offset == 0
    slow.ended.set()


class Waiting(NamedTuple):
    """An arena whose memory the writes of two drives use, of which one hangs until the end."""

    arena: Arena
    hung: Ticket
    quick: AllOf[Ticket]


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    # No wait looks around because its patience has ended: an end of a transfer has to wake it.
    monkeypatch.setattr(arena_module, "PATIENCE_SECONDS", 60.0)
    faults = (Fault("write", file=0, delay=3.0), Fault("write", count=0, file=1, delay=0.1))
    with ExitStack() as stack:
        # The files outlive the context.
        fds = [os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600) for _ in range(2)]
        for fd in fds:
            stack.callback(os.close, fd)
        context = stack.enter_context(AioContext(fault=FaultPlan(faults)))
        hanging, good = (context.add_file(fd, direct=False, name=str(fd)) for fd in fds)
        arena = Arena.map(4 * PAGE, "host")
        old, new = arena.lease(2 * PAGE, "old"), arena.lease(2 * PAGE, "new")
        hung = context.write(hanging, old, 0, PAGE)
        quick = AllOf([context.write(good, new, at, PAGE) for at in (0, PAGE)])
        old.retire(hung)
        new.retire(quick)
        yield Waiting(arena, hung, quick)


@pytest.mark.slow
def test_the_end_of_any_transfer_wakes_a_lease(waiting: Waiting) -> None:
    """Also of one that has several parts, of which each ends alone."""
    lease = waiting.arena.lease(2 * PAGE, "next")
    assert lease.offset == 2 * PAGE
    assert waiting.quick.done()
    assert not waiting.hung.done()


def test_the_end_of_an_abandoned_read_is_room_and_no_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(fd, 16 * PAGE)
    plan = FaultPlan((Fault("read", count=0, delay=0.05),))
    try:
        with AioContext(block_size=PAGE, queue_depth=1, fault=plan) as context:
            file = context.add_file(fd, direct=False, name="swap")
            arena = Arena.map(16 * PAGE, "host")
            lease = arena.lease(16 * PAGE, "ahead")
            lease.retire(Abandoned(context.read(file, lease, 0, 16 * PAGE)))
            assert arena.lease(16 * PAGE, "next").offset == 0
            assert context.stats()[file].read.ops < 16
    finally:
        os.close(fd)


def test_a_lost_lease_comes_back_when_its_last_user_goes(arena: Arena) -> None:
    view = arena.lease(4 * PAGE, "lost").view[PAGE:]
    assert (arena.used, arena.try_lease(PAGE, "next")) == (4 * PAGE, None)
    del view
    lease = arena.try_lease(4 * PAGE, "next")
    assert lease is not None
    assert (arena.used, arena.by_kind) == (4 * PAGE, {"next": 4 * PAGE})


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_what_a_signal_handler_raises_while_a_lease_waits_is_no_transfers_end(
    arena: Arena, error: type[BaseException]
) -> None:
    class Struck(Transfer):
        def wait(self, timeout: float | None = None) -> int:
            raise error("the user's own")

    transfer = Struck()
    arena.lease(4 * PAGE, "staging").retire(transfer)
    for call in (lambda: arena.lease(PAGE, "next"), arena.drain):
        with pytest.raises(error, match="the user's own"):
            call()
        assert arena.by_kind == {"staging": 4 * PAGE}


@pytest.mark.parametrize("how", ["release", "retire"])
def test_a_lease_waits_for_other_threads(arena: Arena, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    wait = arena._changed.wait

    def announce(timeout: float | None = None) -> bool:
        waiting.set()  # under the lock: what the test does next comes after the wait has begun
        return wait(timeout)

    monkeypatch.setattr(arena._changed, "wait", announce)
    blocking = arena.lease(4 * PAGE, "held")
    caller = Caller(arena, 4 * PAGE)
    assert waiting.wait(20)
    if how == "release":
        blocking.release()
    else:
        transfer = Transfer()
        blocking.retire(transfer)
        transfer.ended.set()
    lease = caller.result()
    assert isinstance(lease, Lease)
    assert arena.by_kind == {"caller": 4 * PAGE}


def test_every_waiting_thread_is_served(arena: Arena) -> None:
    leases = [arena.lease(PAGE, "held") for _ in range(4)]
    callers = [Caller(arena, PAGE) for _ in range(8)]
    for lease in leases:
        lease.release()
    for _ in callers:  # what one gives back serves another
        served = next(result for result in _results(callers) if result.nbytes)
        served.release()
    assert arena.used == 0
    assert arena.peak == 4 * PAGE


def _results(callers: list[Caller]) -> Iterator[Lease]:
    while True:
        for caller in callers:
            if isinstance(caller._result, Lease):
                yield caller._result
            else:
                assert not isinstance(caller._result, BaseException), caller._result


def test_what_one_caller_collects_serves_another(arena: Arena) -> None:
    """The room that a retired lease leaves is announced, whoever finds it first."""
    first, second = Transfer(), Transfer()
    arena.lease(2 * PAGE, "a").retire(first)
    arena.lease(2 * PAGE, "b").retire(second)
    callers = [Caller(arena, 2 * PAGE), Caller(arena, 2 * PAGE)]
    assert first.awaited.wait(20)
    second.ended.set()
    first.ended.set()
    assert all(isinstance(caller.result(), Lease) for caller in callers)
    assert arena.by_kind == {"caller": 4 * PAGE}


@pytest.mark.parametrize("is_done", [True, False], ids=["ended before", "awaited"])
def test_an_error_surfaces_once_and_the_room_is_free(arena: Arena, is_done: bool) -> None:
    error = failed()
    transfer = Transfer(error)
    arena.lease(4 * PAGE, "staging").retire(transfer)
    if is_done:
        transfer.ended.set()
        with pytest.raises(SwapError) as caught:
            arena.lease(4 * PAGE, "staging")
        assert caught.value is error
    else:
        callers = [Caller(arena, 4 * PAGE)]
        assert transfer.awaited.wait(20)
        transfer.ended.set()
        assert [caller.result() for caller in callers] == [error]
    assert arena.used == 0
    assert arena.lease(4 * PAGE, "staging").nbytes == 4 * PAGE


def test_one_error_of_many_is_told_at_a_time(arena: Arena) -> None:
    errors = [failed(errno.EIO), failed(errno.ENOSPC)]
    for lease, error in zip([arena.lease(PAGE, "staging") for _ in errors], errors, strict=True):
        transfer = Transfer(error)
        transfer.ended.set()
        lease.retire(transfer)
    for error in errors:
        with pytest.raises(SwapError) as caught:
            arena.lease(PAGE, "staging")
        assert caught.value is error
    assert arena.lease(4 * PAGE, "staging").offset == 0


def test_drain_ends_everything_and_raises_the_first_error(arena: Arena) -> None:
    errors = [None, failed(errno.EIO), failed(errno.ENOSPC), None]
    transfers = [Transfer(error) for error in errors]
    leases = [arena.lease(PAGE, "staging") for _ in errors]
    for lease, transfer in zip(leases, transfers, strict=True):
        transfer.ended.set()
        lease.retire(transfer)
    with pytest.raises(SwapError) as caught:
        arena.drain()
    assert caught.value is errors[1]
    assert all(transfer.awaited.is_set() for transfer in transfers)
    assert arena.used == 0
    arena.drain()


def test_starving_says_who_holds_what(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "STARVED_AFTER_SECONDS", 0.05)
    arena.lease(PAGE, "gone").release()
    parameters = [arena.lease(PAGE, "parameters")]
    blocking = arena.lease(PAGE, "gradients")
    parameters.append(arena.lease(PAGE, "parameters"))
    blocking.release()
    with pytest.raises(ArenaError) as caught:
        arena.lease(3 * PAGE, "state")
    assert str(caught.value) == (
        "[TIER-ARENA] no 12288 bytes for 'state' became free in the host arena within 0 s; capacity 16384,"
        " held: {'parameters': 8192}, largest free range 4096. This is a defect of the plan: please report it;"
        " a larger host budget works around it"
    )


def test_progress_is_not_starvation(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is for silence: room that came back, though too little, starts it anew."""
    timeouts: list[float | None] = []
    leases = [arena.lease(PAGE, "held") for _ in range(4)]

    def wait(timeout: float | None = None) -> bool:
        timeouts.append(timeout)
        arena._restore(leases.pop())  # another thread's release, while this one waits
        return True

    monkeypatch.setattr(arena._changed, "wait", wait)
    assert arena.lease(3 * PAGE, "state").nbytes == 3 * PAGE
    assert timeouts == [arena_module.STARVED_AFTER_SECONDS] * 3
