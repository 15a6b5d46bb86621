"""How the ranks of one start meet: what a launcher says of them, torch's process group, and who is on which node."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tiering.errors import ConfigError, DistributedError, RankLostError
from tiering.storage import descriptors
from zero3.ranks import futures
from zero3.ranks.store import spell

PATIENCE = 5.0  # seconds beyond a limit of torch's, which should have ended a call
GRACE = 60.0  # seconds by which torch's limits are longer than ours: our message comes first
POLL = 0.05  # seconds between two looks at the store
SOCKETS = 6
"""Sockets of one engine and of torch's group for each other rank: measured on rank 0, which has the store."""
OTHER_FILES = 1000  # descriptors for what else a training process opens
BROKEN = ("onnect", "got 0 bytes", "roken pipe")  # gloo's words, whose errors have no kind of their own
FROM_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Of a process group that the engine makes, which the program may use, too.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class World:
    """This rank among all, and among those of its node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


ALONE = World()


def standing() -> tuple[int, int]:
    """(rank, world size), as torch.distributed knows them, or else the launcher."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join(device: torch.device, timeout: float) -> World:
    """The ranks that train together; joins them if a launcher has started several and nobody has joined them yet.

    ``timeout`` in seconds. ConfigError if the launcher's variables contradict each other.
    """
    if standing()[1] == 1:
        return ALONE
    if not dist.is_initialized():
        meet(BACKENDS[device.type], timedelta(seconds=timeout + GRACE))
    rank, size = standing()
    make_room_for_sockets(size)  # also of a second engine's
    local_rank, local_size = _on_this_node(rank, size)
    if not 0 <= local_rank < local_size <= size:
        raise ConfigError(
            f"LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {local_size} do not fit a world of {size} ranks; start with"
            " torchrun, or set both as it does"
        )
    return World(rank, size, local_rank, local_size)


def meet(backend: str, timeout: timedelta, url: str = "env://", rank: int = -1, world_size: int = -1) -> None:
    """Make torch's process group of the ranks that meet at ``where``, the URL of a store; -1 is what the URL says.

    Raises:
        ConfigError: a variable of the launcher's is missing, or the port is another process's.
        RankLostError: a rank that has come is gone.
        DistributedError: not all ranks came within ``timeout``.
    """
    if url == "env://":
        _check_launcher(rank, world_size)
    make_room_for_sockets(world_size if world_size > 0 else standing()[1])
    try:
        store, rank, size = _store(url, rank, world_size, timeout)
        store = PrefixStore(_name_of_this_start(store, rank, size, timeout.total_seconds()), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in BROKEN):
            raise
        raise _reason(error, url, timeout.total_seconds()) from error


def _store(url: str, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, int, int]:
    """torch's rendezvous: the store, this rank and the number of them, or DistributedError.

    A server that accepts connections and says nothing, as another program may, keeps torch beyond its time-out.
    """
    meeting = futures.run_in_thread(
        lambda: next(rendezvous(url, rank, world_size, timeout=timeout)), "rendezvous"
    )
    try:
        store, rank, size = meeting.result(timeout.total_seconds() + PATIENCE)
    except TimeoutError as error:
        raise DistributedError(
            f"the process that listens at {_address(url)} has not answered within {timeout.total_seconds():.0f}"
            " seconds; another program may use this port: check that rank 0 has started, and that its MASTER_PORT is"
            " free"
        ) from error
    return store, rank, size


def _address(url: str) -> str:
    if url != "env://":
        return url
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def make_room_for_sockets(size: int) -> None:
    """Let this process have as many descriptors open as ``size`` ranks take: ConfigError where it may not."""
    needed = descriptors.in_use() + SOCKETS * size
    allowed = descriptors.allow(needed + OTHER_FILES)
    if allowed < needed:
        raise ConfigError(
            f"the connections of {size} ranks take about {needed} open files in each process, and this one may have"
            f" {allowed}: raise the hard limit (ulimit -Hn {needed + OTHER_FILES}, LimitNOFILE= of a systemd unit,"
            " --ulimit nofile= of docker)"
        )


def _check_launcher(rank: int, world_size: int) -> None:
    is_set = {"RANK": rank >= 0, "WORLD_SIZE": world_size > 0}
    missing = [name for name in FROM_LAUNCHER if name not in os.environ and not is_set.get(name, False)]
    if missing:
        raise ConfigError(
            f"this process is one of several ranks, but {', '.join(missing)} is not set in its environment: start with"
            " torchrun, which sets all of them, or set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a"
            " free port there, beside RANK and WORLD_SIZE"
        )


def _reason(error: RuntimeError, url: str, timeout: float) -> ConfigError | DistributedError:
    """Why ranks could not meet, in words that help."""
    words = str(error).partition("\n")[0]
    at = _address(url)
    if "EADDRINUSE" in words:
        return ConfigError(
            f"rank 0 cannot listen at {at}: the port is in use, perhaps by another job. Use another port for each job:"
            " torchrun --standalone finds a free one; otherwise set --master-port, --rdzv-endpoint, or MASTER_PORT on"
            " all ranks"
        )
    if isinstance(error, dist.DistStoreError):
        return DistributedError(
            f"not all ranks joined within {timeout:.0f} seconds: a rank has not started, or has failed earlier, for"
            " example because its node lacks a library; see the output of that rank"
        )
    if isinstance(error, dist.DistNetworkError) and "timed out" in words:
        return DistributedError(
            f"this rank could not reach rank 0 at {at} within {timeout:.0f} seconds ({words}): check that rank 0"
            " has started, that its host has this name on this node, and that no firewall blocks the port"
        )
    return RankLostError(
        f"a rank ended, or lost its connection, while the ranks were joining at {at} ({words}): see the output of the"
        " rank that ended first; if no rank ended, another job may use the same address and port"
    )


def _name_of_this_start(store: Store, rank: int, size: int, timeout: float) -> str:
    """A name that the ranks of one start have in common, and those of no other.

    torchrun's store outlives a restart, and with it all that ranks which have died since have written to it. Rank 0
    makes a name up; another rank knows that it is of this start when rank 0 has seen what that one has made up itself.
    """
    mine, until = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        store.set("tiering start", mine)
        missing = list(range(1, size))
        while missing:
            come = [other for other in missing if store.check([f"{mine} {other}"])]
            for other in come:
                store.set(f"{mine} {store.get(f'{mine} {other}').decode()}", "")
            missing = [other for other in missing if other not in come]
            _wait(until, missing, timeout)
        return mine
    while True:
        if store.check(["tiering start"]):
            name = store.get("tiering start").decode()  # perhaps an old one
            store.set(f"{name} {rank}", mine)
            if store.check([f"{name} {mine}"]):
                return name
        _wait(until, [0], timeout)


def _wait(until: float, missing: Iterable[int], timeout: float) -> None:
    """A moment, or DistributedError if the time for the ``missing`` ranks is over."""
    missing = list(missing)
    if missing and time.monotonic() > until:
        raise DistributedError(
            f"not all ranks joined within {timeout:.0f} seconds: {spell(missing)} did not answer, and may have failed"
            " earlier, for example because a node lacks a library; see the output of these ranks"
        )
    if missing:
        time.sleep(POLL)


def _on_this_node(rank: int, size: int) -> tuple[int, int]:
    """This rank among those of its node, and their number: as the launcher says, or by the names of hosts."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if all(name in os.environ for name in names):
        return int(os.environ[names[0]]), int(os.environ[names[1]])
    store = PrefixStore("tiering hosts", dist.distributed_c10d._get_default_store())
    store.set(str(rank), socket.gethostname())
    hosts = [store.get(str(other)).decode() for other in range(size)]
    local_ranks = [other for other in range(size) if hosts[other] == hosts[rank]]
    return local_ranks.index(rank), len(local_ranks)
