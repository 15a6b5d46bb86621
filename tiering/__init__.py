"""Memory tiering for PyTorch training: the public API, with DeepSpeed's names.

    import tiering as deepspeed
    engine, optimizer, dataloader, lr_scheduler = deepspeed.initialize(model=model, config="ds_config.json")

Public are the names in ``__all__``, DeepSpeed's import paths (zero, comm, accelerator, checkpointing, ops, runtime,
utils), ``tiering.sequence``, ``tiering.integrations``, ``tiering.errors``, and ``tiering.planning`` for estimates in
Python. Modules with an underscore and packages that say "internal" may change at any time.

Names are resolved on first use (see _lazy.py), so that ``import tiering`` loads neither torch nor the engine.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tiering import _lazy
from tiering._module_finder import FINDER
from tiering._version import __version__ as __version__

if TYPE_CHECKING:
    from tiering import accelerator, checkpointing, comm, ops, runtime, sequence, utils, zero
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
    from zero3.building.quantization import quantize
    from zero3.building.tiling import tile
    from zero3.checkpoint.saving import Saving
    from zero3.deepspeed.accelerator import get_accelerator
    from zero3.deepspeed.arguments import add_config_arguments
    from zero3.deepspeed.configuration import DeepSpeedConfig, DeepSpeedConfigError
    from zero3.deepspeed.distributed import init_distributed
    from zero3.deepspeed.engine import DeepSpeedEngine
    from zero3.deepspeed.logs import log_dist, logger
    from zero3.deepspeed.values import TORCH_DISTRIBUTED_DEFAULT_PORT, version
    from zero3.engine.engine import Engine
    from zero3.initialize import EngineParts, initialize
    from zero3.passes.chunked_loss import chunked_cross_entropy
    from zero3.setup.plan_for import measure_rates, plan_for
    from zero3.state.access import gathered

if FINDER not in sys.meta_path:
    sys.meta_path.append(FINDER)

__getattr__, __dir__ = _lazy.names(
    __name__,
    {
        "tiering.errors": (
            *("ArenaError", "CheckpointError", "ConfigError", "EngineStateError", "PlacementError"),
            *("ResidencyError", "SwapError", "SwapSpaceError", "TieringError", "WeightsError"),
        ),
        "zero3.state.access": ("gathered",),
        "zero3.deepspeed.accelerator": ("get_accelerator",),
        "zero3.deepspeed.arguments": ("add_config_arguments",),
        "zero3.deepspeed.configuration": ("DeepSpeedConfig", "DeepSpeedConfigError"),
        "zero3.deepspeed.distributed": ("init_distributed",),
        "zero3.deepspeed.logs": ("log_dist", "logger"),
        "zero3.deepspeed.values": ("TORCH_DISTRIBUTED_DEFAULT_PORT", "version"),
        "zero3.deepspeed.engine": ("DeepSpeedEngine",),
        "zero3.engine.engine": ("Engine",),
        "zero3.initialize": ("EngineParts", "initialize"),
        "zero3.passes.chunked_loss": ("chunked_cross_entropy",),
        "zero3.setup.plan_for": ("measure_rates", "plan_for"),
        "zero3.checkpoint.saving": ("Saving",),
        "zero3.building.quantization": ("quantize",),
        "zero3.building.tiling": ("tile",),
    },
    submodules=("accelerator", "checkpointing", "comm", "ops", "runtime", "sequence", "utils", "zero"),
)

__all__ = [
    "TORCH_DISTRIBUTED_DEFAULT_PORT",
    "ArenaError",
    "CheckpointError",
    "ConfigError",
    "DeepSpeedConfig",
    "DeepSpeedConfigError",
    "DeepSpeedEngine",
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
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "chunked_cross_entropy",
    "comm",
    "gathered",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "measure_rates",
    "ops",
    "plan_for",
    "quantize",
    "runtime",
    "sequence",
    "tile",
    "utils",
    "version",
    "zero",
]
