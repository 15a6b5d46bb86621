"""``deepspeed.utils.groups``: the ranks that load different data, and those that share sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.groups import (
        _get_sequence_parallel_world_size as _get_sequence_parallel_world_size,
    )
    from zero3.deepspeed.groups import (
        get_data_parallel_group,
        get_data_parallel_rank,
        get_data_parallel_world_size,
        get_model_parallel_rank,
        get_model_parallel_world_size,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
        initialize,
    )

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "initialize",
]
_PRIVATE = (
    *("_get_data_parallel_group", "_get_data_parallel_group_ranks", "_get_data_parallel_rank"),
    *("_get_data_parallel_world_size", "_get_model_parallel_world_size", "_get_broadcast_src_rank"),
    *("_get_sequence_data_parallel_group", "_get_sequence_data_parallel_rank"),
    *("_get_sequence_data_parallel_world_size", "_get_sequence_parallel_rank"),
    "_get_sequence_parallel_world_size",
)
"""Names that DeepSpeed and its users call across modules in spite of their underscore."""
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.groups": (*__all__, *_PRIVATE)})
