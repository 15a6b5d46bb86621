"""What a context tells of itself: errors by errno, time at full depth, registration, and faults of one file only."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import Fault

BLOCK = 65536


def test_errors_are_counted_by_errno(open_context: Any, swap_file: Any, memory: Any) -> None:
    codes = [errno.EIO, errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EIO]
    context = open_context(
        *(Fault("write", first=n, error=code) for n, code in enumerate(codes, 1)),
        Fault("read", error=errno.ENXIO),
    )
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    for kind in ["write"] * 6 + ["read"] * 2:
        with suppress(SwapError):
            getattr(context, kind)(file, memory(4096), 0, 4096).wait()
    stats = context.stats()[file]
    assert stats.write.errors_by_errno == {errno.EIO: 3, errno.ENOSPC: 1, errno.EDQUOT: 1}
    assert (stats.write.errors, stats.write.ops) == (5, 1)
    assert (stats.read.errors_by_errno, stats.read.errors) == ({errno.ENXIO: 1}, 1)
    assert stats.flush.errors_by_errno == {}


def test_more_kinds_of_errors_than_places(open_context: Any, swap_file: Any, memory: Any) -> None:
    codes = [5, 28, 122, 12, 14, 22, 9, 27, 27, 6, 19]
    context = open_context(*(Fault("write", first=n, error=code) for n, code in enumerate(codes, 1)))
    file = context.add_file(swap_file(), direct=True, name="swap")
    for _ in codes:
        with pytest.raises(SwapError):
            context.write(file, memory(4096), 0, 4096).wait()
    write = context.stats()[file].write
    assert write.errors == sum(write.errors_by_errno.values()) == len(codes)
    assert write.errors_by_errno == {5: 1, 28: 1, 122: 1, 12: 1, 14: 1, 22: 1, 9: 1, 0: 4}


def test_time_at_full_depth_is_counted_per_file(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", count=0, delay=0.05, file=0), queue_depth=2)
    full = context.add_file(swap_file(), direct=True, name="full")
    free = context.add_file(swap_file(), direct=True, name="free")
    tickets = [context.write(full, memory(BLOCK), 0, BLOCK) for _ in range(6)]
    tickets.append(context.write(free, memory(BLOCK), 0, BLOCK))
    for ticket in tickets:
        ticket.wait()
    stats = context.stats()
    assert stats[full].queue_full_ns >= 80_000_000  # two turns of two waited for the one before, 0.05 s each
    assert stats[free].queue_full_ns == 0


def test_a_fault_may_be_of_one_file(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("any", count=0, error=errno.EIO, file=1))
    files = [context.add_file(swap_file(BLOCK), direct=True, name=str(index)) for index in range(3)]
    for _ in range(2):
        for index in files:
            for kind in (context.write, context.read):
                ticket = kind(index, memory(4096), 0, 4096)
                if index == 1:
                    with pytest.raises(SwapError, match="EIO"):
                        ticket.wait()
                else:
                    assert ticket.wait() == 4096
    assert [each.write.errors for each in context.stats()] == [0, 2, 0]


def test_one_slow_file_does_not_hold_up_another(open_context: Any, swap_file: Any, memory: Any) -> None:
    """Far more is queued on the slow one than the engine does at once; the other is served meanwhile."""
    context = open_context(Fault("write", count=0, delay=0.5, file=0), queue_depth=8)
    slow = context.add_file(swap_file(), direct=True, name="slow")
    fast = context.add_file(swap_file(), direct=True, name="fast")
    stuck = [context.write(slow, memory(BLOCK), i * BLOCK, BLOCK) for i in range(8)]
    quick = [context.write(fast, memory(BLOCK), i * BLOCK, BLOCK) for i in range(40)]
    assert [ticket.wait() for ticket in quick] == [BLOCK] * 40
    overtaken = not any(ticket.done() for ticket in stuck)
    for ticket in stuck:
        ticket.wait()
    if not overtaken:
        pytest.skip("this machine slept through the delay of half a second: nothing was overtaken")


# Registration


@pytest.mark.parametrize("registered", [True, False])
def test_registered_memory_and_all_around_it(
    engine: str, open_context: Any, swap_file: Any, memory: Any, registered: bool
) -> None:
    """Requests inside what is registered, outside, and across its edges move the same bytes."""
    context = open_context(registered=registered)
    whole = memory(10 * BLOCK)

    class Part:
        address, nbytes = whole.address + 2 * BLOCK, 4 * BLOCK + 4096

    took = context.register(Part())
    if not registered or engine != "io_uring":
        assert not took
    elif not took:
        pytest.skip(f"registration is refused here: {context.info.passed_over}")
    info = context.info
    assert info.registered_bytes == took == (Part.nbytes if took else 0)
    assert ("registered_buffers" in info.flags) == bool(took)
    file = context.add_file(swap_file(), direct=True, name="swap")
    content = os.urandom(10 * BLOCK)
    for start, nbytes in ((0, BLOCK), (2, 3 * BLOCK), (1, 2 * BLOCK), (5, 3 * BLOCK + 100), (0, 10 * BLOCK)):

        class Window:
            address, nbytes = whole.address + start * BLOCK, 10 * BLOCK - start * BLOCK

        whole.fill(content)
        context.write(file, Window(), 0, nbytes).wait()
        whole.fill(bytes(10 * BLOCK))
        context.read(file, Window(), 0, nbytes).wait()
        inside = content[start * BLOCK : start * BLOCK + nbytes]
        assert whole.bytes() == bytes(start * BLOCK) + inside + bytes(10 * BLOCK - start * BLOCK - nbytes)


def test_a_refused_registration_is_told_and_harmless(
    engine: str, open_context: Any, swap_file: Any, memory: Any
) -> None:
    if engine != "io_uring":
        pytest.skip(f"{engine} registers nothing")
    context = open_context(Fault("register", error=errno.ENOMEM))
    refused, accepted = memory(os.urandom(BLOCK)), memory(BLOCK)
    assert context.register(refused) == 0
    assert context.info.passed_over["registered_buffers"] == f"ENOMEM ({os.strerror(errno.ENOMEM)})"
    assert context.info.registered_bytes == 0
    file = context.add_file(swap_file(), direct=True, name="swap")
    context.register(accepted)
    context.write(file, refused, 0, BLOCK).wait()
    context.read(file, accepted, 0, BLOCK).wait()
    assert accepted.bytes() == refused.bytes()


@pytest.mark.parametrize("engine", ["io_uring"], indirect=True)
def test_more_buffers_than_a_tebibyte_has_gibibytes(open_context: Any, swap_file: Any, memory: Any) -> None:
    """An arena takes one per GiB. Here each is a page, registered from the last one on; each has its own content."""
    context, count = open_context(block_size=4096), 1500
    if "registered_buffers" in context.info.passed_over:
        pytest.skip(f"registered buffers: {context.info.passed_over['registered_buffers']}")
    content = os.urandom(4096 * count)
    whole = memory(content)
    pages = [SimpleNamespace(address=whole.address + at, nbytes=4096) for at in range(0, whole.nbytes, 4096)]
    assert all(context.register(page) for page in reversed(pages))
    assert context.info.registered_bytes == whole.nbytes
    file = context.add_file(swap_file(), direct=True, name="swap")
    for index in (count - 1, 0, 1023, 1024, 700):
        context.write(file, pages[index], 0, 4096).wait()
        back = memory(4096)
        context.read(file, back, 0, 4096).wait()
        assert back.bytes() == content[index * 4096 : (index + 1) * 4096]


def test_registered_memory_lives_until_close(open_context: Any, memory: Any) -> None:
    context = open_context()
    buffer = memory(BLOCK)
    alive = weakref.ref(buffer)
    context.register(buffer)
    del buffer
    gc.collect()
    assert alive() is not None
    context.close()
    gc.collect()
    assert alive() is None
