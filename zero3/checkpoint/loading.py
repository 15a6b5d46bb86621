"""Loads of an engine: by all ranks or by none. A load that fails half way leaves an engine that has to load again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from tiering import _logs
from tiering.config.training import IoConfig
from zero3.checkpoint.kept_snapshot import KeptSnapshot
from zero3.checkpoint.opening import LoadRequest, OpenCheckpoint, Opener
from zero3.checkpoint.run_state import RunState
from zero3.checkpoint.snapshot_directory import SnapshotDirectory
from zero3.loop.step_state import NOT_RESUMED, CurrentStep
from zero3.parts import Assembly
from zero3.ranks.agreement import together

log = logging.getLogger(__name__)

T = TypeVar("T")


class Loaded(NamedTuple):
    """A checkpoint that was loaded. ``run_id`` is that of the run that goes on, None if another one begins.

    ``adopted``: it is a snapshot, whose swap files are those of the engine now.
    """

    path: Path
    client_state: dict[str, Any]
    run_id: str | None
    adopted: KeptSnapshot | None


class Loader:
    """Loads checkpoints into ``parts`` and ``run``. ``snapshots`` is locked when a snapshot is adopted."""

    def __init__(
        self,
        model: nn.Module,
        parts: Assembly,
        run: RunState,
        io: IoConfig,
        current_step: CurrentStep,
        snapshots: SnapshotDirectory,
    ) -> None:
        self._model = model
        self._parts = parts
        self._run = run
        self._io = io
        self._current_step = current_step
        self._snapshots = snapshots
        # Parameters whose values a failed load has overwritten, or which have none yet.
        self._half_loaded: set[nn.Parameter] = set()
        if parts.resumes:
            self._half_loaded.update(
                param
                for group in parts.groups
                for param, piece in zip(group.params, group.layout.pieces, strict=True)
                if piece.trainable
            )
            current_step.to_loading(NOT_RESUMED)

    def load(self, request: LoadRequest) -> Loaded | None:
        """Load what ``request`` names; None if its directory has no checkpoint. The engine is idle."""
        opener = Opener(
            self._model,
            self._parts,
            self._run,
            self._io,
            request,
            frozenset(self._half_loaded),
            self._snapshots,
        )
        with ExitStack() as files:
            ready = opener.open(files)
            if ready is None:
                log.log(
                    _logs.once(logging.WARNING),
                    "%s holds no checkpoint: training starts from the beginning",
                    request.directory,
                )
                return None
            return self._take_over(ready, request)

    def _take_over(self, ready: OpenCheckpoint, request: LoadRequest) -> Loaded:
        """Fill the tiers from an open checkpoint, and restore the run."""
        restore, states = ready.restore, request.states
        began = time.monotonic()
        if self._parts.plan.in_place_bytes:
            self._together("compare frozen weights with the checkpoint", restore.check_in_place)
        # Before the first value changes: if the load does not end, training on these values is refused.
        self._current_step.to_loading()
        self._half_loaded |= restore.filled
        self._together("load the checkpoint", restore.run)
        # Only after the values are there on all ranks.
        restore.count_steps()
        client_state: dict[str, Any] = {}

        def restore_run() -> None:
            if restore.of_run:
                client_state.update(
                    self._run.restore(ready.shared, ready.own, optimizer=states, scheduler=request.scheduler)
                )

        self._together("continue from the checkpoint", restore_run)
        self._current_step.to_loaded()
        # Only now all values are those of one checkpoint.
        self._half_loaded.clear()
        seconds = time.monotonic() - began
        outcome = "adopted" if ready.adopts else "loaded"
        log.log(_logs.once(logging.INFO), "checkpoint %s %s in %.1f s", ready.path, outcome, seconds)
        run_id = restore.manifest.run if restore.of_run and states else None
        adopted = KeptSnapshot.of(ready.path, restore.manifest) if ready.adopts else None
        return Loaded(ready.path, client_state, run_id, adopted)

    def _together(self, purpose: str, work: Callable[[], T]) -> list[T]:
        return together(self._parts.collectives, purpose, work)
