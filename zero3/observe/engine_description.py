"""What an engine tells of itself once, when it is built."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace

import torch

from tiering.config.training import TieringConfig
from tiering.placement.plan import Tier
from tiering.placement.workload import settle_dtypes
from tiering.telemetry import ConfigurationStatus, Description, SettingStatus
from tiering.version import __version__
from zero3.parts import Assembly


def describe(
    parts: Assembly, config: TieringConfig, configuration: ConfigurationStatus | None
) -> Description:
    """The engine that is made of ``parts``, and of ``configuration``, if it came from one."""
    parameters = sum(piece.numel for group in parts.groups for piece in group.layout.pieces)
    if configuration is not None:
        settled = _settled(parts, config)
        settings = [_filled_in(one, settled) for one in configuration.settings]
        configuration = replace(configuration, settings=settings)
    return Description(
        device=_device(parts.device),
        versions={
            "tiering": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "linux": platform.release(),
        },
        configuration=configuration,
        plan=parts.plan.status(parameters),
    )


def _settled(parts: Assembly, config: TieringConfig) -> Mapping[str, object]:
    """What an "auto" came to, where only the machine and the model say; budgets are those of the node."""
    dtypes = settle_dtypes(config, whole_groups=parts.plan.workload.whole_groups)
    settled: dict[str, object] = {
        f"tiering.{tier.value}_budget": parts.plan.budgets.of(tier) * parts.world.local_size for tier in Tier
    }
    settled |= {"tiering.grad_accum_dtype": dtypes.grad, "tiering.reduce_dtype": dtypes.reduce}
    if parts.tiers.aio is not None:
        settled["tiering.io.engine"] = parts.tiers.aio.engine
    return settled


def _filled_in(setting: SettingStatus, settled: Mapping[str, object]) -> SettingStatus:
    if setting.value != "auto" or setting.key not in settled:
        return setting
    return replace(setting, value=settled[setting.key], origin="auto")


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_name(device)}"
