"""What ranks send each other: torch.distributed, in one place; every byte is counted, and every wait watched.

    gathers     parameters: unsharded groups, updated replicas, values that somebody asked for
    reductions  gradients
    control     a few numbers on which all ranks have to agree, between CPUs

Each is a process group of its own: operations of one group must come in the same order on every rank, those of two may
not. Reductions have an order that all ranks know beforehand. That of gathers follows the modules that are called: those
that a rank did not foresee are agreed on before they begin (see peers.py), or it could receive another group's bytes.

Note [Collectives on a device]
    NCCL's operations are work of the device, in the order of its streams. Gathers and reductions have a stream each, of
    ours: NCCL runs what it is told without ``async_op`` on the stream that is current, and beside our events there is
    no other order to keep in mind. A gather waits for the copy of this rank's shard and not for the compute that goes
    on meanwhile, a reduction for the gradients that compute has collected; compute waits for what it needs of either.
    The CPU waits for nothing: what it has to know of other ranks it asks by way of ``control``, between CPUs.

    NCCL keeps no reference to what it was told of. Who begins a collective keeps its memory until its event.

    Two communicators, so that the gather of the next block does not queue behind a large reduction. Their kernels
    occupy the device until other ranks' have come, so each must find room beside the other's: ranks begin all of them
    in the same order, and NCCL is asked to start them in that (NCCL_LAUNCH_ORDER_IMPLICIT, NCCL 2.26).

Note [When a device waits for a rank that is gone]
    A kernel of NCCL that waits for a lost rank never ends, nor does a CPU that waits for anything behind it. So a
    thread watches over the other ranks (see peers.py) and aborts the communicators: their kernels end, with whatever
    bytes they had, the CPU goes on, and the next call of ours raises the error that names the rank. torch's own watch
    over NCCL remains. What it alone notices, as a broken network between ranks that are all alive, it ends the process
    for; where both notice, ours is meant to come first: torch's takes a minute.

Note [A reduction is an exchange and a sum]
    Each rank sends every other one the part of its gradient that this one owns, and sums up what it receives, in the
    order of ranks, in fp32, rounding once: (W-1)/W of the gradient leaves each rank, as in any reduce-scatter, and the
    result does not depend on topology or library. gloo's own reduce-scatter sends twice as much.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import pickle
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from tiering.config.training import DistributedConfig
from tiering.errors import ConfigError, DistributedError, RankOrderError
from zero3.device.streams import Event, Stream, Streams
from zero3.device.timeline import StallClock
from zero3.ranks.joining import GRACE, World
from zero3.ranks.peers import Peers
from zero3.ranks.process_groups import (
    Pending,
    ProcessGroups,
    all_gather,
    as_bytes,
    scatter_shards,
    waited_for,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

LARGE = 256 << 10  # bytes of a shard that is worth an operation for each rank
TITLE = 64  # bytes of a row that say what it is
EXPLAINING = 10  # steps after which an exception that the program has caught explains no error any more
FAREWELL = 10.0  # seconds in which other ranks may end what they still do with this one's memory
_engines = itertools.count()  # of this process; as many as of any other rank

TRANSPORTS = {"cpu": "gloo", "cuda": "nccl"}  # of parameters and gradients


@dataclass(frozen=True)
class Table:
    """A table that was begun. The transport reads ``row`` and writes ``rows`` until ``work`` has ended."""

    row: Tensor
    rows: Tensor
    nbytes: int  # of a row, behind its title
    dtype: torch.dtype
    what: str
    work: dist.Work


def check_apart(gpus: list[tuple[str, str]]) -> None:
    """ConfigError if two ranks have one GPU. ``gpus``: of each, its host and what tells it from others there."""
    for rank, gpu in enumerate(gpus):
        if (first := gpus.index(gpu)) < rank:
            raise ConfigError(
                f"ranks {first} and {rank} have the same GPU of host {gpu[0]}, and NCCL needs one for each: start as"
                " many ranks on a node as it has GPUs (torchrun --nproc-per-node), with a LOCAL_RANK of its own for"
                " each, or show each rank its own GPU (CUDA_VISIBLE_DEVICES)"
            )


class Collectives:
    """The process groups of one engine on ``device``. Every method is to be called by all ranks, in one order.

    ``streams`` are the device's, None if it is the CPU. ``sent`` counts the bytes that this rank has sent, by kind,
    ``calls`` the operations.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        config: DistributedConfig,
        stalls: StallClock,
        streams: Streams | None,
    ) -> None:
        self.world = world
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.spared = 0  # bytes that gathers of groups would have sent that were still there
        self._stalls = stalls
        self._streams = streams
        self._failure: DistributedError | None = None
        self._raised: BaseException | None = None  # by the last forward
        self._caught = ""  # by the program, of a forward: a remark for errors to come
        self._steps_since = 0
        self.row_nbytes = 64  # what a row of a table has room for
        # Threads of the peers' refer to them: so they know nothing of this object, which would never be given up.
        self._groups = ProcessGroups()
        name = f"engine {next(_engines)}"
        self.peers = Peers(
            PrefixStore(f"tiering {name}", dist.distributed_c10d._get_default_store()),
            world.rank,
            world.size,
            timeout=config.timeout,
            silence=config.silence,
            on_lost=None if self._streams is None else self._groups.abort,
            unended=partial(_unended, self._groups, self._streams),
            engine=name,
        )
        # An engine that nobody closes must not go on giving signs of life. At exit peers take their leave themselves.
        self._leave = weakref.finalize(self, _leave, self.peers, self._groups)
        self._leave.atexit = False
        try:
            self._connect(device, timedelta(seconds=config.timeout + GRACE))  # our own message comes first
        except BaseException as error:
            self.peers.fail(error)
            self._leave()
            raise

    def _connect(self, device: torch.device, timeout: timedelta) -> None:
        """Make the process groups, where ranks that are lost meanwhile are known to be, and see that all is well."""
        if device.type == "cuda":  # before NCCL looks; see Note [Collectives on a device]
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        transport = TRANSPORTS[device.type]
        self._groups.take("gather", self._new_group(timeout, transport))
        self._groups.take("reduction", self._new_group(timeout, transport))
        self._groups.take("control", self._new_group(timeout, "gloo"))
        self.peers.agree("initialize")
        if device.type == "cuda":
            gpu = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
            check_apart(self.say(gpu, "tell which GPU is whose"))
        if self._streams is not None:
            self._connect_devices(device)

    def _new_group(self, timeout: timedelta, backend: str) -> dist.ProcessGroup:
        make: Callable[[], dist.ProcessGroup] = partial(dist.new_group, timeout=timeout, backend=backend)
        if backend != "gloo":  # NCCL connects later
            return make()
        with self._failing():  # gloo waits for every rank, as long as the group may
            return self.peers.follow_call(make, "new_group")

    def announce(self, what: str, *, foreseen: bool) -> None:
        """The next gather is ``what``. Unless all ranks have ``foreseen`` that, they agree on it."""
        if foreseen:
            self.check()
            self.peers.issued(what, group="gather")
        else:
            self.agree(what)

    def gather(
        self, whole: Tensor, shard: Tensor, what: str, after: Iterable[Event] | None = None
    ) -> Pending:
        """Begin to fill the flat ``whole`` with the ``shard`` of each rank, in their order; it may be its place there.

        It was announced as ``what``. A device begins it when the events ``after`` have come, or, without them, when all
        is over that the current stream was told so far; ``ended`` is behind it.
        """
        self._count("all-gather", shard.nbytes * (self.world.size - 1))
        pending = Pending([], what, "gather")
        if self._streams is not None:
            collective = partial(all_gather, whole, shard, self._groups.of("gather"), async_op=False)
            return self._queue(pending, collective, self._streams.gather, after, whole.nbytes)
        direct = shard.nbytes >= LARGE
        pending.works = (
            scatter_shards(as_bytes(whole), as_bytes(shard), self._groups.of("gather"))
            if direct
            else [waited_for(all_gather(whole, shard, self._groups.of("gather")))]
        )
        return self._begun(pending, whole.nbytes)

    def spare(self, shard_nbytes: int) -> None:
        """A group was used again before its bytes were given up: nothing is sent."""
        self.spared += shard_nbytes * (self.world.size - 1)

    def exchange(self, received: Tensor, sent: Tensor, what: str) -> Pending:
        """Begin to send each rank its part of the flat ``sent``; ``received`` gets this rank's part from each.

        A device begins it when all is over that the current stream was told so far.
        """
        self.check()
        self._raised = None
        self._count("reduce", sent.nbytes // self.world.size * (self.world.size - 1))
        self.peers.issued(what, group="reduction")
        pending = Pending([], what, "reduction")
        exchange = partial(dist.all_to_all_single, received, sent, group=self._groups.of("reduction"))
        if self._streams is not None:
            pending.buffers = received, sent
            return self._queue(pending, exchange, self._streams.reduce, None, sent.nbytes)
        pending.works = [waited_for(exchange(async_op=True))]
        return self._begun(pending, sent.nbytes)

    def finish(self, pending: Pending, cause: str) -> None:
        """Wait for a collective; a device's current stream does. Errors name the rank that is the reason."""
        if pending.ended is not None:
            self.check()
            if not pending.ended.done():
                self._stalls.hold(pending.ended, cause)
            pending.buffers = ()  # whoever is told to use their memory anew, by the same stream, comes later
            return
        with self._stalls.waiting_for(cause):
            while pending.works:
                self._wait(pending.works[0], pending.what, pending.group)
                del pending.works[0]  # not before: what has failed may still write to its buffers

    def table(self, mine: Tensor, what: str) -> Tensor:
        """A row from each rank: ``mine`` is a flat CPU tensor, of one length and dtype everywhere.

        Rows say what they are, and all are of one size, for gloo ends a process that receives more than it expects.
        RankOrderError, on every rank, if ranks have come to different tables.
        """
        return self.finish_table(self.begin_table(mine, what))

    def begin_table(self, mine: Tensor, what: str) -> Table:
        """Send this rank's row, and wait for nobody. ``finish_table`` gives the rows of all ranks."""
        payload = as_bytes(mine)
        row = torch.zeros(TITLE + self.row_nbytes, dtype=torch.uint8, device="cpu")
        title = what.encode()[:TITLE]
        row[: len(title)] = torch.frombuffer(bytearray(title), dtype=torch.uint8)
        row[TITLE : TITLE + payload.numel()] = payload
        rows = torch.empty(self.world.size, row.numel(), dtype=torch.uint8, device="cpu")
        return Table(row, rows, payload.numel(), mine.dtype, what, self._begin_rows(rows, row, what))

    def finish_table(self, table: Table) -> Tensor:
        """Wait for a table that was begun. See ``table``."""
        self._finish_rows(table.work, table.what)
        titles = [bytes(each[:TITLE].tolist()).rstrip(b"\0").decode() for each in table.rows]
        if len(set(titles)) > 1:
            told = ", ".join(f"rank {rank} in {each!r}" for rank, each in enumerate(titles))
            self._failure = RankOrderError(
                f"ranks are at different points of the program: {told}. Call forward, backward and step equally often"
                f" on all ranks.{self.peers.remarks()}"
            )
            raise self._failure
        return table.rows[:, TITLE : TITLE + table.nbytes].contiguous().view(table.dtype)

    def broadcast(self, values: Tensor, source: int, what: str) -> None:
        """Make the flat ``values``, in host memory, those of rank ``source``, on all ranks."""
        if not values.numel():
            return
        receivers = self.world.size - 1
        self._count("broadcast", values.nbytes if self.world.rank == source and receivers else 0)
        self.peers.issued(what, group="control")
        work = dist.broadcast(as_bytes(values), source, group=self._groups.of("control"), async_op=True)
        self._wait(work, what, "control")

    def of_node(self, mine: T) -> list[T]:
        """What each rank of this node says, in their order there: objects that can be pickled."""
        of_all = self.say((socket.gethostname(), self.world.local_rank, mine), "find the ranks of this node")
        here = of_all[self.world.rank][0]
        found = sorted((place, said) for host, place, said in of_all if host == here)
        return [said for _, said in found[: self.world.local_size]]

    def say(self, mine: T, what: str) -> list[T]:
        """What each rank says when it comes to ``what``, in their order: objects that can be pickled."""
        words = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
        lengths = [int(row[0]) for row in self.table(torch.tensor([words.numel()], device="cpu"), what)]
        row = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        row[: words.numel()] = words
        rows = torch.empty(self.world.size, row.numel(), dtype=torch.uint8, device="cpu")
        self._gather_rows(rows, row, what)
        told = [theirs[:length].numpy().tobytes() for theirs, length in zip(rows, lengths, strict=True)]
        return [pickle.loads(theirs) for theirs in told]  # noqa: S301 # from ranks of this run

    def agree(self, what: str) -> None:
        """All ranks are about to do ``what``, which nobody has foreseen; an error on every rank if one is not."""
        self.check()
        with self._stalls.waiting_for("agreement"), self._failing():
            self.peers.agree(what, group="gather")

    def check(self) -> None:
        """DistributedError if one has ended this engine, here or on another rank."""
        if self._failure is not None:
            raise self._failure
        with self._failing():
            self.peers.check()

    def ended(self, phase: str, error: BaseException) -> None:
        """``phase`` was ended by ``error`` on this rank: tell the others.

        After a forward the program may go on; a backward or a step that not all ranks have ended ends the engine.
        """
        if phase == "forward":
            self._raised = error
            self._caught, self._steps_since = f"a forward that raised {type(error).__name__}: {error}", 0
            self.peers.remark(self._caught)
        else:
            self.peers.fail(error)

    def in_step(self) -> None:
        """All ranks have ended the same step: the longer ago an exception is, the less it explains."""
        if self._caught:
            self._steps_since += 1
            self._caught = self._caught if self._steps_since < EXPLAINING else ""
            self.peers.remark(self._caught and f"{self._caught} ({self._steps_since} steps before)")

    def check_same(self, kind: str, described: Iterable[str]) -> None:
        """ConfigError, on every rank, if what ``described`` (a line each) says of ``kind`` differs between ranks."""
        mine = list(described)
        digest = hashlib.sha256("\n".join(mine).encode()).digest()
        rows = self.table(torch.frombuffer(bytearray(digest), dtype=torch.uint8), f"compare the {kind}")
        if all(torch.equal(row, rows[0]) for row in rows):
            return
        of_all = self.say(mine, f"tell the {kind}")
        for rank, theirs in enumerate(of_all):
            if theirs == of_all[0]:
                continue
            pairs = zip((*of_all[0], "nothing more"), (*theirs, "nothing more"), strict=False)
            first, other = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                f"the {kind} of rank {rank} is not that of rank 0: {other} there, {first} on rank 0. All ranks build"
                " the same model and read the same configuration and files; only data differs"
            )

    def settle(self) -> None:
        """Before anybody waits for a device for the last time, or gives back memory that it sends or receives in.

        What cannot end is ended: on this rank nobody else does, where it is the one that has failed.
        """
        if self._streams is None or not self._leave.alive:
            return
        if self.peers.broken or self._failure is not None:
            self._groups.sever()
        try:
            self._streams.gather.synchronize()
            self._streams.reduce.synchronize()
        except RuntimeError as error:  # CUDA's, which every call raises from then on: there is more to close
            log.error("the device of rank %d has failed: %s", self.world.rank, error)

    def close(self) -> None:
        """Leave the other ranks. Idempotent.

        Where a device is connected with theirs, wait a while for them to come: they may still read its memory.
        """
        if self._raised is not None:
            self.peers.fail(self._raised)
        self.settle()
        if self._leave.alive:
            if self._failure is not None:
                self._groups.sever()
            elif self._streams is not None and not self.peers.meet("close", FAREWELL):
                log.info("not all ranks have closed their engines within %.0f s of this one", FAREWELL)
        self._leave()

    def _gather_rows(self, rows: Tensor, row: Tensor, what: str) -> None:
        """Fill ``rows`` with the ``row`` of each rank, all of one size."""
        self._finish_rows(self._begin_rows(rows, row, what), what)

    def _begin_rows(self, rows: Tensor, row: Tensor, what: str) -> dist.Work:
        self._count("control", row.numel() * (self.world.size - 1))
        self.peers.issued(what, group="control")
        return waited_for(all_gather(rows.view(-1), row, self._groups.of("control")))

    def _finish_rows(self, work: dist.Work, what: str) -> None:
        with self._stalls.waiting_for("agreement"):
            self._wait(work, what, "control")

    @property
    def failure(self) -> BaseException | str | None:
        """What has ended this engine, if that was raised here."""
        return self._failure or self.peers.failed_by

    def _wait(self, work: dist.Work, what: str, group: str) -> None:
        with self._failing():
            self.peers.wait(work, what, group=group)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except DistributedError as error:
            self._failure = error
            raise

    def _queue(
        self,
        pending: Pending,
        collective: Callable[[], object],
        stream: Stream,
        after: Iterable[Event] | None,
        nbytes: int,
    ) -> Pending:
        """Tell the device of it. See Note [Collectives on a device]."""
        assert self._streams is not None
        for event in [self._streams.compute.record()] if after is None else after:
            stream.wait_for(event)
        begun = stream.record(timed=True)
        try:
            with stream.running():
                collective()
        except dist.DistError as error:  # a communicator that was aborted in between, or could not be made
            with self._failing():
                raise self.peers.cause_of(str(error), pending.what, group=pending.group) from error
        pending.ended = stream.record(timed=True)
        self._groups.queued(pending)
        self._stalls.timeline.queued("network", pending.what, begun, pending.ended, bytes=nbytes)
        return pending

    def _begun(self, pending: Pending, nbytes: int) -> Pending:
        """Show it in a trace: what carries it out says when it is done, nobody may be waiting by then."""
        timeline = self._stalls.timeline
        if timeline.recording:
            timeline.begin("network", pending.what, bytes=nbytes)
            left = list(pending.works)

            def one_has_ended(_: object) -> None:
                left.pop()
                if not left:
                    timeline.end("network", pending.what)

            for work in pending.works:
                work.get_future().add_done_callback(one_has_ended)
        return pending

    def has_ended(self, pending: Pending) -> bool:
        """Whether ``finish`` would not have to wait."""
        # Never on a device: what somebody begins for that reason would not be begun in one order by all ranks.
        return pending.ended is None and all(work.is_completed() for work in pending.works)

    def _connect_devices(self, device: torch.device) -> None:
        """Let every GPU send to every other one, both ways in which we do.

        That is when NCCL makes its connections and takes its memory: where all ranks are, and before anybody counts
        what is left of the device. Some machines let GPUs reach each other's memory and deliver something else.
        """
        size, rank = self.world.size, self.world.rank
        told = torch.full((1,), rank, dtype=torch.int32, device=device)
        sent = torch.arange(size, dtype=torch.int32, device=device) + rank * size
        whole, received = torch.empty_like(sent), torch.empty_like(sent)
        self.announce("connect the devices", foreseen=True)
        pending = (
            self.gather(whole, told, "connect the devices"),
            self.exchange(received, sent, "connect the devices"),
        )
        for each in pending:
            assert each.ended is not None
            each.ended.wait()
            self.finish(each, "agreement")
        if whole.tolist() != list(range(size)) or received.tolist() != [n * size + rank for n in range(size)]:
            raise DistributedError(
                f"the GPU of rank {rank} has received other bytes than those of other ranks have sent it:"
                f" {whole.tolist()} and {received.tolist()}. The way between them is broken (PCI access control, or an"
                " IOMMU): see whether NCCL_P2P_DISABLE=1 helps"
            )

    def _count(self, kind: str, nbytes: int) -> None:
        self.calls[kind] += 1
        self.sent[kind] += nbytes


def _unended(groups: ProcessGroups, streams: Streams | None) -> str | None:
    """``groups.unended``, in a thread that asks the device of ``streams``."""
    if streams is not None:
        streams.enter_thread()
    return groups.unended()


def _leave(peers: Peers, groups: ProcessGroups) -> None:
    peers.close()
    groups.leave()
