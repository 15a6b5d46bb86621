"""The workload of a configuration: the tiers it allows, its dtypes with "auto" resolved, its optimizer state. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from optim_cpu.rules import UPDATE_RULES
from tiering.config.training import OptimizerConfig, StepPolicy, TieringConfig
from tiering.errors import ConfigError
from tiering.placement.group_sizes import GroupSizes
from tiering.placement.workload import FP32, ITEMSIZES, Tenant, Tier, Workload

OFFLOAD_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}


class Dtypes(NamedTuple):
    """Names of the dtypes of compute, of gradient accumulation, and of gradients sent between ranks."""

    compute: str
    grad: str
    reduce: str


class StateKept(NamedTuple):
    """The state of an optimizer per element: the number of moments, and their format.

    ``whole_groups``: the optimizer has no kernel, and updates each group in one piece, in fp32.
    """

    tensors: int
    split: bool = False
    moment_itemsize: int = FP32
    whole_groups: bool = False


def settle_dtypes(config: TieringConfig, *, whole_groups: bool = False) -> Dtypes:
    """The dtypes of ``config``, with "auto" resolved.

    Gradients accumulate in the compute dtype for one micro-batch, else in fp32. Chunks of rows (block_rows) are added
    up as micro-batches are. Gradients are sent in the compute dtype in stages 2 and 3. In stages 0 and 1, and with
    chunks, which are added up before they are sent, they are sent in the accumulation dtype. An optimizer without a
    kernel takes fp32 gradients, so accumulating in fp32 avoids a second copy.
    """
    compute, grad, reduce = config.precision, config.tiering.grad_accum_dtype, config.tiering.reduce_dtype
    has_chunks = config.tiering.block_rows is not None
    if grad == "auto":
        one_pass = config.gradient_accumulation_steps == 1 and not has_chunks and not whole_groups
        grad = compute if one_pass else "fp32"
    if reduce == "auto":
        reduce = compute if config.zero.stage >= 2 and not has_chunks else grad
    return Dtypes(compute, grad, reduce)


def configured_state(config: TieringConfig) -> StateKept:
    """The state of the optimizer in ``config``; AdamW's if it has none."""
    chosen = config.optimizer or OptimizerConfig()
    tensors = len(UPDATE_RULES[chosen.type].state_names(chosen.model_dump()))
    halves = config.tiering.state.split("+")
    return StateKept(tensors, "split" in halves, FP32 // 2 if "bf16" in halves else FP32)


def largest_group(config: TieringConfig, world_size: int) -> int | None:
    """The elements above which a block is cut into its modules, whatever the room; None if no block is.

    Ranks keep the gradients of a group until they reduce it: it has at most a bucket, as far as a module has. Where
    parameters move, the next group may be fetched beside the one that computes: each has half of what may be live.
    """
    zero = config.zero
    if config.tiering.block_rows is not None:
        return None
    bounds = [zero.reduce_bucket_elements] if world_size > 1 and zero.stage >= 2 else []
    if zero.stage >= 3 and zero.live_elements:
        bounds.append(zero.live_elements // 2)
    return min(bounds, default=None)


def _prefetched(config: TieringConfig, groups: Iterable[GroupSizes], itemsize: int) -> int:
    """The most bytes that are fetched ahead, beside the largest group."""
    zero = config.zero
    if not zero.live_elements:
        return zero.prefetch_elements * itemsize
    largest = max((group.param_bytes for group in groups if not group.persistent), default=0)
    return max(min(zero.prefetch_elements * itemsize, zero.live_elements * itemsize - largest), 0)


def make_workload(
    config: TieringConfig,
    groups: Iterable[GroupSizes],
    state: StateKept,
    *,
    on_gpu: bool,
    world_size: int,
    fetch_by_copy: bool,
    others: tuple[Tenant, ...] = (),
    finer: Iterable[Iterable[GroupSizes]] = (),
) -> Workload:
    """The Workload of ``groups`` on each of ``world_size`` ranks, with ``others`` that live on the tiers.

    ``fetch_by_copy``: reads from NVMe cannot land where compute uses the data. An ``update_on_device`` of "auto" is 0
    here, and a ``step`` of "auto" is AFTER; planning.update_share and planning.step_choice choose them. Raises
    ConfigError for offloading that is not supported on a GPU in this version.
    """
    if on_gpu:
        _check_offload(config, state)
    dtypes = settle_dtypes(config, whole_groups=state.whole_groups)
    itemsize = ITEMSIZES[dtypes.compute]
    zero, update, groups = config.zero, config.tiering.update_on_device, tuple(groups)
    return Workload(
        groups=groups,
        micro_batches=config.gradient_accumulation_steps,
        compute_itemsize=itemsize,
        grad_itemsize=ITEMSIZES[dtypes.grad],
        state_tensors=state.tensors,
        offload_param=OFFLOAD_TIERS[zero.offload_param.device],
        offload_optimizer=OFFLOAD_TIERS[zero.offload_optimizer.device],
        cache_in_host=config.tiering.cache_in_host,
        sub_group_numel=zero.sub_group_size,
        prefetch_bytes=_prefetched(config, groups, itemsize),
        device_is_host=not on_gpu,
        verified_files=len(zero.swap_directories) if config.tiering.verify else 0,
        fetch_by_copy=fetch_by_copy,
        offload_ratio=zero.offload_optimizer.ratio,
        update_on_device=0.0 if not on_gpu or update == "auto" else update,
        whole_groups=state.whole_groups,
        split=state.split,
        can_split=dtypes.compute == "bf16",
        moment_itemsize=state.moment_itemsize,
        step=StepPolicy.AFTER if config.tiering.step is StepPolicy.AUTO else config.tiering.step,
        versions=config.tiering.swap_versions,
        snapshots=config.tiering.snapshots,
        world_size=world_size,
        stage=zero.stage,
        reduce_itemsize=ITEMSIZES[dtypes.reduce],
        reduce_bucket=zero.reduce_bucket_elements,
        others=others,
        staged_seconds=config.tiering.staging.seconds,
        staged_numel=config.tiering.staging.tile_elements,
        finer=tuple(map(tuple, finer)),
    )


def _check_offload(config: TieringConfig, state: StateKept) -> None:
    """Raises ConfigError if a GPU would keep optimizer state of parameters that it cannot reach.

    It reaches parameters in its memory and in host memory; an optimizer without a kernel only the former.
    """
    param, optimizer = config.zero.offload_param.device, config.zero.offload_optimizer
    reached = ("none",) if state.whole_groups else ("none", "cpu")
    if param in reached:
        return
    if optimizer.device == "none":
        raise ConfigError(
            f"offload_param.device {param!r} without offload_optimizer is not supported in this version on a GPU: it"
            " keeps the optimizer state, but cannot reach the parameters; offload both"
            + ("" if state.whole_groups else ", or set offload_param.device to 'cpu'")
        )
    if optimizer.ratio < 1:
        raise ConfigError(
            f"offload_optimizer.ratio {optimizer.ratio} keeps optimizer state on the GPU, which cannot reach the"
            f" parameters: offload_param.device is {param!r}; set ratio to 1, or offload_param.device to"
            f" {' or '.join(map(repr, reversed(reached)))}"
        )
