"""What lives on the tiers: the tenants of a Workload, each with its pieces. Pure.

This list is the only one. From it come the mandatory bytes and the refusals of a plan, the use of the host budget,
the lines and the traffic of the plan, the sections of the swap space, and the windows through which pieces stream. The
code that keeps the bytes of a tenant makes homes for its pieces (`Tiers.home`). A home on NVMe is an extent, which
orders its transfers, or ranges of a user's files, which are only read (`Tiers.home_in_files`). Bytes, leases and stalls
are counted under the kind of the tenant. A further tenant is an entry of `Workload.others`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from tiering.config.training import TieringConfig, format_size
from tiering.placement.workload import ACTIVATIONS, Tenant, TenantPiece, Tier, Workload
from tiering.storage.arena import round_up

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer state"
SNAPSHOTS = "snapshots"
"""Swap space for trained state in memory, which a snapshot writes there."""


# Plans with other budgets have the same tenants.
@lru_cache(maxsize=8)
def tenants(load: Workload) -> tuple[Tenant, ...]:
    """All tenants: parameters, gradients, optimizer state, with a piece for each group; then the others."""
    return (parameters(load), gradients(load), optimizer_state(load), *load.others)


def parameters(load: Workload) -> Tenant:
    """Trained and frozen parameters: read by each pass; those that are trained are written by each step."""
    pieces = []
    for group, _ in load.alike:
        read, written = load.param_traffic(group)
        tier = Tier.DEVICE if group.persistent else load.offload_param
        nbytes, in_files = load.home_bytes(group), None
        if group.in_files is not None:
            in_files = read + load.micro_batches * group.unshards * (group.in_files.read_bytes - nbytes)
        pieces.append(
            TenantPiece(
                nbytes,
                tier,
                read,
                written,
                group.routed,
                read_in_files=in_files,
                kept=load.kept_params(group),
                flushed=load.flushed_params(group),
            )
        )
    return Tenant(PARAMETERS, load.kinds.spread(pieces), offloaded=True, with_parameters=True)


def gradients(load: Workload) -> Tenant:
    """Accumulated gradients: each backward adds to them, and the step reads them."""
    pieces = []
    for (group, _), tier in zip(load.alike, _gradient_tiers(load), strict=True):
        moved = load.grad_traffic(group)
        pieces.append(TenantPiece(load.home_grad_bytes(group), tier, moved, moved))
    return Tenant(GRADIENTS, load.kinds.spread(pieces))


def optimizer_state(load: Workload) -> Tenant:
    """Optimizer state: each step reads and writes every byte once, in tiles, into which its pieces are divided."""
    pieces = []
    for at in load.kinds.firsts:
        nbytes = load.state_bytes(load.groups[at])
        # Only the last tile of a group is not of whole pages.
        tier, flushed = load.optimizer_tiers[at], round_up(nbytes) if load.snapshots else 0
        pieces.append(TenantPiece(nbytes, tier, nbytes, nbytes, kept=load.kept_state, flushed=flushed))
    return Tenant(OPTIMIZER_STATE, load.kinds.spread(pieces), offloaded=True)


def activations(
    config: TieringConfig, *, copied: int = 0, swapped: int = 0, passes: int = 1
) -> tuple[Tenant, ...]:
    """Activations that are moved off the device, if there are any: their memory, and their first swap space.

    The swap space grows with what a pass saves, which the engine does not know before (`Tiers.lend`). A plan that knows
    it gives the bytes that a step copies off the device, and the bytes that each of its ``passes`` writes to NVMe.
    """
    place, nbytes = config.tiering.activations, round_up(config.tiering.activation_budget)
    if place == "device":
        return ()
    pieces = [TenantPiece(nbytes, Tier.HOST, copied=copied)]
    if place == "nvme" or (place == "auto" and config.zero.swap_directories):
        moved = swapped * passes
        pieces.append(TenantPiece(max(nbytes, round_up(swapped)), Tier.NVME, moved, moved, fixed=True))
    # Without swap space for optimizer state, in that of the parameters.
    with_parameters = not config.zero.offload_optimizer.swap_directories
    return (Tenant(ACTIVATIONS, tuple(pieces), with_parameters=with_parameters),)


def beside_budgets(load: Workload) -> str:
    """A sentence for plans and refusals: the memory that the budgets do not count."""
    gradients = f", up to {format_size(load.gradients_beside)} of gradients" if load.gradients_beside else ""
    moved = any(tenant.kind == ACTIVATIONS for tenant in load.others)
    kept = "activations that stay on the device" if moved else "activations"
    return f"Not counted in the budgets: {kept}{gradients}, and the memory of Python and torch"


def with_windows(everything: Iterable[Tenant]) -> list[Tenant]:
    """Those whose pieces stream through a window of their own.

    Parameters stream through the fetch window or the working memory, optimizer state through staging.
    """
    return [tenant for tenant in everything if tenant.kind not in (PARAMETERS, OPTIMIZER_STATE)]


def _gradient_tiers(load: Workload) -> list[Tier]:
    """The slowest tier allowed for the gradients of each kind of groups."""
    tiers, streamed = [], {}
    for kind, (at, (group, count)) in enumerate(zip(load.kinds.firsts, load.alike, strict=True)):
        # Groups that stay open for a whole pass would occupy the window all that time, so their gradients stay in
        # memory. A frozen group has no gradients, and needs no window.
        stays = load.stay_open[at] or not group.trainable_numel
        tier = load.optimizer_tiers[at]
        tiers.append(Tier.HOST if tier is Tier.NVME and stays else tier)
        if tiers[kind] is Tier.NVME:
            streamed[kind] = load.home_grad_bytes(group), count
    for kind in _too_large_to_stream(streamed):
        tiers[kind] = Tier.HOST
    return tiers


def _too_large_to_stream(streamed: Mapping[int, tuple[int, int]]) -> list[int]:
    """The keys of pieces that need less memory than the window through which they would stream to NVMe.

    ``streamed``: the bytes of a piece, and the number of these. For example an embedding that is much larger than the
    blocks: the window has room for two of the largest piece. Of equal pieces either all stream or none, because the
    window has its size as long as one does.
    """
    sizes = sorted(((round_up(nbytes), key) for key, (nbytes, _) in streamed.items()), reverse=True)
    count_kept, stay = 0, 0
    least = 2 * sizes[0][0] if sizes else 0
    for count, (nbytes, key) in enumerate(sizes, start=1):
        stay += nbytes * streamed[key][1]
        window = 2 * sizes[count][0] if count < len(sizes) else 0
        if stay + window < least:
            count_kept, least = count, stay + window
    return [key for _, key in sizes[:count_kept]]
