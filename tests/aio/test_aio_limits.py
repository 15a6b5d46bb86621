"""What a machine may refuse: io_uring, libaio, locked memory, space. An engine falls back, or says so."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import AioContext

RunChild = Callable[..., str]
MIB = 1 << 20

PRELUDE = """
import errno, json, os, resource, sys
from child import Memory, deny, exhaust_aio, skip
from tiering.storage.aio import AioContext
from tiering.errors import SwapError

def refusal(engine):
    try:
        AioContext(engine=engine).close()
    except SwapError as error:
        return error.errno, str(error)

def moves(context, fd, nbytes=300000):
    "Whether what is written is read back."
    out, back = Memory(nbytes), Memory(nbytes)
    out.view[:] = os.urandom(nbytes)
    file = context.add_file(fd, direct=True, name="swap")
    write = context.write(file, out, 4096, nbytes)
    return context.read(file, back, 4096, nbytes, after=[write]).wait() == nbytes and back.view[:] == out.view[:]

fd = os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE | os.O_DIRECT)
for engine in ("io_uring", "libaio"):
    if engine in sys.argv[2:] and refusal(engine):
        skip(f"{engine} cannot start here anyway: {refusal(engine)[1]}")
"""

DENIED = (
    PRELUDE
    + """
deny(**json.loads(sys.argv[3]))
with AioContext() as context:
    print(json.dumps([context.engine, context.info.passed_over, moves(context, fd)]))
"""
)


@pytest.mark.parametrize(
    ("denied", "engine", "passed_over"),
    [
        ({"io_uring_setup": errno.EPERM}, "libaio", {"io_uring": "EPERM (Operation not permitted)"}),
        ({"io_uring_setup": errno.ENOSYS}, "libaio", {"io_uring": "ENOSYS (Function not implemented)"}),
        ({"io_uring_enter": errno.EPERM}, "libaio", {"io_uring": "EPERM (Operation not permitted)"}),
        (
            {"io_uring_setup": errno.EPERM, "io_setup": errno.ENOSYS},
            "threads",
            {"io_uring": "EPERM (Operation not permitted)", "libaio": "ENOSYS (Function not implemented)"},
        ),
    ],
    ids=["EPERM", "ENOSYS", "made but not entered", "libaio too"],
)
def test_auto_takes_the_next_engine_and_says_why(
    run_child: RunChild, tmp_path: Path, denied: dict[str, int], engine: str, passed_over: dict[str, str]
) -> None:
    answer = json.loads(run_child(DENIED, tmp_path, "libaio", json.dumps(denied)))
    assert answer == [engine, passed_over, True]


NAMED = (
    PRELUDE
    + """
deny(**json.loads(sys.argv[3]))
print(json.dumps(refusal(sys.argv[2])))
"""
)


@pytest.mark.parametrize(
    ("engine_name", "call", "code"),
    [
        ("io_uring", "io_uring_setup", errno.EPERM),
        ("io_uring", "io_uring_setup", errno.ENOSYS),
        ("io_uring", "io_uring_setup", errno.ENOMEM),
        ("libaio", "io_setup", errno.ENOSYS),
    ],
)
def test_a_named_engine_that_is_denied_is_an_error(
    run_child: RunChild, tmp_path: Path, engine_name: str, call: str, code: int
) -> None:
    result, message = json.loads(run_child(NAMED, tmp_path, engine_name, json.dumps({call: code})))
    assert result == code
    assert f"'{engine_name}' cannot start" in message
    assert f"{errno.errorcode[code]} ({os.strerror(code)})" in message
    assert "'threads' works everywhere" in message


EXHAUSTED = (
    PRELUDE
    + """
deny(io_uring_setup=errno.EPERM)
exhaust_aio()
named = refusal("libaio")
with AioContext() as context:
    print(json.dumps([named, context.engine, context.info.passed_over["libaio"], moves(context, fd)]))
"""
)


def test_libaio_without_room_under_aio_max_nr(run_child: RunChild, tmp_path: Path) -> None:
    """For real: the child holds all that fs.aio-max-nr allows, for the moment that it lives."""
    limit = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    if limit > 1 << 20:
        pytest.skip(f"fs.aio-max-nr is {limit}: using it up would take gigabytes of kernel memory")
    named, engine, why, moved = json.loads(run_child(EXHAUSTED, tmp_path, "libaio"))
    assert named[0] == errno.EAGAIN
    assert "EAGAIN" in named[1] and "fs.aio-max-nr is used up" in named[1]
    assert (engine, moved) == ("threads", True)
    assert why.startswith("EAGAIN")


DENIED_LATER = (
    PRELUDE
    + """
with AioContext(engine="io_uring", block_size=65536) as context:
    file = context.add_file(fd, direct=True, name="swap")
    out = Memory(1 << 20)
    context.write(file, out, 0, 1 << 20).wait()
    deny(io_uring_enter=errno.EPERM)
    tickets = [context.write(file, out, 0, 1 << 20) for _ in range(3)]
    tickets += [context.read(file, out, 0, 100)]
    answers = []
    for ticket in tickets:
        try:
            answers.append(ticket.wait(20))
        except SwapError as error:
            answers.append(-error.errno)
print(json.dumps(answers))
"""
)


def test_a_filter_that_comes_later_ends_transfers_with_an_error(run_child: RunChild, tmp_path: Path) -> None:
    assert json.loads(run_child(DENIED_LATER, tmp_path, "io_uring")) == [-errno.EPERM] * 4


UNLOCKED = (
    PRELUDE
    + """
limit, size = int(sys.argv[3]), int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
if os.geteuid() == 0:
    # CAP_IPC_LOCK, which ignores the limit, is gone, and no other process has locked memory as this user.
    os.setresuid(65533, 65533, 65533)
with AioContext(engine="io_uring") as context:
    file = context.add_file(fd, direct=True, name="swap")
    out, back = Memory(size), Memory(size)
    took = [context.register(out), context.register(back)]
    out.view[:] = os.urandom(size)
    context.write(file, out, 0, size).wait()
    context.read(file, back, 0, size).wait()
    info = context.info
    why = info.passed_over.get("registered_buffers")
    flagged = "registered_buffers" in info.flags
    print(json.dumps([took, why, flagged, info.registered_bytes, back.view[:] == out.view[:]]))
"""
)


def test_memory_that_may_not_be_locked_is_transferred_unregistered(
    run_child: RunChild, tmp_path: Path
) -> None:
    limit = 512 << 10  # enough for the ring itself
    took, why, flagged, registered, right = json.loads(
        run_child(UNLOCKED, tmp_path, "io_uring", limit, 1 << 20)
    )
    assert took == [0, 0]
    assert why == f"ENOMEM ({os.strerror(errno.ENOMEM)})"
    assert (flagged, registered, right) == (False, 0, True)


@pytest.mark.skipif(
    os.geteuid() != 0, reason="root is needed: other processes of this user may have locked memory"
)
def test_as_much_memory_is_registered_as_may_be_locked(run_child: RunChild, tmp_path: Path) -> None:
    """The kernel refuses 15 MiB and 7 MiB, and accepts 3 MiB and then less, block by block."""
    took, why, flagged, registered, right = json.loads(
        run_child(UNLOCKED, tmp_path, "io_uring", 5 * MIB, 15 * MIB)
    )
    assert 4 * MIB <= took[0] <= 5 * MIB and took[0] + took[1] == registered
    assert why == f"ENOMEM ({os.strerror(errno.ENOMEM)})"
    assert (flagged, right) == (True, True)


MOVES_NOTHING = (
    PRELUDE
    + """
deny(pwrite64=0)
with AioContext(engine="threads") as context:
    file = context.add_file(fd, direct=True, name="swap")
    try:
        context.write(file, Memory(4096), 0, 4096).wait()
    except SwapError as error:
        print(error.errno, context.stats()[file].write.bytes)
"""
)


def test_a_write_that_moves_nothing_is_an_error(run_child: RunChild, tmp_path: Path) -> None:
    """The kernel is made to answer 0 to every pwrite: not done, and no error either."""
    assert run_child(MOVES_NOTHING, tmp_path).split() == [str(errno.EIO), "0"]


def test_a_full_disk(engine: str, small_disk: Callable[[int], Path], memory: Any) -> None:
    """A real one. The file is sparse, so that space runs out in the middle of a request of many blocks."""
    disk = small_disk(24 * MIB)
    filler = disk / "filler"
    filler.write_bytes(bytes(4 * MIB))
    fd = os.open(disk, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, 64 * MIB)
    content: list[bytes] = []
    try:
        with AioContext(engine=engine, block_size=65536, queue_depth=4) as context:
            file = context.add_file(fd, direct=True, name=str(disk))

            def write(pieces: int) -> None:
                for number in range(len(content), len(content) + pieces):
                    piece = memory(os.urandom(MIB))
                    context.write(file, piece, number * MIB, MIB, names=(f"layers.{number}.w",)).wait()
                    content.append(piece.bytes())

            def check() -> None:
                for index, expected in enumerate(content):
                    back = memory(MIB)
                    context.read(file, back, index * MIB, MIB).wait()
                    assert back.bytes() == expected, index

            with pytest.raises(SwapError) as caught:
                write(64)
            error, stopped = caught.value, len(content)
            assert 8 <= stopped < 24
            assert (error.errno, error.filename) == (errno.ENOSPC, str(disk))
            assert error.names == (f"layers.{stopped}.w",)
            assert stopped * MIB <= error.offset < (stopped + 1) * MIB
            assert error.offset % 4096 == 0
            assert "free space there or choose another directory" in str(error)
            check()
            filler.unlink()
            write(2)  # what could not be written before, by the same context
            check()
            assert context.stats()[file].write.errors >= 1
    finally:
        os.close(fd)


TOO_LARGE = (
    PRELUDE
    + """
from types import SimpleNamespace
memory = Memory(1 << 20)
with AioContext(engine=sys.argv[2]) as context:
    for nbytes in (2**64 - 1, 2**64 - 4096, 2**63, 2**63 - 1, 2**62):
        try:
            print(context.register(SimpleNamespace(address=memory.address, nbytes=nbytes)))
        except SwapError as error:
            print(error.errno == errno.EINVAL or error)
    print(moves(context, fd))
"""
)


def test_a_buffer_of_impossible_size_is_refused(run_child: RunChild, tmp_path: Path) -> None:
    answers = run_child(TOO_LARGE, tmp_path, "io_uring").split()
    assert set(answers[:-1]) <= {"0", "True"}
    assert answers[-1] == "True"
