"""Files of an engine's state, between steps: checkpoints saved and loaded, and weights exported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiering.errors import ConfigError
from zero3.checkpoint.checkpoints import Checkpoints
from zero3.checkpoint.export import Export
from zero3.checkpoint.saving import Saving
from zero3.loop.lifecycle import Readiness
from zero3.loop.step import Update
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.passes.prefetch import Prefetcher
from zero3.state.access import Access


class StateFiles:
    """Checks and prepares the engine for each call that saves, loads or exports its state, and makes the call."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        export: Export,
        access: Access,
        ready: Readiness,
        updates: Update,
        optimizer: TieredOptimizer | ClientOptimizer,
        prefetcher: Prefetcher,
    ) -> None:
        self._checkpoints = checkpoints
        self._export = export
        self._access = access
        self._ready = ready
        self._updates = updates
        self._optimizer = optimizer
        self._prefetcher = prefetcher

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None,
        client_state: Mapping[str, Any] | None,
        *,
        latest: bool,
        exclude_frozen: bool,
        keep: int | None,
        background: bool,
    ) -> Saving:
        """See Engine.save_checkpoint."""
        directory = _directory(save_dir, "save_checkpoint")
        self._ready.check_between_steps("save_checkpoint")
        self._ready.check_no_gradients("save_checkpoint")
        self._access.parameters.warn_of_new_names()
        self._access.parameters.store_edits_of_residents()
        return self._checkpoints.save(
            directory,
            None if tag is None else str(tag),
            {} if client_state is None else client_state,
            latest=latest,
            exclude_frozen=exclude_frozen,
            keep=keep,
            background=background,
        )

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None,
        *,
        strict: bool,
        states: bool,
        scheduler: bool,
        module_only: bool,
    ) -> tuple[str | None, dict[str, Any]]:
        """See Engine.load_checkpoint."""
        directory = _directory(load_dir, "load_checkpoint")
        self._ready.check_between_steps("load_checkpoint", loads=True)
        self._access.parameters.warn_of_new_names()
        module_only = module_only or not self._optimizer.trains
        # Edits count if no checkpoint is loaded.
        self._access.parameters.store_edits_of_residents()
        self._updates.forget()
        self._ready.drop_gradients()
        self._prefetcher.forget()
        self._optimizer.release_read_ahead()
        path, client_state = self._checkpoints.load(
            directory,
            None if tag is None else str(tag),
            strict=strict,
            states=states and not module_only,
            scheduler=scheduler and not module_only,
        )
        self._access.note_versions()
        return None if path is None else str(path), client_state

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str, *, exclude_frozen: bool
    ) -> Path:
        """See Engine.save_16bit_model."""
        self._ready.check_between_steps("save_16bit_model")
        return self._export.save_16bit_model(
            Path(save_dir), save_filename, exclude_frozen_parameters=exclude_frozen
        )

    def save_pretrained(self, save_dir: str | os.PathLike[str], max_shard_size: int | str) -> Path:
        """See Engine.save_pretrained."""
        self._ready.check_between_steps("save_pretrained")
        return self._export.save_pretrained(Path(save_dir), max_shard_size)


def _directory(directory: str | os.PathLike[str], call: str) -> Path:
    # Scripts pass None or an empty string for an option that was not given.
    if directory is None or not os.fspath(directory):
        raise ConfigError(
            f"{call} got {directory!r} as its directory: pass the directory that holds checkpoints"
        )
    return Path(directory)
