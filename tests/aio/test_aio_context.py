"""Life of a context and its tickets: threads, closing, dropping, forking, leaking nothing."""

from __future__ import annotations

import errno
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from tiering._aio import ffi, lib
from tiering.errors import ConfigError, EngineStateError, SwapError
from tiering.storage.aio import ENGINES, FEW_BEGUN, AioContext, Fault, FaultPlan
from tiering.storage.arena import lock_memory

BLOCK = 65536


def until(condition: Any, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(condition())


def test_the_engine_in_use_can_be_asked(engine: str) -> None:
    with AioContext(engine=engine) as context:
        assert context.engine == engine
    with AioContext() as context:
        assert context.engine in ENGINES[1:]


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "posix"},
        {"block_size": 0},
        {"block_size": 4097},
        {"block_size": 2 << 30},
        {"queue_depth": 0},
        {"queue_depth": 513},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    key = next(iter(options))
    with pytest.raises(ConfigError, match=rf"io\.{key} is .*choose"):
        AioContext(**options)


def test_eight_threads_submit_and_wait(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    file = context.add_file(swap_file(), direct=True, name="swap")
    rounds, nbytes = 20, 2 * BLOCK + 4096
    wrong: list[object] = []

    def work(rank: int) -> None:
        try:
            back = memory(nbytes)
            for i in range(rounds):
                content = bytes([16 * rank + i % 16]) * nbytes
                write = context.write(file, memory(content), rank * (4 * BLOCK), nbytes, priority=i % 3)
                if context.read(file, back, rank * (4 * BLOCK), nbytes, after=[write]).wait() != nbytes:
                    wrong.append((rank, i))
                if back.bytes() != content:
                    wrong.append((rank, i, "bytes"))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = context.stats()[file]
    assert stats.read.bytes == stats.write.bytes == 8 * rounds * nbytes


def test_thousands_at_once(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    file = context.add_file(swap_file(4096), direct=True, name="swap")
    buffer = memory(4096)
    tickets = [context.read(file, buffer, 0, 4096) for _ in range(5000)]
    assert [ticket.wait() for ticket in tickets] == [4096] * 5000
    assert context.stats()[file].read.ops == 5000


def test_every_waiter_gets_the_same_answer(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", delay=0.1), Fault("read", delay=0.1, error=errno.ENXIO))
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    for ticket, expected in (
        (context.write(file, memory(4096), 0, 4096), 4096),
        (context.read(file, memory(4096), 0, 4096), errno.ENXIO),
    ):
        answers: list[int | None] = []

        def ask(ticket: Any = ticket, answers: list[int | None] = answers) -> None:
            try:
                answers.append(ticket.wait())
            except SwapError as error:
                answers.append(error.errno)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ask()
        assert answers == [expected] * 9
        assert ticket.done()


def test_wait_gives_up_in_time(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", delay=0.4))
    file = context.add_file(swap_file(), direct=True, name="swap")
    ticket = context.write(file, memory(4096), 0, 4096)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="is not done after"):
            ticket.wait(timeout)
    assert not ticket.done()
    assert (ticket.wait(30), ticket.nbytes) == (4096, 4096)


def test_a_signal_is_heard_during_wait(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", delay=0.7))
    file = context.add_file(swap_file(), direct=True, name="swap")
    ticket = context.write(file, memory(4096), 0, 4096)

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError("alarm")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError, match="alarm"):
            ticket.wait()
        assert not ticket.done()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ticket.wait() == 4096


def test_counters_show_what_is_in_flight(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", count=0, delay=0.3), queue_depth=3)
    file = context.add_file(swap_file(), direct=True, name="swap")
    tickets = [context.write(file, memory(BLOCK), i * BLOCK, BLOCK) for i in range(5)]
    assert until(lambda: context.stats()[file].write.in_flight == 3)
    busy = context.stats()[file].write.busy_ns
    assert until(lambda: context.stats()[file].write.busy_ns > busy)
    for ticket in tickets:
        ticket.wait()
    write = context.stats()[file].write
    assert (write.in_flight, write.ops) == (0, 5)
    # Two turns at depth 3, each begun 0.3 s late: no clock can make it less.
    assert write.busy_ns >= 600_000_000
    assert sum(write.latency[28:]) == 5  # 0.27 s and more


def test_close_finishes_what_the_kernel_has_and_cancels_the_rest(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", delay=0.2, count=0), queue_depth=1)
    fd = swap_file(4 * BLOCK)
    file = context.add_file(fd, direct=True, name="swap")
    whole = context.write(file, memory(b"w" * BLOCK), 3 * BLOCK, BLOCK)
    begun = context.write(file, memory(b"b" * (3 * BLOCK)), 0, 3 * BLOCK)
    assert until(lambda: context.stats()[file].write.ops == 1 and context.stats()[file].write.in_flight == 1)
    queued = context.write(file, memory(BLOCK), 0, BLOCK)
    blocked = context.read(file, memory(BLOCK), 0, BLOCK, after=[begun])
    context.close()
    context.close()
    assert whole.wait() == BLOCK
    for ticket in (begun, queued, blocked):
        code, message = failure(ticket.wait)
        assert code == errno.ECANCELED
        assert "context was closed" in message
    # The block that the kernel had, and no other.
    assert Path(f"/proc/self/fd/{fd}").read_bytes() == b"b" * BLOCK + bytes(2 * BLOCK) + b"w" * BLOCK
    stats = context.stats()[file].write
    assert (stats.bytes, stats.in_flight, stats.errors) == (2 * BLOCK, 0, 0)
    with pytest.raises(EngineStateError, match="closed"):
        context.write(file, memory(BLOCK), 0, BLOCK)
    with pytest.raises(EngineStateError, match="closed"):
        context.flush(file)


def test_a_waiter_survives_close(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", delay=0.2))
    file = context.add_file(swap_file(), direct=True, name="swap")
    ticket = context.write(file, memory(4096), 0, 4096)
    answers: list[int] = []
    waiter = threading.Thread(target=lambda: answers.append(ticket.wait()))
    waiter.start()
    assert until(lambda: context.stats()[file].write.in_flight == 1)
    context.close()
    waiter.join()
    assert answers == [4096]


def test_buffers_outlive_dropped_tickets(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context(Fault("write", delay=0.2))
    file = context.add_file(swap_file(), direct=True, name="swap")
    buffer = memory(b"k" * BLOCK)
    alive = weakref.ref(buffer)
    context.write(file, buffer, 0, BLOCK)
    del buffer
    gc.collect()
    assert alive() is not None
    back = memory(BLOCK)
    assert until(lambda: context.stats()[file].write.ops == 1)
    for _ in range(FEW_BEGUN):
        context.read(file, back, 0, BLOCK).wait()
    assert back.bytes() == b"k" * BLOCK
    gc.collect()
    assert alive() is None  # and no longer


def test_a_collected_ticket_lets_its_buffer_go(open_context: Any, swap_file: Any, memory: Any) -> None:
    context = open_context()
    file = context.add_file(swap_file(), direct=True, name="swap")
    buffer = memory(4096)
    alive = weakref.ref(buffer)
    ticket = context.write(file, buffer, 0, 4096)
    ticket.wait()
    del buffer
    gc.collect()
    assert alive() is None
    assert ticket.wait() == 4096


def test_a_dropped_failure_is_raised_by_the_next_call(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", error=errno.EIO))
    file = context.add_file(swap_file(BLOCK), direct=True, name="swap")
    context.write(file, memory(4096), 0, 4096, names=("w",))
    raised = []

    def call() -> bool:
        try:
            context.read(file, memory(4096), 0, 4096).wait()
        except SwapError as error:
            raised.append(error)
        return bool(raised)

    assert until(call)
    assert (raised[0].errno, raised[0].names) == (errno.EIO, ("w",))
    assert context.read(file, memory(4096), 0, 4096).wait() == 4096  # told once


def test_a_failure_nobody_asked_for_is_raised_by_close(
    open_context: Any, swap_file: Any, memory: Any
) -> None:
    for keep in (True, False):
        context = open_context(Fault("write", error=errno.EIO))
        file = context.add_file(swap_file(), direct=True, name="swap")
        ticket = context.write(file, memory(4096), 0, 4096)
        if not keep:
            del ticket
        assert until(lambda: context.stats()[file].write.errors == 1)  # noqa: B023 (called at once)
        with pytest.raises(SwapError) as caught:
            context.close()
        assert caught.value.errno == errno.EIO
        context.close()


def test_close_does_not_hide_the_error_it_was_called_for(engine: str, swap_file: Any, memory: Any) -> None:
    plan = FaultPlan((Fault("write", error=errno.EIO),))
    with (  # noqa: PT012 (how the block ends is what this is about)
        pytest.raises(KeyError) as caught,
        AioContext(engine=engine, fault=plan) as context,
    ):
        file = context.add_file(swap_file(), direct=True, name="swap")
        context.write(file, memory(4096), 0, 4096)
        assert until(lambda: context.stats()[file].write.errors == 1)
        raise KeyError("first")
    assert any("While closing" in note for note in caught.value.__notes__)


def test_a_seen_failure_is_not_told_again(
    open_context: Any, swap_file: Any, memory: Any, failure: Any
) -> None:
    context = open_context(Fault("write", error=errno.EIO))
    file = context.add_file(swap_file(), direct=True, name="swap")
    write = context.write(file, memory(4096), 0, 4096)
    context.read(file, memory(4096), 0, 4096, after=[write])  # dropped, cancelled: its cause is told below
    assert failure(write.wait)[0] == errno.EIO
    del write
    context.close()


def test_dropping_the_context_warns_and_waits(engine: str, swap_file: Any, memory: Any) -> None:
    context = AioContext(engine=engine, fault=FaultPlan((Fault("write", delay=0.1),)))
    ticket = context.write(context.add_file(swap_file(), direct=True, name="swap"), memory(4096), 0, 4096)
    del ticket
    contexts = [context]
    del context
    with pytest.warns(ResourceWarning, match=r"without close\(\)"):
        contexts.clear()


def test_tickets_are_told_apart_in_c(engine: str, swap_file: Any, memory: Any) -> None:
    with AioContext(engine=engine) as context:
        file = context.add_file(swap_file(4096), direct=True, name="swap")
        handle, buffer, result = context._handle, memory(4096), ffi.new("aio_result *")
        address = ffi.cast("void *", buffer.address)

        def submit(*after: int) -> int:
            ticket = ffi.new("int64_t *")
            code: int = lib.aio_submit(
                handle, lib.AIO_READ, file, address, 0, 4096, 0, list(after), len(after), ticket
            )
            assert (code == 0) == (ticket[0] > 0)
            return code or int(ticket[0])

        first = submit()
        assert first > 0
        assert lib.aio_wait(handle, first, -1, result) == 0
        assert result.bytes == 4096
        assert lib.aio_wait(handle, first, 0, result) == 0  # looking does not take it away
        assert lib.aio_release(handle, first) == 0
        assert lib.aio_release(handle, first) == -errno.ESTALE
        assert lib.aio_wait(handle, first, 0, result) == -errno.ESTALE
        second = submit(first)
        assert second > first
        assert second & 0xFFFFF == first & 0xFFFFF  # the slot is used again, under another name
        assert lib.aio_wait(handle, first, -1, result) == -errno.ESTALE
        assert lib.aio_wait(handle, second, -1, result) == 0
        for never in (0, -1, 1, second + (1 << 20), first + 9999):
            assert lib.aio_wait(handle, never, 0, result) == -errno.EINVAL
            assert lib.aio_release(handle, never) == -errno.EINVAL
            assert submit(never) == -errno.EINVAL
        assert lib.aio_stats(handle, 1, ffi.new("aio_file_stats *")) == -errno.EINVAL
        assert lib.aio_release(handle, second) == 0


FORK = """
import ctypes, mmap, os, signal, sys, warnings
from types import SimpleNamespace
from tiering.storage.aio import FEW_BEGUN, ENGINES, AioContext, Fault, FaultPlan
from tiering.errors import EngineStateError
warnings.simplefilter("ignore", DeprecationWarning)  # newer interpreters dislike a fork beside threads
memory = mmap.mmap(-1, 4096)
buffer = SimpleNamespace(address=ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes=4096)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE | os.O_DIRECT)
context = AioContext(engine=sys.argv[2], fault=FaultPlan((Fault("write", delay=0.5),)))
file = context.add_file(fd, direct=True, name="swap")
ticket = context.write(file, buffer, 0, 4096)
before = len(os.listdir("/proc/self/fd"))
child = os.fork()
if child == 0:
    signal.alarm(20)  # a hang ends here, and shows in the exit status
    refused = 0
    for call in (lambda: context.read(file, buffer, 0, 4096), ticket.wait, ticket.done, context.stats,
                 lambda: context.latencies(file, "read"),
                 lambda: context.add_file(fd, direct=True, name="again")):
        try:
            call()
        except EngineStateError as error:
            refused += "did not survive the fork" in str(error)
    closed = before - len(os.listdir("/proc/self/fd"))  # by the fork itself: a child holds no swap space
    context.close()
    context.close()
    with AioContext(engine=sys.argv[2]) as fresh:  # the child may have its own
        done = fresh.write(fresh.add_file(fd, direct=True, name="swap"), buffer, 4096, 4096).wait()
    del ticket, context
    os._exit(0 if (refused, done) == (6, 4096) and closed == int(sys.argv[3]) else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, ticket.wait())
context.close()
"""


def test_a_forked_child_is_refused_and_does_not_hang(engine: str, swap_file: Any, tmp_path: Path) -> None:
    swap_file()
    own = {"io_uring": 2, "libaio": 1, "threads": 0}[engine]  # ring and eventfd
    command = [sys.executable, "-c", FORK, str(tmp_path), engine, str(own)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout.split()) == (0, ["0", "4096"]), ran.stdout + ran.stderr


def test_import_loads_no_torch() -> None:
    code = "import sys, tiering.storage.aio; print('torch' in sys.modules, 'numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stdout.split() == ["False", "False"], ran.stderr


def test_lock_memory(memory: Any) -> None:
    buffer = memory(1 << 20)
    refusal = lock_memory(buffer.address, buffer.nbytes)
    status = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(int(line.split()[1]) for line in status if line.startswith("VmLck"))
    assert (kibibytes >= 1024) == (refusal == 0)
    assert lock_memory(0x1000, 4096) == errno.ENOMEM  # nothing is mapped there
