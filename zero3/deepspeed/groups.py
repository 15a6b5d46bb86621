"""DeepSpeed's groups of ranks, by the mesh of the last ``initialize``: without one, all ranks are data parallel."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tiering.errors import ConfigError, EngineStateError
from zero3.ranks.mesh import MeshPlace

_place: MeshPlace | None = None


def set_place(place: MeshPlace) -> None:
    """``initialize`` has placed this rank in a mesh."""
    global _place
    _place = place


def _here() -> MeshPlace:
    """The place of this rank; that without a mesh if the ranks have joined anew."""
    ranks = dist.get_world_size(_all_ranks())
    if _place is not None and _place.data_size * _place.sequence_size == ranks:
        return _place
    return MeshPlace(dist.get_rank(), ranks)


def _all_ranks() -> ProcessGroup:
    """The group of all ranks. Raises EngineStateError before it exists."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise EngineStateError("there is no process group yet; call deepspeed.init_distributed() first")
    return dist.group.WORLD


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Does nothing. Raises ConfigError for experts that are parallel over several ranks."""
    if ep_size != 1:
        raise ConfigError(
            f"groups.initialize(ep_size={ep_size}): expert parallelism is not supported; leave ep_size at 1"
        )


def get_data_parallel_group() -> ProcessGroup:
    """The group of all ranks. Raises EngineStateError before it exists, and if ranks share sequences."""
    if _here().sequence_size > 1:
        raise EngineStateError(
            "ranks share sequences, and the engine has no group of the ranks that load different data; use"
            " mesh['data'].get_group() of the mesh that was passed to initialize"
        )
    return _all_ranks()


def get_data_parallel_world_size() -> int:
    """The number of ranks that load different data."""
    return _here().data_size


def get_data_parallel_rank() -> int:
    """The rank of this process among those that load different data."""
    return _here().data_rank


def _get_sequence_data_parallel_group() -> ProcessGroup:
    return _all_ranks()


def _get_sequence_data_parallel_world_size() -> int:
    return dist.get_world_size(_all_ranks())


def _get_sequence_data_parallel_rank() -> int:
    return dist.get_rank(_all_ranks())


def _get_sequence_parallel_world_size() -> int:
    return _here().sequence_size if dist.is_initialized() else 1


def _get_sequence_parallel_rank() -> int:
    return _here().sequence_rank if dist.is_initialized() else 0


def _get_data_parallel_group_ranks() -> range:
    get_data_parallel_group()
    return range(get_data_parallel_world_size())


def _get_broadcast_src_rank() -> int:
    return 0


def get_model_parallel_world_size() -> int:
    """The number of ranks that share one model: 1."""
    return 1


def get_model_parallel_rank() -> int:
    """The rank of this process among those that share one model: 0."""
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
# DeepSpeed's code and its users call these across modules in spite of the underscore.
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
