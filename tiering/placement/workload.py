"""From a configuration and the sizes of a model's groups to the Workload that the planner places. No torch.

The engine measures the groups of a model that is here, ``sizing`` those of one that is not; the rest is the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tiering.config.training import OptimizerConfig, TieringConfig
from tiering.errors import ConfigError
from tiering.placement.plan import FP32, GroupSizes, Tier, Workload

ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
OFFLOAD_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


class Dtypes(NamedTuple):
    """By name: what parameters compute in, gradients accumulate in, and are sent to other ranks in."""

    compute: str
    grad: str
    reduce: str


class StateKept(NamedTuple):
    """What an optimizer keeps per element beside the parameter: how many moments, and in which form.

    ``whole_groups``: it has no kernel here, and steps each group in one piece, in fp32.
    """

    tensors: int
    split: bool = False
    moment_itemsize: int = FP32
    whole_groups: bool = False


def settle_dtypes(config: TieringConfig, *, whole_groups: bool = False) -> Dtypes:
    """Gradients accumulate in the compute dtype for one micro-batch, else in fp32, unless configured.

    They are sent as they are then. An optimizer without a kernel takes fp32 gradients: what is fp32 already needs no
    second copy.
    """
    compute, grad, reduce = config.precision, config.tiering.grad_accum_dtype, config.tiering.reduce_dtype
    if grad == "auto":
        one_pass = config.gradient_accumulation_steps == 1 and not whole_groups
        grad = compute if one_pass else "fp32"
    if reduce == "auto":
        reduce = compute if config.zero.stage >= 2 else grad
    return Dtypes(compute, grad, reduce)


def configured_state(config: TieringConfig) -> StateKept:
    """What the optimizer that ``config`` names keeps; AdamW's if it names none."""
    chosen = config.optimizer or OptimizerConfig()
    tensors = {"AdamW": 2, "Adam": 2, "Lion": 1, "Adagrad": 1, "SGD": 1 if chosen.momentum else 0}
    halves = config.tiering.state.split("+")
    return StateKept(tensors[chosen.type], "split" in halves, FP32 // 2 if "bf16" in halves else FP32)


def make_workload(
    config: TieringConfig,
    groups: Iterable[GroupSizes],
    state: StateKept,
    *,
    on_gpu: bool,
    world_size: int,
    fetch_by_copy: bool,
) -> Workload:
    """The Workload of ``groups`` on each of ``world_size`` ranks.

    ``fetch_by_copy``: what is read from NVMe cannot land where compute uses it. A share of updates on the device that
    is "auto" is none, until somebody knows rates (planning.update_share). Raises ConfigError for offloading that a GPU
    of this version cannot do.
    """
    if on_gpu:
        _check_offload(config, state)
    dtypes = settle_dtypes(config, whole_groups=state.whole_groups)
    itemsize = ITEMSIZES[dtypes.compute]
    zero, update = config.zero, config.tiering.update_on_device
    return Workload(
        groups=tuple(groups),
        micro_batches=config.gradient_accumulation_steps,
        compute_itemsize=itemsize,
        grad_itemsize=ITEMSIZES[dtypes.grad],
        state_tensors=state.tensors,
        offload_param=OFFLOAD_TIERS[zero.offload_param.device],
        offload_optimizer=OFFLOAD_TIERS[zero.offload_optimizer.device],
        cache_in_host=config.tiering.cache_in_host,
        sub_group_numel=zero.sub_group_size,
        prefetch_bytes=zero.prefetch_elements * itemsize,
        device_is_host=not on_gpu,
        verified_files=len(zero.swap_directories) if config.tiering.verify else 0,
        fetch_by_copy=fetch_by_copy,
        offload_ratio=zero.offload_optimizer.ratio,
        update_on_device=0.0 if not on_gpu or update == "auto" else update,
        whole_groups=state.whole_groups,
        split=state.split,
        can_split=dtypes.compute == "bf16",
        moment_itemsize=state.moment_itemsize,
        step_in_backward=config.tiering.step_in_backward,
        world_size=world_size,
        stage=zero.stage,
        reduce_itemsize=ITEMSIZES[dtypes.reduce],
    )


def _check_offload(config: TieringConfig, state: StateKept) -> None:
    """A GPU can update what it keeps the state of where the parameters are in its memory, or in host memory."""
    param, optimizer = config.zero.offload_param.device, config.zero.offload_optimizer
    reached = ("none",) if state.whole_groups else ("none", "cpu")
    if param in reached:
        return
    if optimizer.device == "none":
        raise ConfigError(
            f"offload_param.device {param!r} without offload_optimizer is not supported in this version on a GPU: it"
            " keeps the optimizer state, and updates no parameters that it cannot reach; offload both"
            + ("" if state.whole_groups else ", or set offload_param.device to 'cpu'")
        )
    if optimizer.ratio < 1:
        raise ConfigError(
            f"offload_optimizer.ratio {optimizer.ratio} keeps optimizer state on the GPU, which updates no parameters"
            f" that it cannot reach, but offload_param.device is {param!r}; set ratio to 1, or offload_param.device to"
            f" {' or '.join(map(repr, reversed(reached)))}"
        )
