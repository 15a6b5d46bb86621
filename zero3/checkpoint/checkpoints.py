"""Checkpoints of an engine: saved by all ranks or by none, in the foreground or while training goes on, and loaded.

Each rank's saver writes its own files (saver.py); ranks send each other only what they have to agree on. A save is in
sight once rank 0 has renamed its directory (tiering/checkpoint/directory.py), after all ranks' bytes are on the disk.
With several ranks that is agreed on together: at the end of a save in the foreground; else in the step after the last
rank has written, which is known because steps exchange a few numbers anyway.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from tiering import logs
from tiering.checkpoint.directory import CheckpointDirectory, check_keep
from tiering.checkpoint.manifest import MANIFEST, WEIGHTS, Manifest, StoredParameter, new_run, new_save
from tiering.checkpoint.rank_writer import RankRecord
from tiering.config.training import TieringConfig, format_size
from tiering.errors import CheckpointError, TieringError
from tiering.interrupts import deferred_interrupts
from tiering.telemetry import CheckpointStatus, as_text
from tiering.weights.tensor_file import naming
from zero3.building.weights import STORED_NAMES
from zero3.checkpoint.opening import LoadRequest, Opener, Ready
from zero3.checkpoint.rank_share import Share
from zero3.checkpoint.restore import optimizer_name
from zero3.checkpoint.run_state import RankState, Resumable, RunState
from zero3.checkpoint.save_handle import Asked, Saving, Standstill, UnderWay, uncommitted
from zero3.checkpoint.saver import Destination, Saver
from zero3.loop.accumulation import Accumulation
from zero3.loop.step import Update
from zero3.optimizer.tiles import Tile
from zero3.parts import Assembly
from zero3.ranks.agreement import together

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE = 0.1  # seconds after which a wait listens for Ctrl-C


class Checkpoints:
    """Saves and loads the state of a ``run``, which trains ``model`` and is made of ``parts``."""

    def __init__(
        self,
        run: Resumable,
        model: nn.Module,
        config: TieringConfig,
        parts: Assembly,
        updates: Update,
        accumulation: Accumulation,
    ) -> None:
        self._model = model
        self._precision = config.precision
        self._accumulation = accumulation
        self._parts = parts
        self._updates = updates
        self._collectives = parts.collectives
        self._run = RunState(run, parts.optimizer, updates, accumulation, parts.names, parts.world.rank)
        self._run_id = new_run()  # until it goes on from a checkpoint; rank 0's counts
        self._io = config.tiering.io
        self._directory: CheckpointDirectory | None = None
        self._under_way: UnderWay | None = None
        self._last: Saving | None = None
        self._shown: Saving | None = None  # the last one, or a later one that could not even begin
        self._saved = self._failed = 0
        self._standstill = Standstill(parts.tiers.stalls)
        self._half_loaded: set[nn.Parameter] = set()  # what loads were filling when they failed
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
    ) -> Saving:
        """See Engine.save_checkpoint. The engine is idle, and its masters are up to date."""
        self.finish()
        earlier = self._last
        self._standstill = Standstill(self._parts.tiers.stalls)
        tag = tag if tag is not None else f"global_step{self._updates.steps}"
        asked = Asked(str(save_dir), tag, latest, exclude_frozen, keep, background)
        with self._standstill.now():
            try:
                self._parts.optimizer.release_read_ahead()  # what a GPU has updated is in host memory then
                under_way = self._begin(asked, client_state)
            except TieringError as error:
                self._note_refused(asked, error)
                raise
            with deferred_interrupts():  # what is under way has begun
                self._under_way = under_way
                if self._collectives is not None:
                    uncommitted.add(under_way.saving.path)
                under_way.saver.start()
        if not background:
            self.finish()
            under_way.saving.wait()
        elif earlier is not None:  # not before: what has failed then may go well now
            earlier.tell()
        return under_way.saving

    def finish(self) -> None:
        """Wait for the save that is under way, and make it a checkpoint. All ranks together."""
        if self._under_way is None:
            return
        saver = self._under_way.saver
        try:
            self._wait_for(saver, saver.ended)
        except BaseException as error:  # Ctrl-C, or another rank is lost
            self._give_up(error)
            raise
        self._conclude()

    @property
    def progress(self) -> int:
        """How far a save in the background is on this rank: 0 there is none, 1 under way, 2 at its end."""
        return 0 if self._under_way is None else 1 + self._under_way.saver.over

    def status(self) -> CheckpointStatus:
        """What has become of saves so far. Any thread may ask."""
        last = self._shown
        told = CheckpointStatus(under_way=self.progress > 0, saved=self._saved, failed=self._failed)
        if last is None:
            return told
        return replace(
            told,
            path=as_text(str(last.path)),
            ended_at=last.ended_at,
            seconds=last.seconds,
            stalled=last.stalled,
            nbytes=last.nbytes,
            error="" if last.error is None else as_text(str(last.error)),
        )

    def after_step(self, *, all_written: bool) -> None:
        """A step has ended, in which ranks have told each other their ``progress``."""
        if self._under_way is not None and all_written:
            self._conclude()

    def before_write(self) -> None:
        """Somebody is about to change what lives on the tiers: wait until it was copied."""
        self._wait_for_copy(None)

    def close(self) -> None:
        """End what is under way, and let others save where this engine did. Raises the error that nobody was told."""
        try:
            failure = self._collectives.failure if self._collectives is not None else None
            if failure is None:
                self._end_earlier()
            elif self._under_way is not None:
                self._give_up(failure)
        finally:
            if self._directory is not None:
                self._directory.close()
                self._directory = None

    def load(
        self, load_dir: Path, tag: str | None, *, strict: bool, states: bool, scheduler: bool
    ) -> tuple[Path | None, dict[str, Any]]:
        """See Engine.load_checkpoint. The engine is idle; afterwards it has no gradients."""
        self._end_earlier()
        request = LoadRequest(load_dir, tag, strict=strict, states=states, scheduler=scheduler)
        opener = Opener(self._model, self._parts, self._run, self._io, request, frozenset(self._half_loaded))
        with ExitStack() as files:
            ready = opener.open(files)
            if ready is None:
                log.log(logs.once(logging.WARNING), "%s holds no checkpoint: training begins anew", load_dir)
                return None, {}
            return ready.path, self._take_over(ready, request)

    def _take_over(self, ready: Ready, request: LoadRequest) -> dict[str, Any]:
        """Fill the tiers from a checkpoint whose files are open, and go on from it; returns the client_state."""
        restore, states = ready.restore, request.states
        began = time.monotonic()
        self._updates.current_step.to_loading()
        self._half_loaded |= restore.filled
        self._together("load the checkpoint", restore.run)
        restore.count_steps()
        client_state: dict[str, Any] = {}

        def go_on() -> None:
            if restore.of_run:
                client_state.update(
                    self._run.restore(ready.shared, ready.own, optimizer=states, scheduler=request.scheduler)
                )

        self._together("go on from the checkpoint", go_on)
        if restore.of_run and states:
            self._run_id = restore.run_id
        self._updates.current_step.to_loaded()
        self._half_loaded.clear()
        seconds = time.monotonic() - began
        log.log(logs.once(logging.INFO), "checkpoint %s loaded in %.1f s", ready.path, seconds)
        return client_state

    @property
    def _rank(self) -> int:
        return self._parts.world.rank

    def _begin(self, asked: Asked, client_state: Mapping[str, Any]) -> UnderWay:
        parts = self._parts
        share = Share(
            parts.groups,
            parts.tiles,
            parts.layout,
            state_names=parts.optimizer.state_names,
            world=parts.world,
            stage=parts.plan.workload.stage,
            frozen=not asked.exclude_frozen,
        )
        collected: list[RankState] = []
        made: list[Path] = []
        savers: list[Saver] = []

        def prepare() -> tuple[Asked, Path | None, str]:
            check_keep(asked.keep)
            collected.append(self._run.collect(client_state))
            if self._rank == 0:
                made.append(self._opened(Path(asked.save_dir)).begin(asked.tag, run=self._run_id))
            return asked, made[0] if made else None, new_save()

        def join(partial: Path, save: str) -> None:
            _check_shared(partial)
            savers.append(
                Saver(
                    share,
                    collected[0],
                    self._parts.tiers,
                    Destination(partial, self._rank, self._parts.world.size, save),
                    self._io,
                    on_written=self._commit_alone,
                    on_end=self._settle_alone,
                )
            )

        try:
            begun = self._together("begin a checkpoint", prepare)
            Asked.check_same([theirs for theirs, _, _ in begun])
            _, partial, save = begun[0]
            assert partial is not None
            self._together("write to the directory that rank 0 has made", lambda: join(partial, save))
        except BaseException:
            self._discard(made)
            raise
        saving = Saving(self.finish, partial.parent / asked.tag, asked.tag)
        return UnderWay(asked, saving, savers[0], self._manifest(share, save), partial, self._standstill)

    def _note_refused(self, asked: Asked, error: TieringError) -> None:
        """A save has failed before it began: whoever called it knows, and the sidecar is to tell others."""
        refused = Saving(self.finish, Path(asked.save_dir) / asked.tag, asked.tag)
        refused.error, refused.ended_at, refused.done = error, time.time(), True
        refused.seconds, refused.stalled = self._standstill.lasted, self._standstill.stalled
        self._shown = refused
        self._failed += 1

    def _opened(self, save_dir: Path) -> CheckpointDirectory:
        """The directory ``save_dir``, which is this engine's until it saves elsewhere."""
        wanted = CheckpointDirectory(save_dir)
        if self._directory is None or self._directory.path != wanted.path:
            if self._directory is not None:
                self._directory.close()
            self._directory = wanted
        return self._directory

    def _commit_alone(self) -> None:
        """All is written, and there is nobody to agree with."""
        if self._collectives is None:
            assert self._under_way is not None
            self._commit(self._under_way.saver.record)

    def _prune(self, under_way: UnderWay) -> None:
        """The others know already, and need not wait for it."""
        keep = under_way.asked.keep
        if self._rank == 0 and keep is not None:
            assert self._directory is not None
            with under_way.standstill.now():
                self._directory.prune(under_way.saving.tag, under_way.manifest.run, keep)

    def _settle_alone(self) -> None:
        """The saver is at its end, and there is nobody to agree with: this is known now, and not at the next step."""
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
        """All ranks have written their files, of which ``record`` tells: rank 0 makes them a checkpoint."""
        under_way = self._under_way
        assert under_way is not None and self._directory is not None
        with naming(under_way.partial / MANIFEST):
            manifest = replace(under_way.manifest, files=record.files, digests=record.digests)
            manifest.write(under_way.partial)
        self._directory.commit(
            under_way.partial,
            under_way.saving.tag,
            run=under_way.manifest.run,
            latest=under_way.asked.latest,
            keep=under_way.asked.keep if self._collectives is None else None,
        )

    def _conclude(self) -> None:
        """The saver of this rank has ended, and those of the others have, or soon will."""
        under_way = self._under_way
        assert under_way is not None
        saver = under_way.saver
        saver.join()
        if self._collectives is None:
            self._end(under_way)  # its saver has settled it
            return
        try:
            with self._standstill.now():
                record = RankRecord.of_all(self._together("save its part of the checkpoint", saver.result))
                self._together(
                    "commit the checkpoint", lambda: self._commit(record) if self._rank == 0 else None
                )
        except CheckpointError as error:
            self._settle(under_way, error)
            self._end(under_way)
        except BaseException as error:  # a rank is lost, Ctrl-C
            self._end_by(under_way, error)
            raise
        else:
            self._settle(under_way, None)
            self._end(under_way)
            self._prune(under_way)

    def _settle(self, under_way: UnderWay, error: TieringError | None) -> None:
        """What has become of the save is known, and told."""
        saving, saver, standstill = under_way.saving, under_way.saver, under_way.standstill
        if saving.done:
            return
        if error is not None:
            self._discard([under_way.partial])
            if under_way.asked.background:
                log.error("the checkpoint %s was not saved: %s", saving.path, error)
        saving.error, saving.nbytes = error, saver.record.nbytes
        saving.seconds, saving.stalled = standstill.lasted, standstill.stalled
        saving.ended_at = time.time()
        if error is None:
            log.log(
                logs.once(logging.INFO),
                "checkpoint %s saved: %s in %.1f s, of which training waited %.2f s",
                *(saving.path, format_size(saver.record.nbytes), saving.seconds, saving.stalled),
            )
        saving.done = True  # after all that is to be seen then

    def _end(self, under_way: UnderWay) -> None:
        """What has become of the save is known, and training waits for nothing more of it."""
        self._under_way = None
        uncommitted.discard(under_way.saving.path)
        self._last = self._shown = under_way.saving
        self._saved += self._last.error is None
        self._failed += self._last.error is not None

    def _end_earlier(self) -> None:
        """Another save, or a load, or the end: the one before is over first, and its error is told."""
        self.finish()
        if self._last is not None:
            self._last.tell()

    def _give_up(self, error: BaseException | str) -> None:
        under_way = self._under_way
        assert under_way is not None
        under_way.saver.cancel()
        self._end_by(under_way, error)

    def _end_by(self, under_way: UnderWay, error: BaseException | str) -> None:
        """The save is over, because of what is raised in any case."""
        saving = under_way.saving
        self._settle(under_way, CheckpointError(f"{saving.path}: the save was ended by {error!r}"))
        self._end(under_way)
        saving.told = True

    def _discard(self, partials: list[Path]) -> None:
        if self._rank == 0 and self._directory is not None:
            for partial in partials:
                self._directory.discard(partial)

    def before_change(self, tile: Tile) -> None:
        """A step is about to change ``tile``: wait until a save that is under way has copied it."""
        if self._under_way is not None and not self._under_way.saver.has_copied(tile):
            self._wait_for_copy(tile)

    def _wait_for_copy(self, tile: Tile | None) -> None:
        """Wait until ``tile``, or all state, may change."""
        if self._under_way is not None:
            saver = self._under_way.saver
            self._wait_for(saver, lambda within: saver.let_change(tile, within))

    def _wait_for(self, saver: Saver, over: Callable[[float], bool]) -> None:
        """Wait until it is ``over``, which waits for some seconds and says so.

        Meanwhile this rank hears of others that are lost, and they see that it moves, as long as its saver does.
        """
        with self._standstill.now():
            while not over(_SLICE):
                if self._collectives is not None:
                    self._collectives.check()
                    self._collectives.peers.note(f"a save, of which {saver.progress} chunks are copied")
        if self._collectives is not None:
            self._collectives.peers.note("")

    def _manifest(self, share: Share, save: str) -> Manifest:
        """What the checkpoint says of itself, but for its files."""
        optimizer = self._parts.optimizer
        saved: dict[str, StoredParameter] = {}
        excluded: dict[str, StoredParameter] = {}
        for group in self._parts.groups:
            for piece in group.layout.pieces:
                (saved if piece.trainable or share.has_frozen else excluded)[piece.name] = StoredParameter(
                    piece.shape,
                    "F32" if piece.trainable else STORED_NAMES[group.dtype],
                    piece.trainable,
                    optimizer.steps.get(piece.index, 0) if piece.trainable else 0,
                )
        modules = self._parts.names
        first = {param: name for name, param in modules.parameters()}
        names = {name: first[param] for name, param in modules.parameters(remove_duplicate=False)}
        return Manifest(
            run=self._run_id,
            step=self._updates.steps,
            world_size=self._parts.world.size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            optimizer=optimizer_name(optimizer),
            precision=self._precision,
            kinds=tuple(kind for kind in share.kinds if kind != WEIGHTS),
            parameters=saved,
            files={},
            training={"micro_steps": self._accumulation.micro_steps, **self._updates.state_dict()},
            excluded=excluded,
            tied={name: known for name, known in names.items() if name != known and known in saved},
            save=save,
        )

    def _together(self, what: str, work: Callable[[], T]) -> list[T]:
        return together(self._collectives, what, work)


def _check_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial}, which rank 0 has made, is not there on this node: save to a file system that all nodes share"
        )
