"""The mapping of an arena: its pages, how long it stays, what forked children have of it, and what is locked."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiering.errors import ArenaError
from tiering.host import numa
from tiering.storage.arena import PAGE, Arena


@pytest.mark.parametrize("populates", [True, False], ids=["by the kernel", "by touch"])
def test_pages_are_touched_and_pinned_once(populates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not populates:
        # As a kernel before 5.14: no such advice.
        monkeypatch.setattr(numa, "MADV_POPULATE_WRITE", 0x7FFF)
    pinned: list[tuple[int, int]] = []
    arena = Arena.map(5 * PAGE + 1, "host", pin=lambda address, nbytes: pinned.append((address, nbytes)))
    assert pinned == [(arena.address, 6 * PAGE)]
    assert Arena.map(0, "host", pin=lambda *_: pytest.fail("nothing to pin")).capacity == 0
    resident = (ctypes.c_ubyte * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(arena.address), ctypes.c_size_t(6 * PAGE), resident) == 0
    assert [page & 1 for page in resident] == [1] * 6


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_memory_that_the_system_does_not_give_is_refused(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To touch it page by page, as under an old kernel, would end the process."""
    monkeypatch.setattr(numa, "touch", lambda memory, address: code)
    with pytest.raises(ArenaError) as caught:
        Arena.map(5 * PAGE, "host")
    assert str(caught.value) == (
        f"[TIER-ARENA] the host arena needs {5 * PAGE} bytes of memory, which the system does not give:"
        f" {errno.errorcode[code]}, {os.strerror(code)}; lower the host budget"
    )


def mapped_at(address: int) -> bool:
    """Whether ``address`` is part of a mapping of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(edge, 16) for edge in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


def test_memory_goes_when_the_last_view_goes() -> None:
    arena = Arena.map(64 << 20, "host")
    address, view = arena.address, arena.lease(PAGE, "state").view
    view[:4] = b"kept"
    del arena
    gc.collect()
    assert mapped_at(address)
    assert bytes(view[:4]) == b"kept"
    del view
    gc.collect()
    assert not mapped_at(address)


FORKED = """
import ctypes, os, sys
from tiering.storage.arena import Arena
arena = Arena.map(1 << 20, "host")
lease = arena.lease(4096, "state")
lease.view[:] = b"x" * 4096
child = os.fork()
if child == 0:
    if sys.argv[1] == "touches":
        ctypes.string_at(lease.address, 1)
    os._exit(0)
status = os.waitpid(child, 0)[1]
assert bytes(lease.view) == b"x" * 4096
lease.release()
assert arena.lease(1 << 20, "state").nbytes == 1 << 20
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(("child", "status"), [("touches", -signal.SIGSEGV), ("does not touch", 0)])
def test_a_forked_child_does_not_have_it(child: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, child], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{int(status)}\n", "")


FREED = """
import mmap, os
from tiering.storage.arena import Arena
arena = Arena.map(1 << 20, "host")
address, nbytes = arena.address, arena.capacity
child = os.fork()
if child == 0:
    own = [mmap.mmap(-1, nbytes) for _ in range(64)]  # one of them would fill the hole, were there one
    mappings = [line.split()[:2] for line in open("/proc/self/maps") if line.startswith(f"{address:x}-")]
    del arena
    for mapping in own:
        mapping[:] = bytes([1]) * nbytes
    free = not any(line.startswith(f"{address:x}-") for line in open("/proc/self/maps"))
    os._exit(0 if mappings == [[f"{address:x}-{address + nbytes:x}", "---p"]] and free else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
del arena
child = os.fork()
if child == 0:
    os._exit(any(line.startswith(f"{address:x}-") for line in open("/proc/self/maps")))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_that_frees_it_frees_nothing_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n0\n", "")


def test_an_arena_is_locked_into_memory_where_the_limits_allow() -> None:
    def locked() -> int:
        (line,) = [
            row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmLck")
        ]
        return int(line.split()[1]) * 1024

    probe = Arena.map(PAGE, "probe")
    if locked() == 0:
        pytest.skip("not even a page can be locked here (RLIMIT_MEMLOCK)")
    before = locked()
    arena = Arena.map(16 * PAGE, "host")
    assert locked() - before == arena.capacity
    assert probe.capacity == PAGE
