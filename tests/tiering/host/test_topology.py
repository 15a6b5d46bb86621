"""Which CPUs and which NUMA node a rank gets: on machines made of files, and on this one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim_cpu import kernels
from tiering.host import topology
from tiering.host.numa import Node
from tiering.host.topology import (
    Limits,
    Machine,
    NodeShare,
    Place,
    format_cpus,
    gpu_node,
    parse_cpus,
    share_out,
)

GPU_ON_NODE_1 = "00000000:AF:00.0"


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of four cores with two threads each, numbered as Linux does, and a GPU at the second."""
    for node, cpus in (("node0", "0-3,8-11"), ("node1", "4-7,12-15")):
        directory = tmp_path / "devices/system/node" / node
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(cpus + "\n")
    (tmp_path / "devices/system/node/node2").mkdir()  # memory only
    (tmp_path / "devices/system/node/node2/cpulist").write_text("\n")
    for cpu in range(16):
        directory = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for pci, node in (("0000:3b:00.0", 0), ("0000:af:00.0", 1), ("0000:d8:00.0", -1)):
        directory = tmp_path / "bus/pci/devices" / pci
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{node}\n")
    return tmp_path


@pytest.fixture
def thread_count() -> Iterator[int]:
    kernels.set_thread_count(None)
    before = kernels.thread_count()
    yield before
    kernels.set_thread_count(None)
    kernels.set_default_thread_count(before)


def shares(sysfs: Path, *places: Place) -> list[tuple[str, int | None]]:
    """CPUs and node; of several nodes, the negative of their number."""
    return [
        (format_cpus(s.cpus), s.nodes[0].number if len(s.nodes) == 1 else -len(s.nodes) or None)
        for s in share_out(places, Machine.read(sysfs))
    ]


ALL = tuple(range(16))


def test_ranks_get_whole_cores_of_one_node(two_sockets: Path) -> None:
    assert shares(two_sockets, *[Place(ALL)] * 2) == [("0-3,8-11", 0), ("4-7,12-15", 1)]
    assert shares(two_sockets, *[Place(ALL)] * 4) == [
        ("0-1,8-9", 0),
        ("2-3,10-11", 0),
        ("4-5,12-13", 1),
        ("6-7,14-15", 1),
    ]
    assert shares(two_sockets, *[Place(ALL)] * 8)[5] == ("5,13", 1)


def test_a_share_over_two_nodes_has_memory_of_both(two_sockets: Path) -> None:
    assert shares(two_sockets, *[Place(ALL)] * 3) == [("0-1,8-9", 0), ("2-4,10-12", -2), ("5-7,13-15", 1)]


def test_a_rank_alone_has_memory_of_all_its_nodes(two_sockets: Path) -> None:
    share = share_out([Place(ALL)], Machine.read(two_sockets))[0]
    assert share.nodes == (Node(0, (0, 1, 2, 3, 8, 9, 10, 11)), Node(1, (4, 5, 6, 7, 12, 13, 14, 15)))
    assert share_out([Place((0, 1, 5))], Machine.read(two_sockets))[0].nodes == (
        Node(0, (0, 1)),
        Node(1, (5,)),
    )


def test_more_ranks_than_cores_share_hyper_threads_and_then_those(two_sockets: Path) -> None:
    sixteen = shares(two_sockets, *[Place(ALL)] * 16)
    assert sixteen[:3] == [("0", 0), ("8", 0), ("1", 0)]
    assert sorted(int(cpu) for cpu, _ in sixteen) == list(range(16))
    assert shares(two_sockets, *[Place((0, 1))] * 5) == [("0", 0), ("0", 0), ("0", 0), ("1", 0), ("1", 0)]


def test_the_mask_of_the_user_is_all_there_is(two_sockets: Path) -> None:
    assert shares(two_sockets, *[Place((2, 3, 4, 5))] * 2) == [("2-3", 0), ("4-5", 1)]
    # Of core 2 both threads are allowed, of core 3 one: the cut goes between cores.
    assert shares(two_sockets, *[Place((2, 3, 10))] * 2) == [("2,10", 0), ("3", 0)]


def test_masks_of_their_own_are_kept(two_sockets: Path) -> None:
    assert shares(two_sockets, Place((0, 8)), Place((4, 12))) == [("0,8", 0), ("4,12", 1)]
    first, second = (0, 1, 2, 3), (4, 5, 6, 7)  # a socket for every two ranks
    bound = [Place(first), Place(first), Place(second), Place(second)]
    assert shares(two_sockets, *bound) == [("0-1", 0), ("2-3", 0), ("4-5", 1), ("6-7", 1)]


def test_a_rank_is_near_its_gpu(two_sockets: Path) -> None:
    # The GPUs of ranks 0 and 1 are at the second socket, as on boards that count from there.
    places = [Place(ALL, 1), Place(ALL, 1), Place(ALL, 0), Place(ALL, 0)]
    assert shares(two_sockets, *places) == [
        ("4-5,12-13", 1),
        ("6-7,14-15", 1),
        ("0-1,8-9", 0),
        ("2-3,10-11", 0),
    ]
    # All GPUs at one socket: memory is there, and no core idles.
    assert shares(two_sockets, Place(ALL, 1), Place(ALL, 1)) == [("0-3,8-11", 1), ("4-7,12-15", 1)]
    # Bound to the socket without it: there the process belongs.
    assert shares(two_sockets, Place((0, 1), 1)) == [("0-1", 0)]


@pytest.mark.parametrize(
    ("pci", "node"),
    [
        ("0000:3b:00.0", 0),
        (GPU_ON_NODE_1, 1),
        ("AF:00.0", 1),
        ("0000:d8:00.0", None),
        ("0000:01:00.0", None),
        ("../../../etc", None),
        ("", None),
    ],
)
def test_the_node_of_a_gpu(two_sockets: Path, pci: str, node: int | None) -> None:
    assert gpu_node(pci, two_sockets) == node


def test_a_machine_that_tells_nothing_is_one_node_of_single_cores(tmp_path: Path) -> None:
    assert Machine.read(tmp_path).nodes == 1
    assert shares(tmp_path, *[Place((0, 1, 2, 3))] * 2) == [("0-1", None), ("2-3", None)]


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 40), min_size=1), st.none() | st.integers(0, 2)), min_size=1),
    st.dictionaries(st.integers(0, 40), st.integers(0, 2)),
    st.dictionaries(st.integers(0, 40), st.integers(0, 40)),
)
def test_shares_cover_each_mask_and_overlap_only_if_they_must(
    masks: list[tuple[set[int], int | None]], node_of: dict[int, int], core_of: dict[int, int]
) -> None:
    places = [Place(tuple(sorted(cpus)), node) for cpus, node in masks]
    given_out = share_out(places, Machine(node_of, core_of))
    for mask in {place.cpus for place in places}:
        parts = [share.cpus for share, place in zip(given_out, places, strict=True) if place.cpus == mask]
        assert all(parts)
        assert {cpu for part in parts for cpu in part} == set(mask)
        if len(parts) <= len(mask):
            assert sum(map(len, parts)) == len(mask)
        else:
            assert all(len(part) == 1 for part in parts)


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_are_the_kernels(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(sorted(cpus))) == sorted(cpus)
    assert parse_cpus("0-2,8\n") == [0, 1, 2, 8]
    assert format_cpus([0, 1, 2, 8]) == "0-2,8"


# --- what a rank does about it ----------------------------------------------------------------------------


def test_local_ranks_divide_the_threads(
    two_sockets: Path, thread_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
    share = topology.settle(1, 4, GPU_ON_NODE_1, sysfs=two_sockets)
    assert share == NodeShare((2, 3, 10, 11), 4, (Node(1, (4, 5, 6, 7, 12, 13, 14, 15)),))
    assert kernels.thread_count() == share.threads == 4
    assert topology.settle(1, 4, GPU_ON_NODE_1, sysfs=two_sockets) == share  # a second engine
    assert kernels.thread_count() == 4


def test_all_ranks_places_are_taken_into_account(
    two_sockets: Path, thread_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    shown = []

    def gather(mine: Place) -> list[Place]:
        shown.append(mine)
        return [Place((0, 1, 2, 3)), mine]

    assert topology.settle(1, 2, GPU_ON_NODE_1, gather=gather, sysfs=two_sockets) == NodeShare(
        (4, 5, 6, 7), 4, (Node(1, (4, 5, 6, 7)),)
    )
    assert shown == [Place((4, 5, 6, 7), 1)]
    assert kernels.thread_count() == 4
    with pytest.raises(ValueError, match="gather returned 1 places for 2 local ranks"):
        topology.settle(1, 2, gather=lambda mine: [mine], sysfs=two_sockets)


def test_a_rank_alone_on_its_node_changes_nothing(thread_count: int) -> None:
    kernels.set_thread_count(3)
    assert topology.settle(0, 1, "0000:3b:00.0") == NodeShare(
        tuple(sorted(os.sched_getaffinity(0))), len(os.sched_getaffinity(0))
    )
    assert kernels.thread_count() == 3


def test_a_thread_count_that_was_chosen_stays(
    two_sockets: Path, thread_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 is one for each hyper-thread, which is the default before an engine has set another one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
    for chosen in (7, 16):
        kernels.set_thread_count(chosen)
        assert topology.settle(0, 1, sysfs=two_sockets).threads == 8
        assert kernels.thread_count() == chosen
    kernels.set_thread_count(None)
    assert kernels.thread_count() == 8


def test_the_cpu_quota_bounds_the_threads_and_is_told(
    two_sockets: Path, thread_count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tiering.host.topology")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(ALL))
    monkeypatch.setattr(kernels, "cpu_quota", lambda: 5.5)
    assert topology.settle(0, 1, sysfs=two_sockets).threads == kernels.thread_count() == 5
    assert caplog.messages == [
        "local rank 0 of 1: 5 kernel threads (one per core, CPU quota 5.5), CPUs 0-15, NUMA node 0, NUMA node 1"
    ]
    assert topology.settle(1, 2, sysfs=two_sockets).threads == kernels.thread_count() == 2
    assert "2 kernel threads (CPU quota 2.75), CPUs 4-7,12-15, NUMA node 1" in caplog.text
    assert [s.threads for s in share_out([Place((0,))] * 8, Machine({}, {}), Limits(2.0))] == [1] * 8
    monkeypatch.setattr(kernels, "cpu_quota", lambda: 64.0)
    caplog.clear()
    assert topology.settle(0, 4, sysfs=two_sockets).threads == kernels.thread_count() == 4
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("cpus", "limits", "threads", "bounds"),
    [
        (range(16), Limits(), 8, ("one per core",)),
        (range(16), Limits(nvme=True), 8, ("one per core",)),  # few enough to have all
        ((0, 1, 2, 3, 8, 9, 10, 11), Limits(nvme=True), 8, ()),  # four cores: each hyper-thread counts
        (range(100, 164), Limits(), 64, ()),  # CPUs of which nothing is known are cores
        (range(100, 164), Limits(nvme=True), 63, ("one core for the I/O driver",)),
        (range(100, 164), Limits(9.5, nvme=True), 8, ("CPU quota 9.5", "one core for the I/O driver")),
        (range(100, 164), Limits(8.5, nvme=True), 8, ("CPU quota 8.5",)),
        ((0, 1), Limits(nvme=True), 2, ()),
        ((0, 1), Limits(0.25), 1, ("CPU quota 0.25",)),
    ],
)
def test_threads_of_many_cores(
    two_sockets: Path, cpus: range | tuple[int, ...], limits: Limits, threads: int, bounds: tuple[str, ...]
) -> None:
    share = share_out([Place(tuple(cpus))], Machine.read(two_sockets), limits)[0]
    assert (share.threads, share.bounds) == (threads, bounds)
