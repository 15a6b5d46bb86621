"""Trainer and Fabric of Lightning on a tiered engine.

    from lightning.pytorch import Trainer
    from tiering.integrations.lightning import TieringStrategy

    Trainer(strategy=TieringStrategy(offload_optimizer="nvme", offload_parameters="nvme", nvme_path="/local_nvme"))

``TieringFabricStrategy`` is the strategy of Fabric. The import registers names for both, which ``REGISTERED`` lists:
``Trainer(strategy="tiering_stage_3_offload")``. For ``pytorch_lightning``, import
``tiering.integrations.pytorch_lightning``.
"""

from __future__ import annotations

from tiering.integrations._lightning import REGISTERED
from tiering.integrations._lightning_fabric import EngineFabricPrecision, EngineFabricStrategy
from tiering.integrations._lightning_trainer import EnginePrecision, EngineStrategy
from tiering.integrations._missing import missing

try:
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.utilities.types import LRSchedulerConfig
except ImportError as error:
    raise missing("lightning", "lightning", "lightning", error) from error

__all__ = ["REGISTERED", "TieringFabricStrategy", "TieringStrategy"]


class TieringPrecision(EnginePrecision, Precision):  # type: ignore[misc] # Lightning's classes are Any
    """The precision of an engine of the Trainer."""


class TieringStrategy(EngineStrategy, DDPStrategy):  # type: ignore[misc] # Lightning's classes are Any
    __doc__ = EngineStrategy.__doc__
    precision_type = TieringPrecision
    schedule_type = LRSchedulerConfig


class TieringFabricPrecision(EngineFabricPrecision, FabricPrecision):  # type: ignore[misc] # Lightning's classes are Any
    """The precision of an engine of Fabric."""


class TieringFabricStrategy(EngineFabricStrategy, FabricDDPStrategy):  # type: ignore[misc] # Lightning's classes are Any
    __doc__ = EngineFabricStrategy.__doc__
    precision_type = TieringFabricPrecision


for _name, _arguments in REGISTERED.items():
    _description = f"a tiered engine with {_arguments or 'the defaults'}"
    StrategyRegistry.register(_name, TieringStrategy, description=_description, **_arguments)
    STRATEGY_REGISTRY.register(_name, TieringFabricStrategy, description=_description, **_arguments)
