"""Adoption: a run with the plan of the run that made a snapshot takes over its swap files, and copies nothing.

What the snapshot keeps is then where the run's homes have it, and steps write to other versions of these pages until
the next snapshot, as in the run that made it: so the snapshot stays what it is, and another run may resume from it when
this one is killed. State in memory, and parameters that are rounded masters, are read from the files. Each rank locks
its files alone, and rank 0 the directory of the snapshot. All ranks adopt, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tiering._text import counted
from tiering.checkpoint.reader import Checkpoint, in_use
from tiering.config.training import format_size
from tiering.storage.arena import PAGE
from tiering.storage.named_files import AdoptedFile
from tiering.weights.pages import SUMS, SwapSums
from zero3.checkpoint.rank_share import Share
from zero3.checkpoint.swapped_state import SwappedState
from zero3.params.layout import tiles
from zero3.parts import Assembly

log = logging.getLogger(__name__)


class Adoption:
    """Takes over the swap files of this rank in the snapshot ``checkpoint``."""

    def __init__(self, checkpoint: Checkpoint, parts: Assembly) -> None:
        self._checkpoint = checkpoint
        self._parts = parts
        self._files: list[AdoptedFile] = []

    def obstacle(self) -> str:
        """Why the content has to be copied instead; empty if it need not be."""
        parts, ranks = self._parts, self._checkpoint.swap.ranks
        swap = parts.tiers.swap
        if swap is None or not parts.plan.workload.snapshots:
            return "this run makes no snapshots"
        if len(ranks) != parts.world.size:
            return f"it was saved by {counted(len(ranks), 'rank')}"
        saved = ranks[parts.world.rank]
        if [file.path.parent for file in saved.files] != [slab.directory for slab in swap.files]:
            return "it is in other directories than nvme_path"
        if any(slab.is_public for slab in swap.files):
            return "the swap files of this run have a snapshot already"
        extents = parts.tiers.extents
        share = Share(parts, frozen=False)
        if not saved.layout.has_plan_of(swap.layout(extents)) or saved.plan != SwappedState(parts).plan(
            share
        ):
            return "this run has another plan"
        if swap.used > sum(part.extent.nbytes for extent in extents for part in extent.parts):
            return "activations are in the swap space"
        if any(file.path in self._checkpoint.sums for file in saved.files) and not swap.aio.verifies:
            return "this run does not compare its checksums (tiering.verify)"
        nbytes = sum(file.nbytes for file in saved.files)
        if nbytes > parts.plan.budgets.nvme:
            return f"its swap files have {format_size(nbytes)}, more than nvme_budget"
        return ""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the files in the block. Raises CheckpointError if one is gone, or in use by a run that has not ended."""
        swap = self._parts.tiers.swap
        assert swap is not None
        with ExitStack() as closing:
            for slab, file in zip(
                swap.files, self._checkpoint.swap.ranks[self._parts.world.rank].files, strict=True
            ):
                try:
                    self._files.append(AdoptedFile(file, direct=slab.direct))
                except OSError as error:
                    raise in_use(self._checkpoint.path, file, error) from error
                closing.callback(self._files[-1].close)
            yield

    def run(self) -> None:
        """Make them the swap space of this run, inside ``held``."""
        swap = self._parts.tiers.swap
        assert swap is not None
        layout = self._checkpoint.swap.ranks[self._parts.world.rank].layout
        swap.adopt(layout, self._parts.tiers.extents, self._files)
        for slab, file in zip(swap.files, self._files, strict=True):
            sums = self._checkpoint.sums.get(file.path)
            if isinstance(sums, SwapSums):
                # Each page is compared when it is read for the first time, by the first step at the latest.
                for first, end in tiles(slab.capacity // PAGE, SUMS):
                    swap.aio.set_checksums(slab.file, first, sums.read(first, end - first).tobytes())
