"""Files of an engine's state, between steps: checkpoints and snapshots saved and loaded, weights exported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiering.errors import ConfigError
from zero3.checkpoint.checkpoints import Checkpoints
from zero3.checkpoint.export import Export
from zero3.checkpoint.saving import Saving
from zero3.checkpoint.snapshots import Snapshots
from zero3.loop.lifecycle import Readiness
from zero3.loop.step import Update
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.passes.prefetch import Prefetcher
from zero3.state.access import Access
from zero3.state.parameters import Parameters


class StateFiles:
    """The calls of ``Engine`` that save, load and export its state. ``Engine`` sets the attributes."""

    optimizer: TieredOptimizer | ClientOptimizer
    _checkpoints: Checkpoints
    _snapshots: Snapshots
    _export: Export
    _access: Access
    _parameters: Parameters
    _prefetcher: Prefetcher
    _ready: Readiness
    _updates: Update

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int | None = None,
        background: bool = False,
        from_snapshot: bool = False,
    ) -> Saving:
        """Save all that the run needs to resume, as checkpoint ``tag`` (default "global_step<N>") in ``save_dir``.

        A checkpoint contains parameters, optimizer state, learning rate schedule, loss scale, the position in
        ``training_data``, random states and ``client_state``: plain values, tensors and arrays, which differ by rank.
        It is complete or absent, also after a crash of the process or the machine. ``save_latest`` makes it the default
        of ``load_checkpoint``. ``keep`` removes all but the newest ``keep`` checkpoints of this run with a default tag.
        ``exclude_frozen_parameters`` saves trained parameters only: the engine that loads it must have the others.

        With ``background``, training continues during the save: a step, and an edit in ``gathered``, waits until the
        values that it changes are copied. Other edits in place are noticed too late, and may get into the checkpoint.
        The checkpoint is complete when the returned Saving is ``done``. An error is logged, and raised once: by
        ``wait``, by the next background save (which has started by then), by a load or by ``close``.

        With ``from_snapshot``, the checkpoint has the state of the last ``snapshot_state`` in place of the current one,
        with its ``client_state``, and its step in the default tag. The saver reads the pages that the snapshot keeps,
        so with ``background`` no step waits for it; the next snapshot, and an edit of parameters, waits until all are
        read. Raises EngineStateError without a snapshot, ConfigError without ``tiering.snapshots``.

        All ranks call this together, between steps. Raises CheckpointError, on all ranks, if a rank cannot save:
        training can continue. Raises EngineStateError with gradients that no step has used; ConfigError, before
        anything is written, for ``keep`` below 1 and for values without a plain form.
        """
        return self._checkpoints.save(
            self._prepare_save(save_dir, "save_checkpoint"),
            None if tag is None else str(tag),
            {} if client_state is None else client_state,
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            keep=keep,
            background=background,
            from_snapshot=from_snapshot,
        )

    def snapshot_state(
        self,
        save_dir: str | os.PathLike[str],
        client_state: Mapping[str, Any] | None = None,
        *,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Save all that the run needs to resume as checkpoint "snapshot" in ``save_dir``, without a copy of swap space.

        Weights and optimizer state on NVMe stay where they are: the snapshot names ranges of the swap files, which
        later steps do not overwrite until the next snapshot. Only trained state in memory is written, and in the first
        snapshot frozen parameters, unless ``exclude_frozen_parameters``. It is complete or absent, also after a crash
        of the process or the machine, and replaces the snapshot before: a run has one, in one directory.
        ``load_checkpoint`` resumes from it when this run has ended, on this machine. With the same plan it adopts the
        swap files, which are in ``nvme_path``, and copies nothing that is there; with another plan it copies them, and
        they stay until the run has its own snapshot in ``save_dir``. Returns the path of the snapshot.

        All ranks call this together, between steps. Raises ConfigError unless ``tiering.snapshots`` is true;
        CheckpointError, on all ranks, if a rank cannot save: the snapshot before is still there, and training can
        continue. Raises EngineStateError with gradients that no step has used.
        """
        directory = self._prepare_save(save_dir, "snapshot_state")
        state = {} if client_state is None else client_state
        return self._snapshots.save(directory, state, exclude_frozen=exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resume from the checkpoint ``tag`` in ``load_dir``, or from the latest; returns its path and client_state.

        The run that saved it may have had another number of ranks, stage, placement or format of optimizer state.
        Without ``load_optimizer_states``, only parameters, buffers and the schedule are loaded: the optimizer starts
        with new state, and counters (``global_steps``), data and random states stay. With ``load_module_only``, or
        without an optimizer, only parameters and buffers are loaded. Gradients are dropped. If ``load_dir`` holds no
        checkpoint and ``tag`` is None, a warning is logged, and the result is (None, {}).

        Frozen parameters that the save has excluded keep their values. Without ``load_module_strict``, so do all
        parameters that the checkpoint lacks, with new optimizer state, and tensors that only the checkpoint has are
        ignored; a warning names both. ``custom_load_fn`` is DeepSpeed's, and must be None.

        All ranks call this together, between steps. Raises CheckpointError if the checkpoint is damaged or of another
        model, mostly before anything has changed. After an error while tensors are read, the engine can only load
        another checkpoint, or close.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint does not support custom_load_fn: leave it out, write the checkpoint's weights with"
                " `tiering convert`, rename the tensors as the function would, and pass them to"
                " tiering.initialize(weights=...)"
            )
        directory = _directory(load_dir, "load_checkpoint")
        self._ready.check_between_steps("load_checkpoint", loads=True)
        self._parameters.warn_of_new_names()
        module_only = load_module_only or not self.optimizer.trains
        # Edits count if no checkpoint is loaded.
        self._parameters.store_edits_of_residents()
        self._updates.forget()
        self._ready.drop_gradients()
        self._prefetcher.forget()
        if self.optimizer.stepper is not None:
            self.optimizer.stepper.release_read_ahead()
        path, client_state = self._checkpoints.load(
            directory,
            None if tag is None else str(tag),
            strict=load_module_strict,
            states=load_optimizer_states and not module_only,
            scheduler=load_lr_scheduler_states and not module_only,
        )
        self._access.note_versions()
        return None if path is None else str(path), client_state

    def save_pretrained(self, save_dir: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> Path:
        """Write a directory that ``from_pretrained`` of transformers or peft loads, in the compute dtype; returns it.

        Of a model with peft adapters, only the adapters are saved, all but "default" in folders of their own. A model
        of another library has no configuration: its state_dict is written as model.safetensors. All ranks call this
        together. Raises CheckpointError, on all ranks, if a file cannot be written.
        """
        self._ready.check_between_steps("save_pretrained")
        return self._export.save_pretrained(Path(save_dir), max_shard_size)

    def _prepare_save(self, save_dir: str | os.PathLike[str], call: str) -> Path:
        """Bring what ``call`` saves up to date, and return its directory. Raises what the call documents."""
        directory = _directory(save_dir, call)
        self._ready.check_between_steps(call)
        self._ready.check_no_gradients(call)
        self._parameters.warn_of_new_names()
        self._parameters.store_edits_of_residents()
        return directory


def _directory(directory: str | os.PathLike[str], call: str) -> Path:
    # Scripts pass None or an empty string for an option that was not given.
    if directory is None or not os.fspath(directory):
        raise ConfigError(
            f"{call} got {directory!r} as its directory: pass the directory that holds checkpoints"
        )
    return Path(directory)
