"""The engine of a model: another trainer of the same model ends it first."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import tiering
from tiering.integrations import _ranks

if TYPE_CHECKING:
    from tiering import DeepSpeedEngine


def start(
    model: nn.Module,
    config: Mapping[str, Any],
    *,
    processes: int,
    device: torch.device | None = None,
    **options: Any,
) -> DeepSpeedEngine:
    """The engine of ``model``, which computes on ``device``; an earlier engine of the model ends.

    ``processes`` are those that the loop counts. ``options`` are arguments of ``tiering.initialize``.

    Raises EngineStateError if other ranks train together than the loop counts.
    """
    release(model)
    with _ranks.counted(processes), nullcontext() if device is None else computing_on(device):
        engine = tiering.initialize(model=model, config=dict(config), **options).engine
    set_synced(engine)
    return engine


def release(model: nn.Module, device: torch.device | str | None = None) -> None:
    """End the open engine of ``model``, if any: its parameters are ordinary again, in the dtypes that they had.

    They go to ``device``; if it is None, to the engine's device or, with a warning, to host memory if they do not fit
    there. See ``Engine.release`` for errors.
    """
    engine = tiering.DeepSpeedEngine.of(model)
    if engine is not None:
        engine.give_back("release", device)
        set_synced(engine, False)


@contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """Engines that start in the block compute on ``device``, where the batches of the loop are."""
    before = os.environ.get("TIERING_DEVICE")
    os.environ["TIERING_DEVICE"] = device.type
    try:
        yield
    finally:
        if before is None:
            del os.environ["TIERING_DEVICE"]
        else:
            os.environ["TIERING_DEVICE"] = before


def set_synced(engine: DeepSpeedEngine, synced: bool = True) -> None:
    """Make ``generate`` run until the last rank has its tokens, if each forward needs all ranks.

    transformers does this for models that have its mark of a sharded model.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or engine.world_size == 1 or not engine.zero_optimization_partition_weights():
        return
    for module in engine.module.modules():
        if isinstance(module, transformers.PreTrainedModel):
            module._is_fsdp_managed_module = synced
