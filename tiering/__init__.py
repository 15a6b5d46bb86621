"""Memory tiering for PyTorch training: the public face.

    engine, optimizer, dataloader, lr_scheduler = tiering.initialize(model=model, config="ds_config.json")

Names are resolved on first use, so that ``import tiering`` loads neither torch nor the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiering.errors import (
        ArenaError,
        CheckpointError,
        ConfigError,
        EngineStateError,
        PlacementError,
        ResidencyError,
        SwapError,
        SwapSpaceError,
        TieringError,
        WeightsError,
    )
    from zero3 import init as zero
    from zero3.access import gathered
    from zero3.engine import Engine
    from zero3.initialize import EngineParts, initialize
    from zero3.planning import measure_rates, plan_for
    from zero3.saving import Saving

__version__ = "0.1.0"

# name -> (module, attribute); an empty attribute means the module itself.
_LAZY = {
    "initialize": ("zero3.initialize", "initialize"),
    "Engine": ("zero3.engine", "Engine"),
    "Saving": ("zero3.saving", "Saving"),
    "EngineParts": ("zero3.initialize", "EngineParts"),
    "gathered": ("zero3.access", "gathered"),
    "plan_for": ("zero3.planning", "plan_for"),
    "measure_rates": ("zero3.planning", "measure_rates"),
    "zero": ("zero3.init", ""),
    "TieringError": ("tiering.errors", "TieringError"),
    "ConfigError": ("tiering.errors", "ConfigError"),
    "PlacementError": ("tiering.errors", "PlacementError"),
    "SwapSpaceError": ("tiering.errors", "SwapSpaceError"),
    "SwapError": ("tiering.errors", "SwapError"),
    "ArenaError": ("tiering.errors", "ArenaError"),
    "EngineStateError": ("tiering.errors", "EngineStateError"),
    "ResidencyError": ("tiering.errors", "ResidencyError"),
    "WeightsError": ("tiering.errors", "WeightsError"),
    "CheckpointError": ("tiering.errors", "CheckpointError"),
}

__all__ = [
    "ArenaError",
    "CheckpointError",
    "ConfigError",
    "Engine",
    "EngineParts",
    "EngineStateError",
    "PlacementError",
    "ResidencyError",
    "Saving",
    "SwapError",
    "SwapSpaceError",
    "TieringError",
    "WeightsError",
    "gathered",
    "initialize",
    "measure_rates",
    "plan_for",
    "zero",
]


def __getattr__(name: str) -> object:
    try:
        module, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'tiering' has no attribute {name!r}") from None
    loaded = import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
