"""What an engine writes to files, and goes on from: checkpoints, and weights for others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from zero3.checkpoint.checkpoints import Checkpoints
from zero3.checkpoint.export import Export
from zero3.checkpoint.save_handle import Saving
from zero3.loop.lifecycle import Readiness
from zero3.loop.step import Update
from zero3.optimizer.client import ClientOptimizer
from zero3.optimizer.tiered import TieredOptimizer
from zero3.passes.prefetch import Prefetcher
from zero3.state.access import Access
from zero3.state.tensors import TieredState


class StateFiles:
    """The part of ``Engine`` that saves its state, loads it, and exports weights."""

    module: nn.Module
    config: TieringConfig
    optimizer: TieredOptimizer | ClientOptimizer
    _access: Access
    _checkpoints: Checkpoints
    _prefetcher: Prefetcher
    _ready: Readiness
    _state: TieredState
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
    ) -> Saving:
        """Save all that the run needs to go on, as the checkpoint ``tag`` (default "global_step<N>") in ``save_dir``.

        That is parameters, optimizer state, learning rate schedule, loss scale, the place in ``training_data``, random
        states and ``client_state``: plain values, tensors and arrays, each rank its own. It is there whole or not at
        all, whatever ends the process or the machine. ``save_latest`` makes it what ``load_checkpoint`` takes; ``keep``
        leaves that many of this run's checkpoints with a default tag, the newest. ``exclude_frozen_parameters`` saves
        trained parameters alone: whoever loads it has to have the others.

        In the ``background`` training goes on meanwhile: a step waits for what it is about to change to be copied, and
        so do edits in ``gathered``; others in place are seen too late, and may get into the checkpoint. The checkpoint
        is there when the returned Saving is ``done``. An error is logged, and raised by its ``wait``, by the next save
        in the background, which is under way then, by a load or by ``close``, whichever comes first.

        Between steps, by all ranks together. CheckpointError, on all ranks, if one cannot save: training can go on.
        EngineStateError with gradients that no step has used; ConfigError, before anything is written, for ``keep``
        below 1 and for what has no plain form.
        """
        directory = _named(save_dir, "save_checkpoint")
        self._ready.check_between_steps("save_checkpoint")
        self._ready.check_no_gradients("save_checkpoint")
        self._access.tell_of_new_names()
        self._access.store_edits_of_residents()
        return self._checkpoints.save(
            directory,
            None if tag is None else str(tag),
            {} if client_state is None else client_state,
            latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
            keep=keep,
            background=background,
        )

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
        """Go on from the checkpoint ``tag`` in ``load_dir``, or from the latest; returns its path and client_state.

        The run that saved it may have had other ranks, another stage, placement or format of optimizer state. Without
        ``load_optimizer_states`` parameters, buffers and the schedule alone are taken: the state of the optimizer
        starts anew, and counters (``global_steps``), data and random states stay. With ``load_module_only``, or without
        an optimizer, nothing but parameters and buffers. Gradients are dropped. Where ``load_dir`` has no checkpoint
        and no ``tag`` is given: a warning, and (None, {}).

        Frozen parameters that the save has excluded keep the values that they have here. Without ``load_module_strict``
        so do all that the checkpoint does not have, whose state starts anew, and what only it has is left: a warning
        names them. ``custom_load_fn`` is DeepSpeed's, and stays None.

        Between steps, by all ranks together. CheckpointError if it is damaged, or another model's: mostly before
        anything has changed; what is found while tensors are read leaves an engine that can load another one, or close.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint has no state_dict to give a custom_load_fn: leave it out, and make `tiering convert`"
                " write the checkpoint's weights, rename them as the function would, and begin with"
                " tiering.initialize(weights=...)"
            )
        directory = _named(load_dir, "load_checkpoint")
        self._ready.check_between_steps("load_checkpoint", loads=True)
        self._access.tell_of_new_names()
        module_only = load_module_only or not self.optimizer.trains
        states = load_optimizer_states and not module_only
        self._access.store_edits_of_residents()  # they count if nothing is loaded
        self._updates.forget()
        self._ready.drop_gradients()
        self._prefetcher.forget()
        self.optimizer.release_read_ahead()
        path, client_state = self._checkpoints.load(
            directory,
            None if tag is None else str(tag),
            strict=load_module_strict,
            states=states,
            scheduler=load_lr_scheduler_states and not module_only,
        )
        self._access.note_versions()
        return None if path is None else str(path), client_state

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write the model's ``state_dict`` in 16 bits as one safetensors file; returns its path. See export.py."""
        self._ready.check_between_steps("save_16bit_model")
        export = Export(self.module, self.config, self._state)
        return export.save_16bit_model(
            Path(save_dir), save_filename, exclude_frozen_parameters=exclude_frozen_parameters
        )

    def save_pretrained(self, save_dir: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> Path:
        """Write a directory that transformers' (or peft's) ``from_pretrained`` loads; returns it. See export.py."""
        self._ready.check_between_steps("save_pretrained")
        return Export(self.module, self.config, self._state).save_pretrained(Path(save_dir), max_shard_size)


def _named(directory: str | os.PathLike[str], call: str) -> Path:
    # Scripts pass None or an empty string for an option that was not given.
    if directory is None or not os.fspath(directory):
        raise ConfigError(
            f"{call} was given {directory!r} for a directory: name the one that holds checkpoints"
        )
    return Path(directory)
