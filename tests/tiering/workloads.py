"""Models to be planned for: one that is counted by hand, any, and the budgets at which a plan for them begins."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st

from tiering.config.step_policy import StepPolicy
from tiering.config.training import parse_size
from tiering.errors import PlacementError
from tiering.placement.group_sizes import GroupSizes, InFiles
from tiering.placement.placement import make_plan
from tiering.placement.plan import Budgets, Plan
from tiering.placement.slots import SMALLEST_TILE
from tiering.placement.workload import DiskRate, Tenant, TenantPiece, Tier, Workload
from tiering.storage.arena import PAGE

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
PLENTY = 1 << 50
MIB = 1 << 20
NUMEL = 8 * SMALLEST_TILE
STEPS = (StepPolicy.AFTER, StepPolicy.DEFERRED, StepPolicy.IN_BACKWARD)


def example(**changes: object) -> Workload:
    """Three blocks of 8 x 2048 trainable elements in bf16, one micro-batch, bf16 gradients, all on NVMe."""
    groups = tuple(GroupSizes(f"layers.{i}", 2 * NUMEL, NUMEL) for i in range(3))
    load = Workload(
        groups=groups,
        micro_batches=1,
        compute_itemsize=2,
        grad_itemsize=2,
        state_tensors=2,
        offload_param=NVME,
        offload_optimizer=NVME,
        cache_in_host=False,
        sub_group_numel=SMALLEST_TILE,
        prefetch_bytes=0,
        device_is_host=True,
    )
    return replace(load, **changes)


@st.composite
def cached_keys(draw: st.DrawFn) -> Tenant:
    """A tenant of which the engine knows nothing: its pieces may live down to any tier."""
    pieces = []
    for _ in range(draw(st.integers(0, 4))):
        read, written = (draw(st.integers(0, 1 << 20)) for _ in range(2))
        tier, nbytes = (
            draw(st.sampled_from([DEVICE, HOST, NVME, NVME, NVME])),
            PAGE * draw(st.integers(1, 100)),
        )
        if tier is NVME and draw(st.booleans()):
            # Swap space whose traffic is not planned, as that of activations.
            pieces.append(TenantPiece(nbytes, tier, fixed=True))
        else:
            pieces.append(TenantPiece(nbytes, tier, read, written))
    return Tenant("cached keys", tuple(pieces), offloaded=draw(st.booleans()))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    itemsize = draw(st.sampled_from([2, 4]))
    groups = []
    for index in range(draw(st.integers(1, 8))):
        trained, frozen = draw(st.integers(0, 40)), draw(st.integers(0, 10))
        numel = max(1, trained + frozen) * SMALLEST_TILE
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        fp32 = itemsize == 2 and draw(st.integers(0, 5)) == 0
        persistent = draw(st.integers(0, 7)) == 0
        param_bytes = numel * (4 if fp32 else itemsize)
        in_files = None
        if not trained and not persistent and draw(st.booleans()):
            in_files = InFiles(
                param_bytes + draw(st.integers(-100, 8 * PAGE)), PAGE * draw(st.integers(0, 8))
            )
        groups.append(
            GroupSizes(
                name=f"g{index}",
                param_bytes=param_bytes,
                trainable_numel=trained * SMALLEST_TILE,
                parent=parent,
                persistent=persistent,
                uses=draw(st.integers(1, 3)),
                fp32=fp32,
                in_files=in_files,
            )
        )
    device_is_host = draw(st.booleans())
    # Trained and frozen parameters of one module.
    for first, second in itertools.pairwise(range(len(groups))):
        pair = groups[first], groups[second]
        if pair[0].beside is None and not any(each.persistent for each in pair) and draw(st.booleans()):
            groups[first] = replace(pair[0], beside=second)
            groups[second] = replace(pair[1], beside=first, parent=pair[0].parent)
    return Workload(
        groups=tuple(groups),
        micro_batches=draw(st.integers(1, 3)),
        compute_itemsize=itemsize,
        grad_itemsize=draw(st.sampled_from([2, 4])),
        state_tensors=draw(st.sampled_from([0, 1, 2])),
        offload_param=draw(st.sampled_from([DEVICE, HOST, NVME, NVME])),
        offload_optimizer=draw(st.sampled_from([DEVICE, HOST, NVME, NVME])),
        cache_in_host=draw(st.integers(0, 3)) > 0,
        sub_group_numel=draw(st.integers(1, 50)) * 1000,
        prefetch_bytes=draw(st.integers(0, 1 << 20)),
        device_is_host=device_is_host,
        verified_files=draw(st.sampled_from([0, 0, 1, 2])),
        fetch_by_copy=not device_is_host or draw(st.booleans()),
        offload_ratio=draw(st.just(1.0) | st.floats(0, 1)),
        update_on_device=0.0 if device_is_host else draw(st.sampled_from([0.0, 0.0, 0.4, 1.0])),
        split=itemsize == 2 and draw(st.booleans()),
        moment_itemsize=draw(st.sampled_from([4, 2])),
        can_split=itemsize == 2,
        step=draw(st.sampled_from(STEPS)),
        versions=draw(st.sampled_from([1, 1, 2])),
        snapshots=draw(st.sampled_from([False, False, True])),
        others=tuple(draw(st.lists(cached_keys(), max_size=1))),
        staged_seconds=draw(st.sampled_from([0.0, 0.1, 10.0])),
        staged_numel=draw(st.sampled_from([1, 3 * SMALLEST_TILE, 16 << 20])),
        disk=draw(st.none() | st.builds(DiskRate, st.integers(1, 1 << 30), st.booleans())),
    )


# Budgets around what such workloads need, so that plans, spills and refusals all occur.
budgets = st.builds(
    Budgets,
    st.integers(0, 3 * MIB) | st.just(PLENTY),
    st.integers(0, 6 * MIB),
    st.integers(0, 12 * MIB) | st.just(PLENTY),
)


def planned(load: Workload, limits: Budgets) -> Plan:
    """A plan just within budgets: every refusal raises the budget that it names by a little."""
    for _ in range(400):
        try:
            return make_plan(load, limits)
        except PlacementError as refusal:
            message = str(refusal)
        assert message.startswith("[TIER-PLAN] ")
        assert sum(character.isdigit() for character in message) >= 2
        (tier,) = (tier for tier in Tier if f"raise {tier.value}_budget" in message)
        limit = limits.of(tier)
        limits = replace(limits, **{tier.value: limit + limit // 16 + PAGE})
    raise AssertionError(f"raising the budgets that the messages name does not help: {message}")


def followed(load: Workload, limits: Budgets, times: int = 20) -> Plan:
    """A plan within budgets that were raised to just the number that each refusal names, each ``times`` at most."""
    refusals = Counter[Tier]()
    while True:
        try:
            return make_plan(load, limits)
        except PlacementError as refusal:
            message = str(refusal)
        (tier,) = (tier for tier in Tier if f"raise {tier.value}_budget" in message)
        match = re.search(rf"raise {tier.value}_budget to at least ([\d.]+ \w+)", message) or re.search(
            rf"{tier.value} needs (?:at least )?([\d.]+ \w+)", message
        )
        assert match is not None, message
        number = parse_size(match[1])
        assert number > limits.of(tier), message
        limits = replace(limits, **{tier.value: number})
        refusals[tier] += 1
        assert refusals[tier] <= times, message
