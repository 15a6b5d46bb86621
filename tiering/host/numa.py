"""Memory of NUMA nodes: from which nodes a mapping gets its pages, and on which they are. No torch.

A rank whose CPUs are on several nodes interleaves its memory over them: pages that one thread touches first would be on
that thread's node until it is full, and the kernels of all nodes would share the bandwidth of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

# From linux/mempolicy.h; weighted interleave is in Linux 6.9.
MPOL_PREFERRED, MPOL_INTERLEAVE, MPOL_WEIGHTED_INTERLEAVE = 1, 3, 6
MADV_POPULATE_WRITE = 23  # linux/mman.h; Python has no name for it
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_SYS_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
_MASK_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
_PAGE = 4096
_SAMPLES = 4096
BLOCK = 2 << 20
"""Bytes that a thread touches before the next block, which another thread touches: a transparent huge page."""
NUMA_MAPS = Path("/proc/self/numa_maps")


class Node(NamedTuple):
    """A NUMA node, and the CPUs of it that this process may use."""

    number: int
    cpus: tuple[int, ...]


def populate(name: str, memory: memoryview, address: int, nodes: Sequence[Node] = ()) -> int:
    """Fault in the pages of a new mapping from ``nodes``, or from any; returns 0, or the errno of the kernel's refusal.

    One node is preferred while it has free memory; several are interleaved. A container may deny such a policy. But
    the kernel also takes a page from the node of the CPU that touches it first: a thread for each node, bound to its
    CPUs, touches every n-th block, which distributes the pages in the same way, and is faster. ``name`` is for the log.
    """
    if nodes:
        _set_policy(name, address, len(memory), nodes)
    if len(nodes) < 2:
        code = _bound(nodes[0], memory, address) if nodes else touch(memory, address)
    else:
        code = _touch_in_turns(memory, address, nodes)
    if len(nodes) > 1 and not code:
        log.info("%s arena: %s", name, describe(pages(address, len(memory))))
    return code


def _set_policy(name: str, address: int, nbytes: int, nodes: Sequence[Node]) -> None:
    numbers = [node.number for node in nodes]
    listed = f"NUMA {'node' if len(nodes) == 1 else 'nodes'} {', '.join(map(str, numbers))}"
    code = prefer(address, nbytes, numbers)
    if not code:
        log.debug("%s arena: pages come from %s", name, listed)
        return
    log.info(
        "%s arena: mbind is denied (%s, %s); threads bound to %s touch the pages instead. A container needs the"
        " capability SYS_NICE for mbind (docker run --cap-add SYS_NICE)",
        name,
        errno.errorcode.get(code, code),
        os.strerror(code),
        listed,
    )


def prefer(address: int, nbytes: int, nodes: Sequence[int]) -> int:
    """Let the future pages of a mapping come from ``nodes``, in turn if there are several. Returns 0 or the errno.

    ``address`` is a multiple of the page size.
    """
    code = errno.ENOSYS
    # The weights of nodes are those of the system; a kernel that does not know them answers EINVAL.
    for mode in (MPOL_PREFERRED,) if len(nodes) == 1 else (MPOL_WEIGHTED_INTERLEAVE, MPOL_INTERLEAVE):
        code = _mbind(address, nbytes, mode, nodes)
        if code != errno.EINVAL:
            break
    return code


def _mbind(address: int, nbytes: int, mode: int, nodes: Sequence[int]) -> int:
    words = max(nodes) // _MASK_WORD + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // _MASK_WORD] |= 1 << (node % _MASK_WORD)
    # The kernel reads one bit less than `maxnode`.
    maxnode = ctypes.c_ulong(words * _MASK_WORD + 1)
    place = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    return _system_call(_SYS_MBIND, *place, ctypes.c_int(mode), mask, maxnode, ctypes.c_uint(0))


def _system_call(numbers: Mapping[str, int], *arguments: object) -> int:
    """0, or the errno."""
    number = numbers.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return ctypes.get_errno() if call(ctypes.c_long(number), *arguments) else 0


def touch(memory: memoryview, address: int) -> int:
    """Fault in the pages of ``memory``, which is at ``address``; returns 0 or the errno of the kernel's refusal.

    A GiB takes 0.05 s, and 0.5 s under a kernel before 5.14.
    """
    if not len(memory):
        return 0
    # Not mmap.madvise, which holds the GIL: other threads run meanwhile.
    libc = ctypes.CDLL(None, use_errno=True)
    advice = ctypes.c_int(MADV_POPULATE_WRITE)
    code = 0
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), advice):
        code = ctypes.get_errno()
    if code == errno.EINVAL:  # a kernel before 5.14
        memory[::_PAGE] = bytes(-(-len(memory) // _PAGE))
        return 0
    # Out of memory, for example: touching the pages would kill the process.
    return code


def _touch_in_turns(memory: memoryview, address: int, nodes: Sequence[Node]) -> int:
    stopped = threading.Event()

    def touch_every_nth(turn: int) -> int:
        """Blocks begin at multiples of BLOCK: no huge page is in two."""
        _bind(nodes[turn])
        first = address // BLOCK
        for block in range(first + turn, -(-(address + len(memory)) // BLOCK), len(nodes)):
            begin = max(block * BLOCK - address, 0)
            code = (
                0
                if stopped.is_set()
                else touch(memory[begin : (block + 1) * BLOCK - address], address + begin)
            )
            if code:
                stopped.set()
                return code
        return 0

    with ThreadPoolExecutor(len(nodes), "numa") as threads:
        try:
            return max(threads.map(touch_every_nth, range(len(nodes))))
        except BaseException:  # Ctrl-C; the executor waits for its threads
            stopped.set()
            raise


def _bound(node: Node, memory: memoryview, address: int) -> int:
    """Touch on the node's CPUs, in a thread of its own: the caller's affinity stays."""
    with ThreadPoolExecutor(1, "numa", _bind, (node,)) as thread:
        return thread.submit(touch, memory, address).result()


def _bind(node: Node) -> None:
    # Without it, the policy still holds, if there is one.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, node.cpus)


def pages(address: int, nbytes: int) -> Counter[int]:
    """The number of pages of a mapping on each node, of at most 4096 that are spread evenly.

    A container may deny that question (move_pages); then all pages of the mapping, by /proc. Empty if neither knows.
    """
    count = min(_SAMPLES, nbytes // _PAGE)
    if not count:
        return Counter()
    stride = nbytes // _PAGE // count * _PAGE
    places = (ctypes.c_void_p * count)(*range(address, address + count * stride, stride))
    on = (ctypes.c_int * count)()
    code = _system_call(
        _SYS_MOVE_PAGES, ctypes.c_int(0), ctypes.c_ulong(count), places, None, on, ctypes.c_int(0)
    )
    if code:
        return mapped_pages(NUMA_MAPS, address, nbytes)
    return Counter(node for node in on if node >= 0)


def mapped_pages(numa_maps: Path, address: int, nbytes: int) -> Counter[int]:
    """The number of pages on each node, in the mappings that begin in the range, by the kernel's numa_maps."""
    found: Counter[int] = Counter()
    try:
        lines = numa_maps.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        start, _, rest = line.partition(" ")
        if address <= int(start, 16) < address + nbytes:
            for node, count in re.findall(r" N(\d+)=(\d+)", rest):
                found[int(node)] += int(count)
    return found


def describe(on: Mapping[int, int]) -> str:
    """For example "pages on NUMA node 0: 50 %, node 1: 50 %"."""
    total = sum(on.values())
    if not total:
        return "pages on unknown NUMA nodes"
    return "pages on NUMA " + ", ".join(
        f"node {node}: {100 * count / total:.0f} %" for node, count in sorted(on.items())
    )
