"""Two hosts, as two network namespaces joined by one cable, and the same with the cable cut in mid-training."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .pool import Pool
from .torchrun import Forked, Node, job, nodes, one_rank, trained
from .training import train

Ranks = Callable[[int], Pool]
STAGE_3 = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
ENDLESS = 10**6  # steps
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h
PORT = 29500  # of the first host, which has all of its ports to itself


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    link: str

    def within(self) -> list[str]:
        """A host has a name of its own, too: who shares a name may look for the other's processes."""
        named = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh"]

    def start(self, first: Host, work: dict[str, Any], *, agent: bool = True) -> Node:
        # Host names of a laboratory are in no name service: gloo is told which interface is the one to the others.
        environment = {"GLOO_SOCKET_IFNAME": self.link}
        if not agent:
            ranks = {"RANK": str(int(self is not first)), "LOCAL_RANK": "0"}
            sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
            meeting = {"MASTER_ADDR": first.address, "MASTER_PORT": str(PORT)}
            return Forked(partial(_in_host, self.name), work, **environment, **ranks, **sizes, **meeting)
        arguments = [
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={first.address}:{PORT}",
            f"--rdzv-conf=is_host={int(self is first)}",
            f"--local-addr={self.address}",
            "--rdzv-id=hosts",
        ]
        return Node(arguments, work, within=self.within(), **environment)

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", self.link, "down")


def _in_host(name: str, work: dict[str, Any]) -> None:
    """As ``Host.within`` does it, in a process that is there already."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as network:
        entered = libc.setns(network.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS)
    assert not entered, os.strerror(ctypes.get_errno())
    socket.sethostname(name)
    one_rank(work)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (Debian: package iproute2)")
    if os.geteuid() != 0:
        pytest.skip("root is needed for network namespaces")
    pair = tuple(Host(f"tier{os.getpid()}{end}", f"10.213.7.{end}", f"cable{end}") for end in (1, 2))
    with contextlib.ExitStack() as stack:
        for host in pair:
            try:
                ip("netns", "add", host.name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces are not possible here: {error.stderr.strip()}")
            stack.callback(ip, "netns", "del", host.name)  # and the cable's end with it
        first, second = pair
        ip(
            "link",
            "add",
            first.link,
            "netns",
            first.name,
            "type",
            "veth",
            "peer",
            second.link,
            "netns",
            second.name,
        )
        for host in pair:
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.link)
            ip("-n", host.name, "link", "set", host.link, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield first, second


@pytest.mark.parametrize(
    "agent", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["no agent", "agents"]
)
def test_two_hosts_train_as_two_ranks_of_one(
    ranks: Ranks, hosts: tuple[Host, Host], nvme: Path, tmp_path: Path, agent: bool
) -> None:
    work = job(tmp_path, **STAGE_3)
    with nodes(*(host.start(hosts[0], work, agent=agent) for host in hosts)) as started:
        for node in started:
            assert node.wait() == 0, node.log
    for run, expected in zip(trained(tmp_path), ranks(2).run(train, nvme, **STAGE_3), strict=True):
        assert run.differing(expected) == []


@pytest.mark.slow
def test_a_cut_cable_ends_both_sides_with_a_named_error(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    watchful = {"distributed": {"timeout": 60, "silence": 4}}
    work = job(tmp_path, steps=ENDLESS, **STAGE_3, **watchful)
    with nodes(*(host.start(hosts[0], work) for host in hosts)) as started:
        wait_for(started, tmp_path, lambda: all(steps(tmp_path, rank) >= 2 for rank in (0, 1)))
        hosts[1].cut()
        wait_for(started, tmp_path, lambda: all((tmp_path / f"error{rank}").exists() for rank in (0, 1)))
        for node in started:
            node.process.kill()  # an agent without its rendezvous takes minutes to give up
    first, second = ((tmp_path / f"error{rank}").read_text() for rank in (0, 1))
    assert first.startswith("RankLostError") and "rank 1" in first and hosts[1].name in first
    assert "[TIER-RANK" in second and ("rank 0" in second or hosts[0].address in second)


def steps(out: Path, rank: int) -> int:
    path = out / f"step{rank}"
    return int(path.read_text()) if path.exists() else 0


def wait_for(
    started: tuple[Node, ...], out: Path, condition: Callable[[], bool], seconds: float = 90
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        logs = "\n".join(node.log for node in started)
        assert time.monotonic() < deadline, f"{sorted(path.name for path in out.iterdir())}\n{logs}"
        time.sleep(0.05)
