"""Snapshots of an engine: a checkpoint whose weights and optimizer state stay where they are, in the swap files.

A snapshot is published as a checkpoint is (checkpoints.py), under the tag "snapshot". Its manifest names ranges of the
swap files, which get names for it (tiering/storage/named_files.py), and from then on a step writes to other versions of
these pages (tiering/storage/versions.py). Only trained state in memory is written, to swap space of its own.

**Order.** After a power failure any subset of what was not fsynced may be on the disk. So: state in memory is written;
the JSON file of each rank names the swap files; these get their names and are fsynced; the directory is published by a
rename and fsynced; and only then may a step overwrite the pages of the snapshot before. A crash before the rename
leaves that one; the swap files that it leaves are found by the JSON files, when the next run saves there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tiering import _logs
from tiering._interrupts import deferred_interrupts
from tiering.checkpoint.manifest import MANIFEST, WEIGHTS, Manifest, new_save
from tiering.checkpoint.rank_writer import RankRecord, RankWriter, link_earlier
from tiering.checkpoint.swap_places import SNAPSHOT_TAG, SWAP, RankSwap, swap_files_below
from tiering.config.training import IoConfig, format_size
from tiering.errors import CheckpointError, ConfigError, SwapError, SwapSpaceError
from tiering.storage import named_files
from tiering.storage.arena import PAGE
from tiering.storage.file_system import fsync
from tiering.storage.named_files import NamedFile
from tiering.storage.slab_file import SlabFile
from tiering.storage.versions import Kept
from tiering.weights.tensor_file import Output, TensorSpec, naming
from zero3.checkpoint.checkpoints import Checkpoints
from zero3.checkpoint.kept_snapshot import KeptSnapshot
from zero3.checkpoint.rank_share import Share
from zero3.checkpoint.run_state import RankState
from zero3.checkpoint.saving import StallTimer, bytes_of, specs_of
from zero3.checkpoint.swapped_state import SwappedState
from zero3.parts import Assembly
from zero3.ranks.agreement import together

log = logging.getLogger(__name__)

T = TypeVar("T")


class Snapshots:
    """Snapshots of the engine of ``parts``, beside its ``checkpoints``."""

    def __init__(self, checkpoints: Checkpoints, parts: Assembly, io: IoConfig) -> None:
        self._checkpoints = checkpoints
        self._parts = parts
        self._io = io
        self._directory = checkpoints.snapshot_directory
        # Also if this rank does not know, because an interrupt or a lost rank cut the publication off.
        self._is_published = False
        # Directories of failed snapshots whose files name swap files that have names.
        self._unpublished: list[Path] = []

    def save(self, save_dir: Path, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> Path:
        """See Engine.snapshot_state. The engine is idle, and its masters are up to date."""
        swap = self._parts.tiers.swap
        if swap is None or not self._parts.plan.workload.snapshots:
            raise ConfigError(
                "snapshot_state needs room for two states in swap space: set tiering.snapshots to true, or call"
                " save_checkpoint"
            )
        # Its saver reads what a step may change next; the order of saves is that of the calls.
        self._checkpoints.finish()
        timer = StallTimer(self._parts.tiers.stalls)
        with timer.stalling():
            self._parts.optimizer.release_read_ahead()
            path = self._save(save_dir, client_state, exclude_frozen=exclude_frozen)
        log.log(
            _logs.once(logging.INFO),
            "snapshot %s: %s written in %.2f s",
            *(path, format_size(self._parts.plan.snapshot_bytes), timer.seconds),
        )
        return path

    def close(self) -> None:
        """Unlock the directory. The snapshot stays; without one, no file does."""
        if self._parts.tiers.swap is not None and not self._is_published:
            self._parts.tiers.swap.withdraw()
        collectives = self._parts.collectives
        # A rank that is lost has not withdrawn its files: the next run removes them.
        if collectives is None or collectives.failure is None:
            self._discard_unpublished()
        self._directory.close()

    @property
    def _rank(self) -> int:
        return self._parts.world.rank

    def _save(self, save_dir: Path, client_state: Mapping[str, Any], *, exclude_frozen: bool) -> Path:
        """Write and publish; returns the path of the snapshot."""
        states: list[RankState] = []
        partials: list[Path] = []

        def prepare() -> tuple[Path | None, str, list[NamedFile], list[Path]]:
            states.append(self._checkpoints.collect(client_state))
            own = [file.path for file in self._named().values()]
            if self._rank != 0:
                return None, "", [], own
            partials.append(self._directory.begin(save_dir, run=self._checkpoints.run_id))
            return partials[0], new_save(), swap_files_below(partials[0].parent / SNAPSHOT_TAG), own

        try:
            begun = self._together("begin a snapshot", prepare)
            partial, save, earlier, _ = begun[0]
            assert partial is not None
            of_this_run = {path for *_, own in begun for path in own}
            replaced = tuple(file for file in earlier if file.path not in of_this_run and file.path.exists())
            has_frozen = not exclude_frozen and any(
                not piece.trainable for group in self._parts.groups for piece in group.layout.pieces
            )
            written = self._together(
                "write a snapshot",
                lambda: self._write(states[0], partial, save, replaced, has_frozen=has_frozen),
            )
            self._together("look for the swap files of all ranks", lambda: _check_reachable(written))
            record = RankRecord.of_all(each for each, _ in written)
            manifest = replace(
                self._checkpoints.manifest(Share(self._parts, frozen=not exclude_frozen), save),
                files=record.files,
                digests=record.digests,
                swapped=True,
            )
            place = partial.parent / SNAPSHOT_TAG
            # Ctrl-C must not occur between the two: a snapshot that is published must be kept.
            with deferred_interrupts():
                try:
                    told = self._together("publish a snapshot", lambda: self._publish(partial, manifest))
                except BaseException as error:
                    if _is_at(place, save):
                        self._keep(place, manifest, has_frozen=has_frozen)
                    # Without rank 0's answer: it may publish it yet.
                    self._is_published |= self._rank != 0 and not isinstance(error, CheckpointError)
                    raise
                self._keep(place, manifest, has_frozen=has_frozen)
        except BaseException:
            for each in partials:
                self._give_up(each)
            raise
        self._discard_unpublished()
        if told[0]:
            raise CheckpointError(told[0])
        named_files.remove(replaced)
        return place

    def _keep(self, place: Path, manifest: Manifest, *, has_frozen: bool) -> None:
        """The snapshot ``place`` is published: steps leave its pages as they are."""
        assert self._parts.tiers.swap is not None
        self._parts.tiers.swap.keep(Kept.SNAPSHOT)
        self._is_published = True
        self._checkpoints.snapshot = KeptSnapshot.of(place, manifest)
        self._checkpoints.frozen_changed = not has_frozen

    def _give_up(self, partial: Path) -> None:
        """Rank 0 removes the files of a snapshot that failed, unless only they name swap files."""
        directory = self._directory.current
        assert directory is not None
        if self._is_published or not any(partial.glob("rank-*.json")):
            directory.discard(partial)
        else:
            directory.leave(partial)
            self._unpublished.append(partial)

    def _discard_unpublished(self) -> None:
        """Their swap files are those of a snapshot by now, or have no names any more."""
        while self._unpublished:
            assert self._directory.current is not None
            self._directory.current.discard(self._unpublished.pop())

    def _named(self) -> dict[SlabFile, NamedFile]:
        """The swap files of this rank with the names that snapshots give them."""
        swap = self._parts.tiers.swap
        assert swap is not None
        return swap.named(f"{self._checkpoints.run_id[:8]}-rank{self._rank}")

    def _write(
        self,
        state: RankState,
        partial: Path,
        save: str,
        replaced: tuple[NamedFile, ...],
        *,
        has_frozen: bool,
    ) -> tuple[RankRecord, tuple[NamedFile, ...]]:
        """Write the part of this rank: to its swap files, and to ``partial``. Returns the files of both."""
        swap, world = self._parts.tiers.swap, self._parts.world
        assert swap is not None
        state_in_swap, share = SwappedState(self._parts), Share(self._parts, frozen=False)
        frozen = Share(self._parts, frozen=True, trained=False)
        with _swap_errors():
            state_in_swap.write()
            swap.check_written(Kept.SNAPSHOT)
        named = self._named()
        files: dict[str, tuple[Sequence[TensorSpec], Mapping[str, str]]] = {"rank": (specs_of(state), {})}
        linked: dict[str, Path] = {}
        swap_pages = {file.path.name: file.nbytes // PAGE for file in named.values() if swap.aio.verifies}
        before = partial.parent / SNAPSHOT_TAG
        has_same = has_frozen and not self._checkpoints.frozen_changed and before.exists()
        if has_same and link_earlier(partial, before, WEIGHTS, world.rank, world.size):
            linked[WEIGHTS] = before
        elif has_frozen:
            files[WEIGHTS] = frozen.tensors(WEIGHTS)
        with (
            Output(self._io, windows=len(files) + 1) as output,
            RankWriter(
                partial,
                world.rank,
                world.size,
                save,
                files,
                output=output,
                linked=linked,
                swap_pages=swap_pages,
            ) as writer,
        ):
            for chunk in frozen.chunks() if has_frozen and not linked else ():
                content = self._parts.tiers.load(chunk.source.home, chunk.source.offset, chunk.source.nbytes)
                for first, nbytes in chunk.parts:
                    writer.append(WEIGHTS, bytes_of(content[first : first + nbytes]))
            for tensor in state.tensors.values():
                writer.append("rank", bytes_of(tensor))
            for slab, offset, nbytes in state_in_swap.kept() if swap.aio.verifies else ():
                page, count = offset // PAGE, nbytes // PAGE
                sums = np.frombuffer(swap.aio.checksums(slab.file, page, count), dtype=np.uint32)
                writer.put_swap_sums(named[slab].path.name, page, sums)
            swapped = RankSwap(
                tuple(named.values()),
                state_in_swap.places(share, swap.files),
                swap.layout(self._parts.tiers.extents),
                state_in_swap.plan(share),
                replaced,
            )
            record = writer.finish({**state.content, SWAP: swapped.as_dict()})
        # After the JSON file is on the disk, so that no file with a name is unknown. Ctrl-C between a name and the note
        # of it would leave a file behind.
        for directory in (partial, partial.parent):
            with naming(directory):
                fsync(directory)
        with deferred_interrupts(), _swap_errors():
            swap.publish(named)
        return record, tuple(named.values())

    def _publish(self, partial: Path, manifest: Manifest) -> str:
        """Rank 0 makes ``partial`` the snapshot; returns the problem if it may be lost in a power failure."""
        if self._rank != 0:
            return ""
        directory = self._directory.current
        assert directory is not None
        with naming(partial / MANIFEST):
            manifest.write(partial)
        try:
            directory.commit(partial, SNAPSHOT_TAG, run=manifest.run)
        except CheckpointError as error:
            if _is_at(directory.path / SNAPSHOT_TAG, manifest.save):
                return error.message
            raise
        return ""

    def _together(self, purpose: str, work: Callable[[], T]) -> list[T]:
        return together(self._parts.collectives, purpose, work)


def _is_at(place: Path, save: str | None) -> bool:
    """Whether ``place`` has the checkpoint that ``save`` made."""
    with suppress(CheckpointError):
        return Manifest.read(place).save == save
    return False


def _check_reachable(written: Iterable[tuple[RankRecord, Iterable[NamedFile]]]) -> None:
    """CheckpointError unless this rank can open the swap files of all ranks, as a run that resumes does."""
    for rank, (_, files) in enumerate(written):
        for file in files:
            if not file.path.exists():
                raise CheckpointError(
                    f"{file.path}, a swap file of rank {rank}, is not on this host, and all ranks that resume from a"
                    " snapshot read the files of all: on several nodes call save_checkpoint, or use an nvme_path that"
                    " they share"
                )


@contextmanager
def _swap_errors() -> Iterator[None]:
    """Raise CheckpointError in place of an error of the swap space."""
    try:
        yield
    except (SwapError, SwapSpaceError) as error:
        raise CheckpointError(f"the snapshot was not saved: {error.message}") from error
