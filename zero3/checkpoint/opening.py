"""A checkpoint is found, checked and opened by all ranks, before a load changes anything.

Somebody may be saving there, as a trainer is while an evaluation loads its latest checkpoint: a save replaces a tag, or
prunes it. While the files are being opened that is noticed, and the checkpoint that is there now is taken. Once they
are open, a file that is removed is still read to its end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import nn

from tiering import logs
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import MANIFEST
from tiering.checkpoint.reader import open_checkpoint
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, DistributedError
from zero3.checkpoint.restore import Restore, rank_state
from zero3.checkpoint.run_state import RankState, RunState
from zero3.parts import Assembly
from zero3.ranks.agreement import together

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOKS = 10  # at a directory in which somebody saves faster than this can load


@dataclass(frozen=True)
class LoadRequest:
    """What a load was called with."""

    directory: Path
    tag: str | None
    strict: bool
    states: bool
    scheduler: bool

    def look(self) -> Seen:
        """Find the checkpoint. CheckpointError if one that is named is not there."""
        path = CheckpointDirectory(self.directory).find(self.tag)
        if path is None:
            return Seen(None)
        try:
            status = (path / MANIFEST).stat()
        except FileNotFoundError:  # just removed: another look finds another one
            return Seen(path)
        return Seen(path, (status.st_ino, status.st_mtime_ns))


class Seen(NamedTuple):
    """Where a checkpoint is, and which version of its record; None if there is none."""

    path: Path | None
    version: tuple[int, ...] = ()


class Ready(NamedTuple):
    """A checkpoint that can be loaded: its files are open. ``own`` is None if it was saved by fewer ranks."""

    path: Path
    restore: Restore
    shared: RankState
    own: RankState | None


class Opener:
    """Opens the checkpoint of a ``request``, for the engine of ``model`` and ``parts`` that is in the state ``run``.

    ``uncertain`` parameters have lost their values in a load that failed: the checkpoint has to have them.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Assembly,
        run: RunState,
        io: IoConfig,
        request: LoadRequest,
        uncertain: AbstractSet[nn.Parameter],
    ) -> None:
        self._model = model
        self._parts = parts
        self._run = run
        self._io = io
        self._request = request
        self._uncertain = uncertain

    def open(self, files: ExitStack) -> Ready | None:
        """The checkpoint, whose ``files`` are open; None if there is none. All ranks together."""
        for more in reversed(range(LOOKS)):
            seen = self._together("find the checkpoint", self._request.look)
            try:
                with ExitStack() as opening:
                    ready = self._open_at(seen, opening)
                    files.enter_context(opening.pop_all())
                    return ready
            except DistributedError:
                raise
            except Exception:  # some error is raised on all ranks, so all look again, or none
                if not more or self._together("find the checkpoint", self._request.look) == seen:
                    raise
            log.log(logs.once(logging.INFO), "a save has replaced %s: looking again", seen[0].path)
        raise AssertionError("the last look returns or raises")

    def _open_at(self, seen: list[Seen], files: ExitStack) -> Ready | None:
        """As ``open``, of the checkpoint that ranks have ``seen``."""
        path, request = seen[0].path, self._request
        if any(each.path != path for each in seen):
            found = ", ".join(f"rank {rank} {each.path}" for rank, each in enumerate(seen))
            raise CheckpointError(
                f"ranks find different checkpoints: {found}; load from a directory that all of them share"
            )
        if path is None:
            return None
        made: list[Ready] = []

        def prepare() -> str:
            io, rank = self._io, self._parts.world.rank
            checkpoint = open_checkpoint(path)
            restore = Restore(
                checkpoint, self._model, self._parts, io, states=request.states, strict=request.strict
            )
            restore.check_kept(self._uncertain)
            shared = rank_state(checkpoint.rank(0), io) if restore.of_run else RankState({}, {})
            has_own = rank < checkpoint.manifest.world_size
            own = shared if rank == 0 else rank_state(checkpoint.rank(rank), io) if has_own else None
            if restore.of_run:
                self._run.check(shared, optimizer=request.states, scheduler=request.scheduler)
            files.enter_context(restore.reading())
            made.append(Ready(path, restore, shared, own))
            if checkpoint.caveat:
                log.log(logs.once(logging.WARNING), "%s", checkpoint.caveat)
            return f"{checkpoint.manifest.step} {checkpoint.manifest.created} {checkpoint.manifest.save}"

        saves = self._together("open the checkpoint", prepare)
        if any(save != saves[0] for save in saves):
            raise CheckpointError(
                f"ranks find different saves in {path}: wait until nobody saves there, and load it again"
            )
        return made[0]

    def _together(self, what: str, work: Callable[[], T]) -> list[T]:
        return together(self._parts.collectives, what, work)
