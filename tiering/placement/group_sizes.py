"""The sizes of a ParamGroup, and the alignment and padding of the parameters in its flat tensor. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import NamedTuple

from tiering.storage.arena import PAGE, round_up

# Bytes at which each parameter in a flat tensor starts: a multiple of every vector width, so that a placement cannot
# change the path that a kernel takes.
PARAM_ALIGNMENT = 256
# Elements of a memory page in the smallest dtype.
QUANTUM = PAGE // 2
# Elements of a block whose squares are summed together (optim_cpu.kernels.SQUARE_BLOCK). No shard ends inside of one.
SQUARE_BLOCK = 4096


class InFiles(NamedTuple):
    """Parameters whose bytes a user's files have as compute needs them, so that they can be read where they are.

    A fetch of a rank's part reads ``read_bytes``, whole pages, and lands in ``slack`` bytes of memory more than the
    part has. Both are those of the rank that needs most. With fused experts, ``read_bytes`` are those of all of them,
    and the slack is that of one.
    """

    read_bytes: int
    slack: int


@dataclass(frozen=True)
class GroupSizes:
    """The sizes of a whole ParamGroup, padded so that the ranks' shards are equal."""

    name: str
    # Bytes of the flat tensor in the compute dtype.
    param_bytes: int
    # Elements with gradients and optimizer state.
    trainable_numel: int
    # Index of the group whose modules enclose those of this group.
    parent: int | None = None
    # Small parameters that never leave the device.
    persistent: bool = False
    # Unshards per forward pass.
    uses: int = 1
    # Those that backward repeats: all but the uses of a frozen embedding.
    uses_in_backward: int | None = None
    # Parameters, gradients and sent gradients are fp32, whatever the dtypes of other groups.
    fp32: bool = False
    # Elements of the largest trainable parameter, without padding.
    largest_trained: int = 0
    # Gradients per backward of one process: one for each use of a tied parameter.
    parts: int = 1
    # Index of the other group of the same modules: one is trained, the other frozen.
    beside: int | None = None
    # An expert: a pass uses the group only if a token is routed to it.
    routed: bool = False
    # What a read of the parameters from a user's files needs; None if they are in swap space.
    in_files: InFiles | None = None
    # Bytes of one expert, if the group has all experts of a module: they are unsharded one after the other.
    expert_bytes: int = 0

    @property
    def unshards(self) -> int:
        """Unshards per forward and backward pass."""
        return self.uses + (self.uses if self.uses_in_backward is None else self.uses_in_backward)


# The fields of GroupSizes that name neither the group nor others.
sizes_of = attrgetter(
    *(field.name for field in fields(GroupSizes) if field.name not in ("name", "parent", "beside"))
)


def exchanged_at_once(numel: int, bucket: int, world_size: int) -> int:
    """The elements of ``numel`` that ranks exchange at once: at most ``bucket``, but whole pages of each rank."""
    return min(numel, max(QUANTUM, bucket // world_size // QUANTUM * QUANTUM) * world_size)


def shard_quantum(world_size: int) -> int:
    """Elements to which the shards of ``world_size`` ranks are padded."""
    return QUANTUM if world_size == 1 else SQUARE_BLOCK


def start_after(offset: int, numel: int, itemsize: int, world_size: int) -> int:
    """The first element of a parameter of ``numel`` elements that follows ``offset`` others in a flat tensor.

    Between ranks a shard may end at any multiple of SQUARE_BLOCK: a parameter begins at one, or lies between two.
    """
    start = round_up(offset, PARAM_ALIGNMENT // itemsize)
    within = start % SQUARE_BLOCK + numel <= SQUARE_BLOCK
    return start if world_size == 1 or within else round_up(start, SQUARE_BLOCK)
