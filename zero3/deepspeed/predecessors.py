"""The open engine of a model that is initialized again, as a cell of a notebook does: it ends, and the next one starts.

Scripts for DeepSpeed call ``initialize`` for a model that has an engine already, and use only the new engine.
"""

from __future__ import annotations

import logging
import weakref

from torch import nn

from tiering import _logs
from zero3.deepspeed.engine import DeepSpeedEngine

log = logging.getLogger(__name__)

_engines: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[DeepSpeedEngine], bool]]
_engines = weakref.WeakKeyDictionary()
"""The engine of each model, and whether the model was in fp32 before."""


def remember(engine: DeepSpeedEngine, *, was_fp32: bool) -> None:
    """Remember that ``engine`` has its model, whose parameters were in fp32 before, or were not."""
    _engines[engine.module] = weakref.ref(engine), was_fp32


def end_predecessor(model: nn.Module) -> None:
    """End the open engine of ``model``, if there is one: the parameters are ordinary ones in the dtype from before it.

    All ranks call this together. Raises what ``Engine.release`` raises; the engine then stays open.
    """
    reference, was_fp32 = _engines.get(model, (None, False))
    engine = None if reference is None else reference()
    if engine is None or engine.ended:
        return
    engine.give_back("another initialize", masters=was_fp32)
    log.log(
        _logs.once(logging.WARNING),
        "initialize() was called for a model with an open engine: that engine has ended, and the new one continues from"
        " the parameters, without the optimizer state",
    )
