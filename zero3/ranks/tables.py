"""A few numbers on which ranks must agree, exchanged between their CPUs."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tiering.errors import ConfigError, RankOrderError
from zero3.device.timeline import StallClock
from zero3.ranks.mesh import Partition
from zero3.ranks.process_groups import all_gather, as_bytes, assert_begun
from zero3.ranks.watch import Watch

T = TypeVar("T")

TITLE = 64  # bytes of a row that hold its label


@dataclass(frozen=True)
class Table:
    """A table that was begun. The transport reads ``row`` and writes ``rows`` until ``work`` has ended."""

    row: Tensor
    rows: Tensor
    nbytes: int  # of a row, without its label
    dtype: torch.dtype
    label: str
    work: dist.Work


class Tables:
    """The tables of the ranks of ``partition``. All of them must call every method, in the same order.

    ``rank`` is this one's number in the run; the attribute ``rank`` is its number among ``ranks``, by which rows are
    ordered. ``name`` is that of their process group in errors, ``process_group`` returns it, and ``count`` counts the
    bytes that were sent, by kind.
    """

    def __init__(
        self,
        partition: Partition,
        rank: int,
        name: str,
        process_group: Callable[[], dist.ProcessGroup],
        watch: Watch,
        stalls: StallClock,
        count: Callable[[str, int], None],
    ) -> None:
        self.ranks, self.rank = partition.ranks, partition.number_of(rank)
        self.row_nbytes = 256  # bytes of a row of a table, without its label; equal on all ranks
        self._name = name
        self._process_group = process_group
        self._watch = watch
        self._stalls = stalls
        self._count = count

    def table(self, row: Tensor, label: str) -> Tensor:
        """Gather a row from each rank: ``row`` is a flat CPU tensor, of one length and dtype on all ranks.

        Rows carry their label, and all have one size: gloo ends a process that receives more bytes than it expects.
        Raises RankOrderError, on every rank, if ranks have come to different tables.
        """
        return self.finish_table(self.begin_table(row, label))

    def begin_table(self, values: Tensor, label: str) -> Table:
        """Send this rank's row, without waiting. ``finish_table`` returns the rows of all ranks."""
        payload = as_bytes(values)
        row = torch.zeros(TITLE + self.row_nbytes, dtype=torch.uint8, device="cpu")
        title = label.encode()[:TITLE]
        row[: len(title)] = torch.frombuffer(bytearray(title), dtype=torch.uint8)
        row[TITLE : TITLE + payload.numel()] = payload
        rows = torch.empty(len(self.ranks), row.numel(), dtype=torch.uint8, device="cpu")
        return Table(row, rows, payload.numel(), values.dtype, label, self._begin_rows(rows, row, label))

    def finish_table(self, table: Table) -> Tensor:
        """Wait for a table that was begun. See ``table``."""
        self._finish_rows(table.work, table.label)
        titles = [bytes(each[:TITLE].tolist()).rstrip(b"\0").decode() for each in table.rows]
        if len(set(titles)) > 1:
            labels = ", ".join(
                f"rank {rank} in {title!r}" for rank, title in zip(self.ranks, titles, strict=True)
            )
            with self._watch.failing():
                raise RankOrderError(
                    f"ranks are at different points of the program: {labels}. Call forward, backward and step equally"
                    f" often on all ranks.{self._watch.peers.remarks()}"
                )
        return table.rows[:, TITLE : TITLE + table.nbytes].contiguous().view(table.dtype)

    def broadcast(self, values: Tensor, source: int, label: str) -> None:
        """Copy the flat ``values`` of the rank with number ``source`` among these, in host memory, to all of them."""
        if not values.numel():
            return
        receivers = len(self.ranks) - 1
        self._count("broadcast", values.nbytes if self.rank == source and receivers else 0)
        self._watch.peers.issue(label, group=self._name)
        work = dist.broadcast(as_bytes(values), group=self._process_group(), group_src=source, async_op=True)
        self._watch.wait(assert_begun(work), label, self._name)

    def gather_objects(self, value: T, label: str) -> list[T]:
        """The ``value`` of each rank at ``label``, in the order of ranks. It must be picklable."""
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        # A table of lengths first: the rows below must have one size on all ranks.
        lengths = [int(row[0]) for row in self.table(torch.tensor([pickled.numel()], device="cpu"), label)]
        row = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        row[: pickled.numel()] = pickled
        rows = torch.empty(len(self.ranks), row.numel(), dtype=torch.uint8, device="cpu")
        self._finish_rows(self._begin_rows(rows, row, label), label)
        contents = [part[:length].numpy().tobytes() for part, length in zip(rows, lengths, strict=True)]
        return [pickle.loads(content) for content in contents]  # noqa: S301 # from ranks of this run

    def check_same(self, kind: str, described: Iterable[str]) -> None:
        """ConfigError, on every rank, if the lines ``described``, which describe ``kind``, differ between ranks."""
        lines = list(described)
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        rows = self.table(torch.frombuffer(bytearray(digest), dtype=torch.uint8), f"compare the {kind}")
        if all(torch.equal(row, rows[0]) for row in rows):
            return
        # All ranks have the same rows, so all of them come here, or none does.
        lines_of_ranks = self.gather_objects(lines, f"exchange the {kind}")
        first = self.ranks[0]
        for rank, lines_of_rank in zip(self.ranks, lines_of_ranks, strict=True):
            if lines_of_rank == lines_of_ranks[0]:
                continue
            pairs = zip(
                (*lines_of_ranks[0], "no further entry"), (*lines_of_rank, "no further entry"), strict=False
            )
            expected, actual = next((a, b) for a, b in pairs if a != b)
            raise ConfigError(
                f"the {kind} of rank {rank} differs from that of rank {first}: {actual} on rank {rank}, {expected} on"
                f" rank {first}. All ranks must build the same model and read the same configuration and files; only"
                " data may differ"
            )

    def _begin_rows(self, rows: Tensor, row: Tensor, label: str) -> dist.Work:
        """Begin to fill ``rows`` with the ``row`` of each rank, all of one size."""
        self._count("control", row.numel() * (len(self.ranks) - 1))
        self._watch.peers.issue(label, group=self._name)
        return assert_begun(all_gather(rows.view(-1), row, self._process_group()))

    def _finish_rows(self, work: dist.Work, label: str) -> None:
        with self._stalls.waiting_for("agreement"):
            self._watch.wait(work, label, self._name)
