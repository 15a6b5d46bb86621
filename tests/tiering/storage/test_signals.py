"""Handlers of signals raise at random instants of transfers: nothing is lost, and no memory is used twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.signals import Striker, striking
from tiering.errors import SwapError
from tiering.storage import slabs, striping
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE, Arena, Lease
from tiering.storage.striped_extent import StripedExtent
from tiering.storage.swap_space import Section, SwapSpace
from tiering.storage.versions import Kept
from tiering.weights import tensor_file
from tiering.weights.tensor_file import TensorFileWriter, TensorSpec

PAGES = 8
LATE = 0.001  # seconds: a transfer that was lost is still under way when its memory is used again


class Swap:
    """An extent on ``paths``, and two leases: one to transfer, one to look with."""

    def __init__(self, engine: str, paths: list[Path], stack: ExitStack, *, versions: bool) -> None:
        late = FaultPlan((Fault(count=0, delay=LATE),))
        self.aio = stack.enter_context(AioContext(engine=engine, block_size=PAGE, fault=late))
        room = Section((1 + versions) * PAGES * PAGE, tuple(paths))
        self.space = SwapSpace({"state": room}, self.aio)
        stack.callback(self.space.close)
        self.arena = Arena.map(2 * PAGES * PAGE, "staging")
        self.extent: StripedExtent = self.space.allocate(
            PAGES * PAGE, ("w",), "state", kept=(Kept.STEP,) * versions
        )
        self.lease, self.other = self.new_lease(), self.new_lease()

    def new_lease(self) -> Lease:
        return self.arena.lease(PAGES * PAGE, "slot")

    def write(self, mark: int) -> None:
        self.lease.view[:] = bytes([mark]) * self.lease.nbytes
        self.space.swap_out(self.extent, self.lease).wait()

    def read(self) -> None:
        self.space.swap_in(self.extent, self.lease).wait()

    def give_up(self) -> None:
        """What the engine does after an exception: from here on the memory is somebody else's."""
        self.space.settle(self.extent)
        assert [stats.read.in_flight + stats.write.in_flight for stats in self.aio.stats()] == [0] * len(
            self.space.slabs
        )
        self.lease.view[:] = b"\xff" * self.lease.nbytes

    def look(self) -> bytes:
        """What is on the disk; everything that was submitted earlier is over by then."""
        self.space.swap_in(self.extent, self.other).wait()
        return bytes(self.other.view)


@pytest.fixture(
    params=[(1, False), (2, False), (1, True)], ids=["one path", "two paths", "one path, two versions"]
)
def swap(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Swap]:
    count, versions = request.param
    paths = [tmp_path / str(number) for number in range(count)]
    for path in paths:
        path.mkdir()
    monkeypatch.setattr(striping, "SMALLEST_SHARE", PAGE)
    monkeypatch.setattr(striping, "SMALLEST_STRIPED", PAGE)
    monkeypatch.setattr(slabs, "measure", lambda aio, files: [1] * len(files))
    with ExitStack() as stack:
        yield Swap(engine, paths, stack, versions=versions)


def strikes(instants: int) -> Any:
    return pytest.mark.parametrize(
        "instants",
        [pytest.param(instants, id="some"), pytest.param(20 * instants, id="many", marks=pytest.mark.slow)],
    )


def refusal(call: Callable[[], object]) -> SwapError | None:
    """What ``call`` raises."""
    try:
        call()
    except SwapError as error:
        return error
    return None


def until(striker: Striker, instants: int, call: Callable[[int], object]) -> None:
    """Call with 1, 2, and so on until so many signals have ended a call."""
    turn = 0
    while striker.struck < instants:
        turn += 1
        call(turn)
        assert turn < 50 * instants, "hardly any signal meets the calls"


@strikes(200)
def test_an_arena_loses_nothing(instants: int) -> None:
    """Leases that a signal takes from their holder in the middle come back; those that are held stay whole."""
    arena = Arena.map(16 * PAGE, "staging")
    leases = [arena.lease(2 * PAGE, "kept", at=place * PAGE) for place in (0, 7, 14)]
    for lease in leases:
        lease.view[:] = b"k" * lease.nbytes
    with striking(3) as striker:

        def use_some() -> None:
            leases = [arena.lease(size * PAGE, "some") for size in (1, 2, 1, 3)]
            for lease in leases:
                lease.view[:] = b"s" * lease.nbytes
            leases.pop(1).release()
            leases.append(arena.lease(2 * PAGE, "more"))
            for lease in leases:
                lease.release()

        def use(turn: int) -> None:
            striker.during(use_some, 6e-5)
            if not turn % 10:
                assert arena.by_kind == {"kept": 6 * PAGE}
                assert arena.used == 6 * PAGE
            holes = [arena.lease(5 * PAGE, "hole", alone=True) for _ in range(2)]
            assert {hole.offset for hole in holes} == {2 * PAGE, 9 * PAGE}

        until(striker, instants, use)
    assert all(bytes(lease.view) == b"k" * lease.nbytes for lease in leases)


@strikes(40)
def test_a_read_that_a_signal_ends_fills_no_memory_afterwards(swap: Swap, instants: int) -> None:
    swap.write(1)
    with striking(1) as striker:

        def read(turn: int) -> None:
            if striker.during(swap.read):
                swap.give_up()
                assert swap.look() == b"\1" * (PAGES * PAGE)
                assert bytes(swap.lease.view) == b"\xff" * (PAGES * PAGE)
            else:
                assert bytes(swap.lease.view) == b"\1" * (PAGES * PAGE)

        until(striker, instants, read)


@strikes(40)
def test_a_write_that_a_signal_ends_is_whole_or_told(swap: Swap, instants: int) -> None:
    swap.write(1)
    there = 1
    with striking(2) as striker:

        def write(turn: int) -> None:
            nonlocal there
            mark = 2 + turn % 200
            if not striker.during(lambda: swap.write(mark)):
                there = mark
                return
            swap.give_up()
            if (refused := refusal(swap.look)) is not None:
                assert len(swap.space.slabs) > 1, "one piece cannot be left out"
                assert "between two of its pieces" in str(refused)
                swap.write(mark)
                there = mark
            content = swap.look()
            assert set(content) in ({there}, {mark})
            assert len(content) == PAGES * PAGE
            there = content[0]

        until(striker, instants, write)


@strikes(20)
def test_a_file_whose_writing_a_signal_ends_is_given_up_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instants: int
) -> None:
    """No window is written after its file is closed, whose number may be another's by then."""
    monkeypatch.setattr(tensor_file, "WINDOW", 4 * PAGE)
    tensors, content = [TensorSpec("w", "U8", (64 * PAGE,))], bytes(64 * PAGE)
    with tensor_file.Output() as output, striking(4) as striker:

        def write(turn: int) -> None:
            path = tmp_path / str(turn)
            writers: list[TensorFileWriter] = []

            def save() -> None:
                writers.append(TensorFileWriter(path, tensors, output=output))
                writers[0].append(content)

            striker.during(save, 4e-3)
            for file in writers:
                file.abandon()
            assert (output.windows.used, output.aio.stats()[-1].write.in_flight if writers else 0) == (0, 0)
            path.unlink(missing_ok=True)

        until(striker, instants, write)


def test_what_a_signal_handler_raises_is_no_error_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="the user's own"), tensor_file.naming(tmp_path / "file"):
        raise TimeoutError("the user's own")
