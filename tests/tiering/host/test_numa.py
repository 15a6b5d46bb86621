"""From which NUMA nodes an arena gets its pages, and on which they are: asked of this kernel, and of simulated ones."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tiering.host import numa
from tiering.host.numa import BLOCK, MPOL_INTERLEAVE, MPOL_PREFERRED, MPOL_WEIGHTED_INTERLEAVE, Node
from tiering.host.topology import Machine
from tiering.storage.arena import Arena

CPU = min(os.sched_getaffinity(0))
HERE = Machine.read().node(CPU)
EVERY = tuple(sorted(os.sched_getaffinity(0)))
# As `numa=fake=2` numbers them; one of them does not exist on most machines that run this test.
FAKE = (Node(0, EVERY), Node(1, (CPU,)))
# Of a machine booted with numa=fake=2: an interleaved arena, one behind it, and a file.
FAKE_MAPS = """\
7f0000000000 interleave:0-1 anon=1024 dirty=1024 active=0 N0=512 N1=512 kernelpagesize_kB=4
7f0000400000 weighted interleave:0-1 anon=8 dirty=8 N0=2 N1=6 kernelpagesize_kB=4
7f0000408000 default anon=16 dirty=16 N1=16 kernelpagesize_kB=4
7f0000418000 default file=/usr/lib/libc.so.6 mapped=9 N0=9 kernelpagesize_kB=4
"""


@pytest.fixture
def infos(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "tiering.host.numa")
    return caplog


def arena_on(*nodes: Node) -> Arena:
    return Arena.map(4 * BLOCK + 5 * mmap.PAGESIZE, "host", nodes=nodes)


def policy_on(*nodes: Node) -> str:
    """The policy of an arena on ``nodes``, as this kernel knows it."""
    probe, arena = Arena.map(mmap.PAGESIZE, "probe"), arena_on(*nodes)
    if not numa.NUMA_MAPS.exists():
        pytest.skip("this kernel has no NUMA support")
    if numa.prefer(probe.address, probe.capacity, [HERE]):
        pytest.skip("mbind is denied here")
    lines = (line.partition(" ") for line in numa.NUMA_MAPS.read_text().splitlines())
    return {start: rest for start, _, rest in lines}[f"{arena.address:x}"]


def test_an_arena_prefers_its_node() -> None:
    assert policy_on(Node(HERE, EVERY)).startswith((f"prefer:{HERE}", f"prefer=relative:{HERE}"))


def test_an_arena_of_several_nodes_is_interleaved() -> None:
    """Of the two nodes, the kernel takes those that exist."""
    assert f"interleave:{HERE}" in policy_on(*FAKE)


def test_the_pages_of_an_arena(monkeypatch: pytest.MonkeyPatch, infos: pytest.LogCaptureFixture) -> None:
    """Both questions are answered by this kernel: move_pages, and numa_maps where that is denied."""
    arena = arena_on(*FAKE)
    count = arena.capacity // mmap.PAGESIZE
    on = numa.pages(arena.address, arena.capacity)
    if not on:
        pytest.skip("this kernel lists no NUMA nodes")
    assert sum(on.values()) == count and set(on) <= set(Machine.read().node_of.values())
    assert infos.messages[-1] == f"host arena: {numa.describe(on)}"
    monkeypatch.setattr(numa, "_system_call", lambda *_: errno.EPERM)
    assert numa.pages(arena.address, arena.capacity) == on


def test_pages_in_the_documents_of_a_machine_with_fake_nodes(tmp_path: Path) -> None:
    maps = tmp_path / "numa_maps"
    maps.write_text(FAKE_MAPS)
    on = numa.mapped_pages(maps, 0x7F0000000000, 0x408000)
    assert on == Counter({0: 514, 1: 518})
    assert numa.describe(on) == "pages on NUMA node 0: 50 %, node 1: 50 %"
    assert numa.describe(numa.mapped_pages(maps, 0x7F0000408000, 1 << 16)) == "pages on NUMA node 1: 100 %"
    assert numa.describe(numa.mapped_pages(tmp_path / "none", 0, 1 << 48)) == "pages on unknown NUMA nodes"


@pytest.mark.parametrize(
    ("nodes", "known", "modes"),
    [
        ([1], {MPOL_PREFERRED}, [MPOL_PREFERRED]),
        ([0, 70], {MPOL_INTERLEAVE, MPOL_WEIGHTED_INTERLEAVE}, [MPOL_WEIGHTED_INTERLEAVE]),
        ([0, 70], {MPOL_INTERLEAVE}, [MPOL_WEIGHTED_INTERLEAVE, MPOL_INTERLEAVE]),
    ],
)
def test_the_policy_that_the_kernel_knows(
    nodes: list[int], known: set[int], modes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def call(_numbers: object, _address: object, _nbytes: object, mode: Any, mask: Any, *_: object) -> int:
        asked.append((mode.value, sum(word << 64 * i for i, word in enumerate(mask))))
        return 0 if mode.value in known else errno.EINVAL

    monkeypatch.setattr(numa, "_system_call", call)
    assert numa.prefer(1 << 20, 1 << 20, nodes) == 0
    assert asked == [(mode, sum(1 << node for node in nodes)) for mode in modes]


def test_where_mbind_is_denied_bound_threads_touch_the_pages_in_turn(
    monkeypatch: pytest.MonkeyPatch, infos: pytest.LogCaptureFixture
) -> None:
    touched: list[tuple[str, set[int], int, int]] = []
    plain, before = numa.touch, os.sched_getaffinity(0)
    begun: set[str] = set()
    both_at_work = threading.Barrier(2, timeout=10)

    def touch(memory: memoryview, address: int) -> int:
        name, cpus = threading.current_thread().name, os.sched_getaffinity(0)
        if name not in begun:
            begun.add(name)
            both_at_work.wait()
        touched.append((name, cpus, address, address + len(memory)))
        return plain(memory, address)

    monkeypatch.setattr(numa, "touch", touch)
    monkeypatch.setattr(numa, "_mbind", lambda *_: errno.EPERM)
    arena = arena_on(*FAKE)
    assert "mbind is denied (EPERM, Operation not permitted); threads bound to NUMA nodes 0, 1" in infos.text
    assert "--cap-add SYS_NICE" in infos.text and infos.records[0].levelname == "INFO"
    # The blocks cover the arena, once, and every second one was touched on the CPUs of the same node.
    ranges = sorted((begin, end, cpus) for _, cpus, begin, end in touched)
    edges = [begin for begin, _, _ in ranges]
    assert edges[0] == arena.address and edges[1:] == [end for _, end, _ in ranges[:-1]]
    assert ranges[-1][1] == arena.address + arena.capacity
    assert all(edge % BLOCK == 0 for edge in edges[1:])
    assert [cpus for *_, cpus in ranges] == [set(FAKE[i % 2].cpus) for i in range(len(ranges))]
    assert len({name for name, *_ in touched}) == 2
    assert os.sched_getaffinity(0) == before
    touched.clear()
    arena_on(Node(0, (CPU,)))
    assert [cpus for _, cpus, _, _ in touched] == [{CPU}] and os.sched_getaffinity(0) == before


def test_memory_that_is_short_on_one_node_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def touch(memory: memoryview, address: int) -> int:
        calls.append(address)
        return errno.ENOMEM

    monkeypatch.setattr(numa, "touch", touch)
    with mmap.mmap(-1, 64 * BLOCK) as mapping:
        memory = memoryview(mapping)
        assert numa.populate("host", memory, BLOCK, FAKE) == errno.ENOMEM
        memory.release()
    assert len(calls) <= 2


def test_a_node_that_is_not_there_is_no_error() -> None:
    arena = Arena.map(1 << 20, "host", nodes=[Node(700, (CPU,))])
    assert arena.capacity == 1 << 20
    assert numa.prefer(arena.address, arena.capacity, [700]) != 0
