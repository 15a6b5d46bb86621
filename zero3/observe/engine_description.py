"""The description that an engine publishes once, when it is built."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tiering._version import __version__
from tiering.config.training import TieringConfig
from tiering.placement.configured import settle_dtypes
from tiering.placement.workload import Tier
from tiering.telemetry import ConfigurationStatus, Description, SettingStatus, as_text, job_labels
from zero3.device.tiers import Tiers
from zero3.params.layout import product
from zero3.params.param_group import ParamGroup


def describe(
    config: TieringConfig,
    configuration: ConfigurationStatus | None,
    *,
    links: Mapping[str, str],
    tiers: Tiers,
    groups: Sequence[ParamGroup],
    local_size: int,
) -> Description:
    """Describe an engine with ``groups`` on ``tiers``, on a node with ``local_size`` ranks.

    ``configuration`` is the file or dict that ``config`` was read from, if there is one. ``links`` are those of the
    monitors; the configuration may have others.
    """
    parameters = sum(product(piece.shape) for group in groups for piece in group.layout.pieces)
    if configuration is not None:
        settled = _settled(config, tiers, local_size)
        settings = [_filled_in(setting, settled) for setting in configuration.settings]
        configuration = replace(configuration, settings=settings)
    return Description(
        device=_device(tiers.device),
        versions={
            "tiering": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "linux": platform.release(),
        },
        configuration=configuration,
        plan=tiers.plan.status(parameters),
        labels=job_labels(config.tiering.telemetry.labels),
        links={
            as_text(name): as_text(place)
            for name, place in {**links, **config.tiering.telemetry.links}.items()
        },
    )


def _settled(config: TieringConfig, tiers: Tiers, local_size: int) -> Mapping[str, object]:
    """The values of "auto" settings that depend on the machine and the model; budgets are those of the node."""
    plan = tiers.plan
    dtypes = settle_dtypes(config, whole_groups=plan.workload.whole_groups)
    settled: dict[str, object] = {
        f"tiering.{tier.value}_budget": plan.budgets.of(tier) * local_size for tier in Tier
    }
    settled |= {"tiering.grad_accum_dtype": dtypes.grad, "tiering.reduce_dtype": dtypes.reduce}
    if tiers.aio is not None:
        settled["tiering.io.engine"] = tiers.aio.engine
    return settled


def _filled_in(setting: SettingStatus, settled: Mapping[str, object]) -> SettingStatus:
    if setting.value != "auto" or setting.key not in settled:
        return setting
    return replace(setting, value=settled[setting.key], origin="auto")


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} {torch.cuda.get_device_name(device)}"
