"""The engine of each model that a front end has started: another trainer of the same model ends it first."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import tiering
from tiering.integrations import _ranks

if TYPE_CHECKING:
    from tiering import DeepSpeedEngine

_engines: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[DeepSpeedEngine], torch.dtype]]
_engines = weakref.WeakKeyDictionary()
"""The engine of each model, and the dtype of the model before it had the engine."""


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of most elements of floating-point parameters."""
    elements: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        if param.is_floating_point():
            elements[param.dtype] += param.numel()
    return max(elements, key=lambda dtype: elements[dtype], default=torch.float32)


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
    dtype = dtype_of(model)
    with _ranks.counted(processes), nullcontext() if device is None else computing_on(device):
        engine = tiering.initialize(model=model, config=dict(config), **options).engine
    remember(engine, dtype)
    set_synced(engine)
    return engine


def remember(engine: DeepSpeedEngine, dtype: torch.dtype) -> None:
    """Remember that ``engine`` has its model, whose parameters had ``dtype`` before."""
    _engines[engine.module] = weakref.ref(engine), dtype


def release(model: nn.Module, device: torch.device | str | None = None) -> None:
    """End the engine of ``model``, if there is one: its parameters are ordinary again, in the dtype that they had.

    See ``Engine.release`` for ``device`` and errors.
    """
    reference, dtype = _engines.get(model, (None, torch.float32))
    engine = None if reference is None else reference()
    if engine is not None:
        engine.release(device, masters=dtype == torch.float32)
        set_synced(engine, False)
    _engines.pop(model, None)


def close(engine: DeepSpeedEngine) -> None:
    """Close ``engine``; its model has lost its parameters."""
    engine.close()
    _engines.pop(engine.module, None)


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
