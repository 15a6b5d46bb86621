"""DeepSpeed's groups of ranks. Here all ranks are data parallel: each other kind of group has one rank."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tiering.errors import ConfigError, EngineStateError


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Does nothing. Raises ConfigError for experts that are parallel over several ranks."""
    if ep_size != 1:
        raise ConfigError(
            f"groups.initialize(ep_size={ep_size}): expert parallelism is not supported; leave ep_size at 1"
        )


def get_data_parallel_group() -> ProcessGroup:
    """The group of all ranks. Raises EngineStateError before it exists."""
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise EngineStateError("there is no process group yet; call deepspeed.init_distributed() first")
    return dist.group.WORLD


def get_data_parallel_world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    """The rank of this process."""
    return dist.get_rank(get_data_parallel_group())


def _get_data_parallel_group_ranks() -> range:
    return range(get_data_parallel_world_size())


def _get_broadcast_src_rank() -> int:
    return 0


def get_model_parallel_world_size() -> int:
    """The number of ranks that share one sample: 1."""
    return 1


def get_model_parallel_rank() -> int:
    """The rank of this process among those that share one sample: 0."""
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
# DeepSpeed's code and its users call these across modules in spite of the underscore.
_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = _get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank
