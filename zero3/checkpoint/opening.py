"""Opening a checkpoint: all ranks find, check and open it before a load changes anything.

Another process may save there meanwhile, as a trainer does while an evaluation loads its latest checkpoint: a save
replaces a tag, or prunes it. If that happens while the files are being opened, the ranks look again and open the
checkpoint that exists then. Open files stay readable after they are removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import nn

from tiering import _logs
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import MANIFEST
from tiering.checkpoint.reader import open_checkpoint
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, ConfigError, DistributedError
from zero3.checkpoint.adoption import Adoption
from zero3.checkpoint.restore import Restore, rank_state
from zero3.checkpoint.run_state import RankState, RunState
from zero3.checkpoint.snapshot_directory import SnapshotDirectory
from zero3.parts import Assembly
from zero3.ranks.agreement import together

log = logging.getLogger(__name__)

T = TypeVar("T")

# Attempts to open a checkpoint in a directory in which another process saves faster than this one can open.
LOOKS = 10


@dataclass(frozen=True)
class LoadRequest:
    """Arguments of a load."""

    directory: Path
    tag: str | None
    strict: bool
    states: bool
    scheduler: bool

    def find_if_any(self) -> CheckpointVersion:
        """As ``find``, but a tag that does not exist also gives the path None."""
        try:
            return self.find()
        except CheckpointError:
            return CheckpointVersion(None)

    def find(self) -> CheckpointVersion:
        """Find the checkpoint. CheckpointError if ``tag`` names one that does not exist."""
        path = CheckpointDirectory(self.directory).find(self.tag)
        if path is None:
            return CheckpointVersion(None)
        try:
            status = (path / MANIFEST).stat()
        # It was just removed: the next attempt finds another one.
        except FileNotFoundError:
            return CheckpointVersion(path)
        return CheckpointVersion(path, (status.st_ino, status.st_mtime_ns))


class CheckpointVersion(NamedTuple):
    """The path of a checkpoint, and the version of its manifest (inode and time); ``path`` None if there is none."""

    path: Path | None
    version: tuple[int, ...] = ()


class OpenCheckpoint(NamedTuple):
    """A checkpoint with open files. ``shared`` is rank 0's state; ``own`` is None if fewer ranks have saved.

    ``adopts``: the swap files of a snapshot are taken over.
    """

    path: Path
    restore: Restore
    shared: RankState
    own: RankState | None
    adopts: bool = False


class Opener:
    """Opens the checkpoint of a ``request`` for the engine of ``model`` and ``parts``, which Restore uses mostly.

    ``run`` checks the saved state of the run. ``uncertain`` parameters have lost their values in a failed load: the
    checkpoint must contain them. ``snapshots`` is locked if a snapshot is adopted.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Assembly,
        run: RunState,
        io: IoConfig,
        request: LoadRequest,
        uncertain: AbstractSet[nn.Parameter],
        snapshots: SnapshotDirectory,
    ) -> None:
        self._model = model
        self._parts = parts
        self._run = run
        self._io = io
        self._request = request
        self._uncertain = uncertain
        self._snapshots = snapshots

    def open(self, files: ExitStack) -> OpenCheckpoint | None:
        """Open the checkpoint, with its ``files``; None if there is none. All ranks call this together."""
        self._agree_on_directory()
        for attempts_left in reversed(range(LOOKS)):
            versions = self._together("find the checkpoint", self._request.find)
            try:
                with ExitStack() as opening:
                    ready = self._open_at(versions, opening)
                    files.enter_context(opening.pop_all())
                    return ready
            except DistributedError:
                raise
            # ``together`` raises on all ranks, so all of them try again, or none.
            except Exception:
                if not attempts_left or self._together("find the checkpoint", self._request.find) == versions:
                    raise
            log.log(_logs.once(logging.INFO), "a save has replaced %s: trying again", versions[0].path)
        raise AssertionError("the last attempt returns or raises")

    def _agree_on_directory(self) -> None:
        """Look in the directory of rank 0: ranks save there if they name different ones, for example by their clocks.

        A rank whose own directory has a checkpoint may mean that one, so this is refused.
        """
        directories = self._together("find the checkpoint", lambda: self._request.directory)
        rank = next((rank for rank, each in enumerate(directories) if each != directories[0]), None)
        if rank is None:
            return
        versions = self._together("find the checkpoint", self._request.find_if_any)
        # The same version at another path: a link, or another mount of the same file system.
        if any(each.path and each.version != versions[0].version for each in versions):
            raise _different_checkpoints(versions)
        log.log(
            _logs.once(logging.WARNING),
            "load_checkpoint was called with %s on rank 0, and with %s on rank %d: all ranks load from the directory of"
            " rank 0",
            *(directories[0], directories[rank], rank),
        )
        self._request = replace(self._request, directory=directories[0])

    def _open_at(self, versions: list[CheckpointVersion], files: ExitStack) -> OpenCheckpoint | None:
        """Open the checkpoint of which the ranks have found these ``versions``."""
        path, request = versions[0].path, self._request
        if any(each.path != path for each in versions):
            raise _different_checkpoints(versions)
        if path is None:
            return None
        opened: list[OpenCheckpoint] = []
        adoptions: list[Adoption | None] = []

        def prepare() -> tuple[str, bool]:
            io, rank = self._io, self._parts.world.rank
            checkpoint = open_checkpoint(path)
            restore = Restore(
                checkpoint, self._model, self._parts, io, states=request.states, strict=request.strict
            )
            restore.check_values_known(self._uncertain)
            shared = rank_state(checkpoint.rank(0), io) if restore.of_run else RankState({}, {})
            has_own = rank < checkpoint.manifest.world_size
            own = shared if rank == 0 else rank_state(checkpoint.rank(rank), io) if has_own else None
            if restore.of_run:
                self._run.check(shared, optimizer=request.states, scheduler=request.scheduler)
            adoptions.append(restore.adoption())
            opened.append(OpenCheckpoint(path, restore, shared, own))
            if checkpoint.caveat:
                log.log(_logs.once(logging.WARNING), "%s", checkpoint.caveat)
            save = f"{checkpoint.manifest.step} {checkpoint.manifest.created} {checkpoint.manifest.save}"
            return save, adoptions[0] is not None

        found = self._together("open the checkpoint", prepare)
        if any(save != found[0][0] for save, _ in found):
            raise CheckpointError(
                f"ranks find different saves in {path}: wait until no process saves there, and load it again"
            )
        ready = opened[0]

        def read(stack: ExitStack, adoption: Adoption | None) -> None:
            # Not before: one rank that reads a swap file would keep another from locking it alone.
            self._together("open its files", lambda: stack.enter_context(ready.restore.reading(adoption)))
            # Now that no run can write to them: the run that has made it may have made another one meanwhile.
            self._together("look whether it is still there", ready.restore.check_not_replaced)

        if all(can_adopt for _, can_adopt in found):
            with ExitStack() as adopting:
                read(adopting, adoptions[0])
                obstacle = self._together("lock its directory", lambda: self._lock(path))[0]
                if not obstacle:
                    files.enter_context(adopting.pop_all())
                    return ready._replace(adopts=True)
            ready.restore.log_copy(obstacle)
            # The locks are free on all ranks: each rank reads the files of all.
            self._together("close its files", lambda: None)
        read(files, None)
        return ready

    def _lock(self, path: Path) -> str:
        """Rank 0 locks the directory of the snapshot ``path``; returns why it cannot."""
        if self._parts.world.rank == 0:
            try:
                self._snapshots.lock(path.parent)
            except (CheckpointError, ConfigError) as error:
                return error.message
        return ""

    def _together(self, purpose: str, work: Callable[[], T]) -> list[T]:
        return together(self._parts.collectives, purpose, work)


def _different_checkpoints(versions: list[CheckpointVersion]) -> CheckpointError:
    paths = ", ".join(f"rank {rank} {each.path}" for rank, each in enumerate(versions))
    return CheckpointError(
        f"ranks find different checkpoints: {paths}; load from a directory that all ranks share"
    )
