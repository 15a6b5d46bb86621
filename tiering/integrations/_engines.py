"""The engine of each model that a front end has started: another trainer of the same model ends it first."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

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
    _engines.pop(model, None)
