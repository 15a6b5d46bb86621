"""What the strategies of Lightning's Trainer and Fabric share: the configuration and precision of an engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiering.config import ds_config
from tiering.errors import ConfigError

if TYPE_CHECKING:
    from tiering import DeepSpeedEngine

log = logging.getLogger(__name__)

_Strategy: Any = object
"""The base of the mixins. A class that has a mixin before Lightning's class has Lightning's as the next class."""

Config = Mapping[str, Any] | str | Path
Offload = str | bool

TAG = "checkpoint"
"""The folder of the engine's checkpoint in a checkpoint of Lightning, which is a directory."""

REGISTERED: dict[str, dict[str, Any]] = {
    "tiering": {},
    "tiering_stage_1": {"stage": 1},
    "tiering_stage_2": {"stage": 2},
    "tiering_stage_2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "tiering_stage_3": {"stage": 3},
    "tiering_stage_3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}
"""The names of strategies, and the arguments that each stands for."""

_SECTIONS = {
    "32-true": None,
    "bf16-true": "bf16",
    "bf16-mixed": "bf16",
    "16-true": "fp16",
    "16-mixed": "fp16",
}
"""The section of the configuration for each precision. As with DeepSpeed, masters are fp32 in every precision."""


def check_precision(precision: str) -> None:
    """Raise ConfigError unless an engine computes in ``precision``, a name of Lightning ("bf16-mixed")."""
    if precision not in _SECTIONS:
        raise ConfigError(
            f"unsupported precision={precision!r}; tiering has {', '.join(map(repr, _SECTIONS))}"
        )


def configuration(
    config: Config | None,
    *,
    stage: int | None,
    offload_optimizer: Offload,
    offload_parameters: Offload,
    nvme_path: str | Path | None,
) -> dict[str, Any]:
    """``config`` as a dict, or the configuration that the other arguments describe if it is None.

    Raises ConfigError if both are given.
    """
    offloads = {
        "offload_optimizer": _device(offload_optimizer, "offload_optimizer"),
        "offload_param": _device(offload_parameters, "offload_parameters"),
    }
    if config is not None:
        if stage is not None or nvme_path is not None or any(offloads.values()):
            raise ConfigError(
                "TieringStrategy got config and arguments for stage or offload; set stage, offload_optimizer and"
                " offload_param in zero_optimization of the configuration"
            )
        return dict(ds_config.mapping_of(config))
    zero: dict[str, Any] = {"stage": 3 if stage is None else stage}
    for section, device in offloads.items():
        if device is not None:
            zero[section] = {"device": device}
            if device == "nvme":
                if nvme_path is None:
                    raise ConfigError(f"{section} to nvme needs nvme_path, a directory on the drive")
                zero[section]["nvme_path"] = str(nvme_path)
    return {"zero_optimization": zero}


def _device(offload: Offload, name: str) -> str | None:
    """The device of ``offload``; True is "cpu", as in Lightning's DeepSpeedStrategy."""
    device = {True: "cpu", False: "none"}.get(offload, offload) if isinstance(offload, bool) else offload
    if device not in ("none", "cpu", "nvme"):
        raise ConfigError(f"invalid {name}={offload!r}; it is 'none', 'cpu' or 'nvme'")
    return None if device == "none" else device


def completed(
    config: Mapping[str, Any], precision: str, *, micro_batch_size: int = 1, accumulation: int = 1
) -> dict[str, Any]:
    """``config`` with the precision and batch sizes of the loop, unless it has its own.

    Raises ConfigError if ``config`` names another precision than ``precision``.
    """
    filled = dict(config)
    section = _SECTIONS[precision]
    enabled = {name for name in ("bf16", "fp16") if (filled.get(name) or {}).get("enabled")}
    if enabled - {section} and precision != "32-true":
        raise ConfigError(
            f"precision={precision!r} of Lightning contradicts the section {min(enabled)!r} of the configuration;"
            " remove one of them"
        )
    if section is not None:
        filled[section] = {"auto_cast": True, **(filled.get(section) or {}), "enabled": True}
    if "train_batch_size" not in filled:
        filled.setdefault("train_micro_batch_size_per_gpu", micro_batch_size)
    filled.setdefault("gradient_accumulation_steps", accumulation)
    # The loop clips.
    filled.setdefault("gradient_clipping", 0.0)
    return filled


class StrategyOfEngines(_Strategy):  # type: ignore[misc] # Any
    """The arguments that the strategies of the Trainer and of Fabric share; see TieringStrategy."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        stage: int | None = None,
        offload_optimizer: Offload = "none",
        offload_parameters: Offload = "none",
        nvme_path: str | Path | None = None,
        weights: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.config = configuration(
            config,
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            nvme_path=nvme_path,
        )
        self._weights = weights

    @property
    def _builds_without_memory(self) -> bool:
        """Whether models can be built without memory for their parameters: in stage 3."""
        return (self.config.get("zero_optimization") or {}).get("stage") == 3


def is_checkpoint(path: str | Path) -> bool:
    """Whether ``path`` is a directory with a checkpoint of an engine."""
    return (Path(path) / TAG).is_dir()


def save(engine: DeepSpeedEngine, directory: str | Path, values: Mapping[str, Any]) -> None:
    """Save ``engine`` and ``values`` of the loop in ``directory``.

    Hyperparameters that are no plain values are left out, with a warning: checkpoints hold no pickled objects.
    """
    try:
        engine.save_checkpoint(directory, tag=TAG, client_state=values)
    except ConfigError as error:
        others = {key: value for key, value in values.items() if key not in _HYPERPARAMETERS}
        if len(others) == len(values):
            raise
        log.warning("the checkpoint %s is saved without hyperparameters: %s", directory, error)
        engine.save_checkpoint(directory, tag=TAG, client_state=others)


_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
