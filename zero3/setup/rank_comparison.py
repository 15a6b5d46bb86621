"""Compares the configuration, the model and the weights of all ranks, which must be the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tiering.config.training import TieringConfig
from tiering.errors import ConfigError
from zero3.building.weights import Matched
from zero3.optimizer.update_rules import RULE_NAMES
from zero3.ranks.collectives import Collectives
from zero3.setup.optimizer_choice import OptimizerChoice

# Settings that may differ between ranks: each node has its own paths, budgets and I/O, and rank 0 alone reports.
_OF_NODE = {"tiering": {"io", "telemetry", "run_name", "device_budget", "host_budget", "nvme_budget"}}
_PATHS: dict[str, Any] = {"zero": {"offload_param": {"nvme_path"}, "offload_optimizer": {"nvme_path"}}}
_OF_RANK_0 = {"monitor": True, "steps_per_print": True, "wall_clock_breakdown": True}


def check_ranks_agree(
    collectives: Collectives,
    model: nn.Module,
    config: TieringConfig,
    chosen: OptimizerChoice,
    loaded: Matched | None,
) -> None:
    """Raise ConfigError, on every rank, if ranks train different parameters, or an optimizer cannot update shards."""
    if chosen.rule is None and config.zero.stage > 0:
        raise ConfigError(
            f"the {type(chosen.client).__name__} has no kernel here and steps whole parameters, but stage"
            f" {config.zero.stage} shards optimizer state over the ranks; use stage 0, or {RULE_NAMES}"
        )
    # The configuration first: the groups of a model depend on it.
    collectives.run_tables.check_same("configuration", _lines_of_config(config))
    collectives.run_tables.check_same("mesh", [collectives.world.place.shape])
    collectives.tables.check_same("model", _lines_of_model(model, chosen))
    collectives.tables.check_same("weights file", _lines_of_weights(loaded))


def _lines_of_config(config: TieringConfig) -> Iterator[str]:
    """A line for each setting that must be equal on all ranks."""
    for section, values in config.model_dump(mode="json", exclude=_OF_NODE | _PATHS | _OF_RANK_0).items():
        if isinstance(values, dict):
            yield from (f"{section}.{key} {value}" for key, value in values.items())
        else:
            yield f"{section} {values}"


def _lines_of_model(model: nn.Module, chosen: OptimizerChoice) -> Iterator[str]:
    """A line for each parameter and buffer, and for the options of each param group."""
    trained = chosen.trained
    for name, param in model.named_parameters():
        yield f"{name!r} {tuple(param.shape)} {param.dtype}{'' if param in trained else ' frozen'}"
    for name, buffer in model.named_buffers():
        yield f"buffer {name!r} {tuple(buffer.shape)} {buffer.dtype}"
    for number, group in enumerate(chosen.param_groups):
        comparable = (bool, int, float, str, tuple, type(None))
        options = {key: value for key, value in group.items() if isinstance(value, comparable)}
        yield f"param group {number} of {len(group['params'])} parameters {options}"


def _lines_of_weights(loaded: Matched | None) -> Iterator[str]:
    """A line for each tensor that is loaded."""
    sources = () if loaded is None else loaded.sources.values()
    for tensor in (part for source in sources for part in source.parts):
        yield f"{tensor.name!r} {tensor.shape} {tensor.dtype}"
