"""How the ranks of one start join: the launcher's variables, torch's process group, and the ranks of each node."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tiering.errors import ConfigError, DistributedError, RankLostError
from tiering.storage import descriptors
from zero3.ranks import futures
from zero3.ranks.mesh import MeshPlace, Partition
from zero3.ranks.store import spell

PATIENCE = 5.0  # seconds beyond a time-out of torch that should have ended a call
GRACE = 60.0  # seconds by which torch's time-outs exceed the engine's, so that the engine's error comes first
POLL = 0.05  # seconds between two reads of the store
SOCKETS = 6
"""Sockets of one engine and of torch's group for each other rank: measured on rank 0, which has the store."""
OTHER_FILES = 1000  # descriptors for other files of a training process
# Parts of gloo's messages: its errors have no class of their own.
BROKEN = ("onnect", "got 0 bytes", "roken pipe")
FROM_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# The backends of a process group that the engine creates. The program may use the group too.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


@dataclass(frozen=True)
class World:
    """The number of this rank among all ranks, and among the ranks of its node, and its place in a mesh.

    Its state is divided among the ranks of ``partition``, of which it is number ``partition_rank``: all ranks, or those
    that hold the same part of the model.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    place: MeshPlace = field(default_factory=MeshPlace)
    all_ranks: Partition = field(init=False)
    partition: Partition = field(init=False)
    partition_rank: int = field(init=False)
    partition_size: int = field(init=False)

    def __post_init__(self) -> None:
        everybody = Partition(tuple(range(self.size)))
        own = (each for each in self.place.partitions if self.rank in each.ranks)
        partition = next(own) if self.place.partitions else everybody
        for name, value in (("all_ranks", everybody), ("partition", partition)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "partition_rank", partition.number_of(self.rank))
        object.__setattr__(self, "partition_size", partition.size)


ALONE = World()


def standing() -> tuple[int, int]:
    """(rank, world size) from torch.distributed, or from the launcher's variables if there is no process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join(device: torch.device, timeout: float, place: MeshPlace | None = None) -> World:
    """The ranks that train together. Joins them if a launcher has started several and there is no process group.

    ``timeout`` is in seconds. Without a ``place``, each rank is a data rank. Raises ConfigError if the launcher's
    variables contradict each other.
    """
    if standing()[1] == 1:
        return ALONE
    if not dist.is_initialized():
        meet(BACKENDS[device.type], timedelta(seconds=timeout + GRACE))
    rank, size = standing()
    make_room_for_sockets(size)  # also for a second engine
    local_rank, local_size = _on_this_node(rank, size)
    if not 0 <= local_rank < local_size <= size:
        raise ConfigError(
            f"LOCAL_RANK {local_rank} and LOCAL_WORLD_SIZE {local_size} do not fit a world of {size} ranks; start with"
            " torchrun, or set both as it does"
        )
    return World(rank, size, local_rank, local_size, place or MeshPlace(rank, size))


def meet(backend: str, timeout: timedelta, url: str = "env://", rank: int = -1, world_size: int = -1) -> None:
    """Create torch's process group of the ranks that join at ``url``, the URL of a store.

    With -1, ``rank`` and ``world_size`` come from the URL.

    Raises:
        ConfigError: a variable of the launcher is missing, or another process uses the port.
        RankLostError: a rank has ended after it joined.
        DistributedError: not all ranks joined within ``timeout``.
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
    """torch's rendezvous: the store, this rank and the number of ranks. Raises DistributedError after the time-out.

    A server that accepts connections and does not answer, such as another program, holds torch beyond its time-out.
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
    """A name that all ranks of this start have, and no ranks of another start.

    torchrun's store survives a restart, with all keys that ended ranks have written. Rank 0 chooses a random name.
    Each other rank answers with a random token of its own. When rank 0 has confirmed the token, the rank knows that
    the name is of this start.
    """
    token, until = uuid.uuid4().hex, time.monotonic() + timeout
    if rank == 0:
        name = token
        store.set("tiering start", name)
        missing = list(range(1, size))
        while missing:
            answered = [other for other in missing if store.check([f"{name} {other}"])]
            for other in answered:
                store.set(f"{name} {store.get(f'{name} {other}').decode()}", "")
            missing = [other for other in missing if other not in answered]
            _wait(until, missing, timeout)
        return name
    while True:
        if store.check(["tiering start"]):
            name = store.get("tiering start").decode()  # possibly of an earlier start
            store.set(f"{name} {rank}", token)
            if store.check([f"{name} {token}"]):
                return name
        _wait(until, [0], timeout)


def _wait(until: float, missing: Iterable[int], timeout: float) -> None:
    """Sleep until the next read of the store. Raises DistributedError if the time for ``missing`` ranks has passed."""
    missing = list(missing)
    if missing and time.monotonic() > until:
        raise DistributedError(
            f"not all ranks joined within {timeout:.0f} seconds: {spell(missing)} did not answer, and may have failed"
            " earlier, for example because a node lacks a library; see the output of these ranks"
        )
    if missing:
        time.sleep(POLL)


def _on_this_node(rank: int, size: int) -> tuple[int, int]:
    """The number of this rank on its node, and the number of ranks there: from the launcher, or by host names."""
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if all(name in os.environ for name in names):
        return int(os.environ[names[0]]), int(os.environ[names[1]])
    store = PrefixStore("tiering hosts", dist.distributed_c10d._get_default_store())
    store.set(str(rank), socket.gethostname())
    hosts = [store.get(str(other)).decode() for other in range(size)]
    local_ranks = [other for other in range(size) if hosts[other] == hosts[rank]]
    return local_ranks.index(rank), len(local_ranks)
