"""Trainer of ``pytorch_lightning`` on a tiered engine. See lightning.py for the Trainer of ``lightning``."""

from __future__ import annotations

from tiering.integrations._lightning import REGISTERED
from tiering.integrations._lightning_trainer import EnginePrecision, EngineStrategy
from tiering.integrations._missing import missing

try:
    from pytorch_lightning.plugins.precision import Precision
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
    from pytorch_lightning.utilities.types import LRSchedulerConfig
except ImportError as error:
    raise missing("pytorch_lightning", "pytorch_lightning", "lightning", error) from error

__all__ = ["REGISTERED", "TieringStrategy"]


class TieringPrecision(EnginePrecision, Precision):  # type: ignore[misc] # Lightning's classes are Any
    """The precision of an engine of the Trainer."""


class TieringStrategy(EngineStrategy, DDPStrategy):  # type: ignore[misc] # Lightning's classes are Any
    __doc__ = EngineStrategy.__doc__
    precision_type = TieringPrecision
    schedule_type = LRSchedulerConfig


for _name, _arguments in REGISTERED.items():
    _description = f"a tiered engine with {_arguments or 'the defaults'}"
    StrategyRegistry.register(_name, TieringStrategy, description=_description, **_arguments)
