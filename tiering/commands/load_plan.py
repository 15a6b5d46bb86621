"""The plan to load a checkpoint and continue training, from the names of its parameters, without the model.

The engine forms groups from the modules of a model. Here they are derived from the names, with the same result for most
models: parameters with an equal prefix up to the first number ("model.layers.3") form a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tiering.checkpoint.manifest import KEPT, Manifest, StoredParameter
from tiering.config import ds_config
from tiering.config.optimizer import RULES
from tiering.errors import ConfigError
from tiering.placement.configured import StateKept, configured_state, make_workload
from tiering.placement.group_sizes import QUANTUM, GroupSizes
from tiering.placement.workload import ITEMSIZES
from tiering.planning.plan_report import PlanReport, report
from tiering.planning.rates import Rates
from tiering.planning.request import ModelSize
from tiering.planning.setting import Setting
from tiering.storage.arena import round_up
from tiering.weights.files import nbytes_of

_PERSISTENT = "persistent"
_ROOT = "root"


def configuration(manifest: Manifest, swap_directory: Path) -> dict[str, Any]:
    """A DeepSpeed configuration to continue training, which offloads to ``swap_directory`` if memory is too small."""
    if manifest.precision not in ITEMSIZES:
        raise ConfigError(f"unsupported precision {manifest.precision!r}; supported: {', '.join(ITEMSIZES)}")
    offload = {"device": "nvme", "nvme_path": str(swap_directory)}
    optimizer: dict[str, Any] = {"type": manifest.optimizer if manifest.optimizer in RULES else "AdamW"}
    if optimizer["type"] == "SGD" and manifest.kinds:
        optimizer["params"] = {"momentum": 0.9}
    # In a DeepSpeed configuration, "Adam" means AdamW by default.
    if optimizer["type"] == "Adam":
        optimizer["params"] = {"adam_w_mode": False}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    if manifest.precision != "fp32":
        config[manifest.precision] = {"enabled": True}
    zero = {"stage": 3, "offload_param": offload, "offload_optimizer": offload}
    return config | {"optimizer": optimizer, "zero_optimization": zero}


def plan_to_load(manifest: Manifest, swap_directory: Path, *, gpu_memory: int | None = None) -> PlanReport:
    """The plan of the checkpoint's model on one rank of this machine, or remedies if it does not fit.

    Raises ConfigError for an unsupported precision or optimizer, SwapSpaceError for an unusable ``swap_directory``.
    """
    config, _ = ds_config.load(configuration(manifest, swap_directory))
    parameters = {**manifest.parameters, **manifest.excluded}
    numel = sum(each.numel for each in parameters.values())
    groups = _groups(parameters, config.zero.persistence_threshold, ITEMSIZES[config.precision])
    state = StateKept(len(manifest.kinds)) if manifest.optimizer else configured_state(config)
    on_gpu = gpu_memory is not None
    load = make_workload(config, groups, state, on_gpu=on_gpu, world_size=1, fetch_by_copy=on_gpu)
    return report(ModelSize("the model", numel), load, config, Setting(gpu_memory=gpu_memory), Rates())


def _groups(
    parameters: Mapping[str, StoredParameter], persistence_threshold: int, itemsize: int
) -> Iterator[GroupSizes]:
    members: dict[str, list[StoredParameter]] = {}
    names = _own_groups(parameters)
    for name, stored in parameters.items():
        small = stored.numel < max(1, persistence_threshold)
        members.setdefault(_PERSISTENT if small else names[name], []).append(stored)
    around = list(members).index(_ROOT) if _ROOT in members else None
    for name, stored_parameters in members.items():
        numel = round_up(sum(_flat_numel(each, itemsize) for each in stored_parameters), QUANTUM)
        trained = round_up(sum(each.numel for each in stored_parameters if each.trained), QUANTUM)
        persistent = name == _PERSISTENT
        parent = None if persistent or name == _ROOT else around
        uses = 0 if persistent else 1
        largest = max((each.numel for each in stored_parameters if each.trained), default=0)
        yield GroupSizes(name, numel * itemsize, trained, parent, persistent, uses, largest_trained=largest)


def _flat_numel(stored: StoredParameter, itemsize: int) -> int:
    """The elements of ``itemsize`` bytes that the parameter takes: it is cast to them, or keeps its dtype."""
    if stored.dtype in KEPT:
        return -(-nbytes_of(stored.dtype, stored.numel) // itemsize)
    return stored.numel


def _own_groups(parameters: Mapping[str, StoredParameter]) -> dict[str, str]:
    """The group of each parameter by name: its block, its module if that exceeds the mean block, or the root."""
    homes = {name: _home(name) for name in parameters}
    numels: dict[tuple[str, bool], int] = {}
    for name, home in homes.items():
        numels[home] = numels.get(home, 0) + parameters[name].numel
    blocks = [numel for (_, is_block), numel in numels.items() if is_block]
    mean = sum(blocks) / len(blocks) if blocks else 0
    return {
        name: home if is_block or 0 < mean < numels[home, is_block] else _ROOT
        for name, (home, is_block) in homes.items()
    }


def _home(name: str) -> tuple[str, bool]:
    """The module that a parameter belongs to, and whether that is a block."""
    parts = name.split(".")
    for depth, part in enumerate(parts[:-1], 1):
        if part.isdecimal():
            return ".".join(parts[:depth]), True
    return ".".join(parts[:-1]), False
