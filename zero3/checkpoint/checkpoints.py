"""Checkpoints of an engine: saved by all ranks or by none, in the foreground or in the background.

Each rank's saver writes its own files (saving.py); ranks exchange only the facts that they must agree on. A checkpoint
becomes visible when rank 0 renames its directory (tiering/checkpoint/directory.py), after the bytes of all ranks are on
the disk. Several ranks commit together: a foreground save at its end, a background save in the step after the last rank
has written. The numbers that ranks exchange in each step show when that is the case.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from tiering import _logs
from tiering._interrupts import deferred_interrupts
from tiering.checkpoint.directory import CheckpointDirectory, check_keep
from tiering.checkpoint.manifest import MANIFEST, WEIGHTS, Manifest, StoredParameter, new_run, new_save
from tiering.checkpoint.rank_writer import RankRecord
from tiering.checkpoint.swap_places import SNAPSHOT_TAG
from tiering.config.training import TieringConfig, format_size
from tiering.errors import CheckpointError, TieringError
from tiering.telemetry import CheckpointStatus, as_text
from tiering.weights.tensor_file import naming
from zero3.building.weights import STORED_NAMES
from zero3.checkpoint.kept_snapshot import KeptSnapshot, kept_snapshot
from zero3.checkpoint.loading import Loader
from zero3.checkpoint.opening import LoadRequest
from zero3.checkpoint.rank_share import Share
from zero3.checkpoint.run_state import RankState, Resumable, RunState
from zero3.checkpoint.saving import (
    Destination,
    RunningSave,
    Saver,
    SaveRequest,
    Saving,
    Source,
    StallTimer,
    check_shared,
    uncommitted,
)
from zero3.checkpoint.snapshot_directory import SnapshotDirectory
from zero3.loop.step import Update
from zero3.loop.step_state import Accumulation
from zero3.optimizer.tiles import Tile
from zero3.parts import Assembly
from zero3.ranks.agreement import together

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds after which a wait checks for Ctrl-C and for lost ranks.
_SLICE = 0.1


class Checkpoints:
    """Saves and loads the state of a ``run``, which trains ``model`` with ``parts``, and uses most of them."""

    def __init__(
        self,
        run: Resumable,
        model: nn.Module,
        config: TieringConfig,
        parts: Assembly,
        updates: Update,
        accumulation: Accumulation,
    ) -> None:
        self._precision = config.precision
        self._accumulation = accumulation
        self._parts = parts
        self._updates = updates
        self._collectives = parts.collectives
        self._run = RunState(run, parts.optimizer, updates, accumulation, parts.names, parts.world.rank)
        # Rank 0's counts. A load replaces it by the id of the run that saved.
        self.run_id = new_run()
        self.began = time.monotonic()
        self._io = config.tiering.io
        self._directory: CheckpointDirectory | None = None
        self._under_way: RunningSave | None = None
        self._last_save: Saving | None = None
        # The last save, or a later one that failed before it began.
        self._reported_save: Saving | None = None
        self._saved = self._failed = 0
        self._stall_timer = StallTimer(parts.tiers.stalls)
        # Also that of a snapshot whose swap files the engine has adopted.
        self.snapshot_directory = SnapshotDirectory(self.began)
        # Whether frozen parameters may have other values than in the snapshot of the engine.
        self.frozen_changed = True
        # The last snapshot, of this engine or adopted, whose content the swap space keeps.
        self.snapshot: KeptSnapshot | None = None
        self._loader = Loader(
            model, parts, self._run, self._io, updates.current_step, self.snapshot_directory
        )
        parts.optimizer.listen(self)

    def save(
        self,
        save_dir: Path,
        tag: str | None,
        client_state: Mapping[str, Any],
        *,
        latest: bool,
        exclude_frozen: bool,
        keep: int | None,
        background: bool,
        from_snapshot: bool,
    ) -> Saving:
        """See Engine.save_checkpoint. The engine is idle, and its masters are up to date."""
        # One save at a time: the earlier one is committed, or has failed, before this one takes memory and the
        # directory.
        self.finish()
        earlier = self._last_save
        self._stall_timer = StallTimer(self._parts.tiers.stalls)
        step = self.snapshot.step if from_snapshot and self.snapshot is not None else self._updates.steps
        tag = tag if tag is not None else f"global_step{step}"
        request = SaveRequest(str(save_dir), tag, latest, exclude_frozen, keep, background, from_snapshot)
        with self._stall_timer.stalling():
            try:
                # Afterwards, host memory holds all that a GPU has updated.
                self._parts.optimizer.release_read_ahead()
                under_way = self._begin(request, client_state)
            except TieringError as error:
                self._note_refused(request, error)
                raise
            # Ctrl-C must not occur between the two: a save in progress has a running saver.
            with deferred_interrupts():
                # Before the thread starts, which commits this save itself if there is one rank.
                self._under_way = under_way
                if self._collectives is not None:
                    uncommitted.add(under_way.saving.path)
                under_way.saver.start()
        if not background:
            self.finish()
            under_way.saving.wait()
        # Not before this save has begun: it may succeed where the earlier one failed.
        elif earlier is not None:
            earlier.raise_error()
        return under_way.saving

    def finish(self) -> None:
        """Wait for the running save, and commit it. All ranks call this together."""
        if self._under_way is None:
            return
        saver = self._under_way.saver
        try:
            self._wait_for(saver, saver.wait_for_end)
        # Ctrl-C, or another rank is lost.
        except BaseException as error:
            self._cancel(error)
            raise
        self._finish_together()

    @property
    def progress(self) -> int:
        """The progress of a background save on this rank: 0 there is none, 1 it is running, 2 its saver has ended."""
        return 0 if self._under_way is None else 1 + self._under_way.saver.has_ended

    def status(self) -> CheckpointStatus:
        """The outcome of the saves so far. Any thread may call it."""
        # Read once: the thread that trains may replace it meanwhile.
        save = self._reported_save
        status = CheckpointStatus(under_way=self.progress > 0, saved=self._saved, failed=self._failed)
        if save is None:
            return status
        return replace(
            status,
            path=as_text(str(save.path)),
            ended_at=save.ended_at,
            seconds=save.seconds,
            stalled=save.stalled,
            nbytes=save.nbytes,
            error="" if save.error is None else as_text(str(save.error)),
        )

    def after_step(self, *, all_written: bool) -> None:
        """A step has ended, in which ranks have exchanged their ``progress``."""
        # All ranks have read the same numbers in this step, so all of them reach the collectives of the commit.
        if self._under_way is not None and all_written:
            self._finish_together()

    def before_write(self, *, frozen: bool) -> None:
        """Called before values on the tiers change: wait until the running save has copied all of them.

        ``frozen``: they are of a frozen parameter.
        """
        self.frozen_changed |= frozen
        self._wait_for_copy(None)

    def close(self) -> None:
        """Finish the running save, and unlock the directory. Raises the error of a save that was not raised yet."""
        try:
            failure = self._collectives.failure if self._collectives is not None else None
            # After a failure the other ranks do not reach a commit: the save is cancelled instead.
            if failure is None:
                self._end_earlier()
            elif self._under_way is not None:
                self._cancel(failure)
        finally:
            if self._directory is not None:
                self._directory.close()
                self._directory = None

    def load(
        self, load_dir: Path, tag: str | None, *, strict: bool, states: bool, scheduler: bool
    ) -> tuple[Path | None, dict[str, Any]]:
        """See Engine.load_checkpoint. The engine is idle; afterwards it has no gradients."""
        # First: the load changes the values that a save is copying.
        self._end_earlier()
        request = LoadRequest(load_dir, tag, strict=strict, states=states, scheduler=scheduler)
        # Until the load has ended: it may fail with some values changed.
        self.frozen_changed = True
        loaded = self._loader.load(request)
        if loaded is None:
            return None, {}
        self.run_id = loaded.run_id or self.run_id
        # A copy of a snapshot has another tag: its values need not be those of the snapshot.
        self.frozen_changed = not (loaded.adopted and loaded.path.name == SNAPSHOT_TAG)
        self.snapshot = loaded.adopted or self.snapshot
        return loaded.path, loaded.client_state

    def collect(self, client_state: Mapping[str, Any]) -> RankState:
        """The state of this rank that is not on tiers. ConfigError for values without a plain form."""
        return self._run.collect(client_state)

    @property
    def _rank(self) -> int:
        return self._parts.world.rank

    def _begin(self, request: SaveRequest, client_state: Mapping[str, Any]) -> RunningSave:
        parts = self._parts
        share = Share(parts, frozen=not request.exclude_frozen)
        sources: list[Source] = []
        partials: list[Path] = []
        savers: list[Saver] = []

        def prepare() -> tuple[SaveRequest, Path | None, str]:
            check_keep(request.keep)
            sources.append(self._source(request, client_state, share))
            if self._rank == 0:
                directory = self._open_directory(Path(request.save_dir))
                partials.append(directory.begin(request.tag, run=sources[0].manifest.run))
            return request, partials[0] if partials else None, new_save()

        def join(partial: Path, save: str) -> None:
            check_shared(partial)
            savers.append(
                Saver(
                    share,
                    sources[0].state,
                    parts.tiers,
                    Destination(partial, self._rank, parts.world.size, save),
                    self._io,
                    kept=sources[0].kept,
                    on_written=self._commit_alone,
                    on_end=self._settle_alone,
                )
            )

        try:
            # Two rounds: no rank may write to the directory before rank 0 has made it.
            prepared = self._together("begin a checkpoint", prepare)
            SaveRequest.check_same([rank_request for rank_request, _, _ in prepared])
            _, partial, save = prepared[0]
            assert partial is not None
            self._together("write to the directory that rank 0 created", lambda: join(partial, save))
        except BaseException:
            self._discard(partials)
            raise
        saving = Saving(self.finish, partial.parent / request.tag, request.tag)
        manifest = replace(sources[0].manifest, save=save)
        return RunningSave(request, saving, savers[0], manifest, partial, self._stall_timer)

    def _source(self, request: SaveRequest, client_state: Mapping[str, Any], share: Share) -> Source:
        """What this rank saves: the state of now, or of the last snapshot. Raises what the caller documents."""
        if not request.from_snapshot:
            return Source(self.collect(client_state), self.manifest(share, ""))
        snapshot = kept_snapshot(self.snapshot, self._parts, client_state)
        return snapshot.source(
            self._parts, self._io, exclude_frozen=request.exclude_frozen, frozen_changed=self.frozen_changed
        )

    def _note_refused(self, request: SaveRequest, error: TieringError) -> None:
        """Report a save that failed before it began. The caller gets the error; ``status`` shows it to the sidecar."""
        saving = Saving(self.finish, Path(request.save_dir) / request.tag, request.tag)
        saving.error, saving.ended_at, saving.done = error, time.time(), True
        saving.stalled, saving.seconds = self._stall_timer.stalled, self._stall_timer.seconds
        self._reported_save = saving
        self._failed += 1

    def _open_directory(self, save_dir: Path) -> CheckpointDirectory:
        """The directory ``save_dir``, which this engine locks until it saves elsewhere."""
        former, self._directory = self._directory, self.snapshot_directory.at(save_dir, self._directory)
        if former is not None and former not in (self._directory, self.snapshot_directory.current):
            former.close()
        return self._directory

    def _commit_alone(self) -> None:
        """The saver has written all files. A single rank commits at once, in the saver's thread."""
        # With several ranks nothing is committed from here: other ranks may still be writing.
        if self._collectives is None:
            assert self._under_way is not None
            self._commit(self._under_way.saver.record)

    def _prune(self, under_way: RunningSave) -> None:
        """Rank 0 removes older checkpoints after the commit, so that other ranks do not wait for it."""
        keep = under_way.request.keep
        if self._rank == 0 and keep is not None:
            assert self._directory is not None
            with under_way.stall_timer.stalling():
                self._directory.prune(under_way.saving.tag, under_way.manifest.run, keep)

    def _settle_alone(self) -> None:
        """The saver has ended. A single rank reports the outcome at once, not at the next step."""
        if self._collectives is not None:
            return
        under_way = self._under_way
        assert under_way is not None
        try:
            self._together("save the checkpoint", under_way.saver.result)
        except CheckpointError as error:
            self._settle(under_way, error)
        else:
            self._settle(under_way, None)

    def _commit(self, record: RankRecord) -> None:
        """Make the files of all ranks, which ``record`` describes, a checkpoint. Rank 0 calls it."""
        under_way = self._under_way
        assert under_way is not None and self._directory is not None
        with naming(under_way.partial / MANIFEST):
            manifest = replace(under_way.manifest, files=record.files, digests=record.digests)
            # The last file, because it makes the directory a checkpoint.
            manifest.write(under_way.partial)
        self._directory.commit(
            under_way.partial,
            under_way.saving.tag,
            run=under_way.manifest.run,
            latest=under_way.request.latest,
            keep=under_way.request.keep if self._collectives is None else None,
        )

    def _finish_together(self) -> None:
        """Commit the save. The saver of this rank has ended; those of other ranks have, or will soon."""
        under_way = self._under_way
        assert under_way is not None
        saver = under_way.saver
        # Its error and its record are final after this.
        saver.join()
        if self._collectives is None:
            # The saver's thread has settled it.
            self._end(under_way)
            return
        try:
            with self._stall_timer.stalling():
                # Every rank has reported that its files are on disk before rank 0 commits.
                record = RankRecord.of_all(self._together("save its part of the checkpoint", saver.result))
                self._together(
                    "commit the checkpoint", lambda: self._commit(record) if self._rank == 0 else None
                )
        except CheckpointError as error:
            self._settle(under_way, error)
            self._end(under_way)
        # A rank is lost, or Ctrl-C.
        except BaseException as error:
            self._fail(under_way, error)
            raise
        else:
            self._settle(under_way, None)
            self._end(under_way)
            # After the commit, and after the save has ended for the other ranks.
            self._prune(under_way)

    def _settle(self, under_way: RunningSave, error: TieringError | None) -> None:
        """Record and log the outcome of the save."""
        saving, saver, timer = under_way.saving, under_way.saver, under_way.stall_timer
        if saving.done:
            return
        if error is not None:
            # The saver writes no more files, so the directory can be removed.
            self._discard([under_way.partial])
            if under_way.request.background:
                log.error("the checkpoint %s was not saved: %s", saving.path, error)
        saving.error, saving.nbytes = error, saver.record.nbytes
        # In this order: time passes between the two, and the stall is a part of the save.
        saving.stalled, saving.seconds = timer.stalled, timer.seconds
        saving.ended_at = time.time()
        if error is None:
            log.log(
                _logs.once(logging.INFO),
                "checkpoint %s saved: %s in %.1f s, of which training waited %.2f s",
                *(saving.path, format_size(saver.record.nbytes), saving.seconds, saving.stalled),
            )
        # Last: other threads read the other attributes once it is done.
        saving.done = True

    def _end(self, under_way: RunningSave) -> None:
        """The save has ended, and its outcome is recorded: training no longer waits for it."""
        # First: from here on no step waits for this save.
        self._under_way = None
        uncommitted.discard(under_way.saving.path)
        self._last_save = self._reported_save = under_way.saving
        self._saved += self._last_save.error is None
        self._failed += self._last_save.error is not None

    def _end_earlier(self) -> None:
        """Finish the earlier save before a load or the end of the engine, and raise its error."""
        self.finish()
        if self._last_save is not None:
            self._last_save.raise_error()

    def _cancel(self, error: BaseException | str) -> None:
        under_way = self._under_way
        assert under_way is not None
        # Waits for the end of the thread: only then may its directory be removed.
        under_way.saver.cancel()
        self._fail(under_way, error)

    def _fail(self, under_way: RunningSave, error: BaseException | str) -> None:
        """The save has failed by ``error``, which the caller raises."""
        saving = under_way.saving
        self._settle(under_way, CheckpointError(f"{saving.path}: the save was ended by {error!r}"))
        self._end(under_way)
        saving.error_was_raised = True

    def _discard(self, partials: list[Path]) -> None:
        if self._rank == 0 and self._directory is not None:
            for partial in partials:
                self._directory.discard(partial)

    def before_change(self, tile: Tile) -> None:
        """A step is about to change ``tile``: wait until a save that is under way has copied it."""
        # Without a lock: a tile that the saver has copied stays copied.
        if self._under_way is not None and not self._under_way.saver.has_copied(tile):
            self._wait_for_copy(tile)

    def _wait_for_copy(self, tile: Tile | None) -> None:
        """Wait until ``tile``, or with None all state, may change."""
        if self._under_way is not None:
            saver = self._under_way.saver
            self._wait_for(saver, lambda within: saver.let_change(tile, within))

    def _wait_for(self, saver: Saver, condition: Callable[[float], bool]) -> None:
        """Wait until ``condition`` is true; it gets the seconds for which it may wait.

        In between, this rank checks for lost ranks. Other ranks see its progress as long as the saver copies.
        """
        with self._stall_timer.stalling():
            while not condition(_SLICE):
                if self._collectives is not None:
                    self._collectives.check()
                    self._collectives.peers.note(f"a save, of which {saver.progress} chunks are copied")
        if self._collectives is not None:
            self._collectives.peers.note("")

    def manifest(self, share: Share, save: str) -> Manifest:
        """The manifest of the checkpoint, without the files."""
        optimizer = self._parts.optimizer
        saved: dict[str, StoredParameter] = {}
        excluded: dict[str, StoredParameter] = {}
        for group in self._parts.groups:
            for piece in group.layout.pieces:
                (saved if piece.trainable or share.has_frozen else excluded)[piece.name] = StoredParameter(
                    piece.shape,
                    "F32" if piece.trainable else STORED_NAMES[group.dtype_of(piece)],
                    piece.trainable,
                    optimizer.steps.get(piece.index, 0) if piece.trainable else 0,
                )
        modules = self._parts.names
        first_names = {param: name for name, param in modules.parameters()}
        names = {name: first_names[param] for name, param in modules.parameters(remove_duplicate=False)}
        tiled = modules.tiled()
        return Manifest(
            run=self.run_id,
            step=self._updates.steps,
            world_size=self._parts.world.size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            optimizer=optimizer.rule_name,
            precision=self._precision,
            kinds=tuple(kind for kind in share.kinds if kind != WEIGHTS),
            parameters=saved,
            files={},
            training={"micro_steps": self._accumulation.micro_steps, **self._updates.state_dict()},
            excluded=excluded,
            tied={
                name: first_name
                for name, first_name in names.items()
                if name != first_name and (first_name in saved or first_name in tiled)
            },
            tiled=tiled,
            save=save,
        )

    def _together(self, purpose: str, work: Callable[[], T]) -> list[T]:
        return together(self._collectives, purpose, work)
