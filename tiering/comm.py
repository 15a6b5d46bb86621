"""``deepspeed.comm``: torch.distributed with init_distributed; queries such as get_rank also work in one process.

Collectives between CPUs report the rank that does not join: see zero3/deepspeed/communication.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from zero3.deepspeed.communication import (
        all_gather,
        all_gather_into_tensor,
        all_gather_object,
        all_gather_single,
        all_reduce,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        broadcast_object_list,
        gather,
        gather_object,
        inference_all_reduce,
        log_summary,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_tensor,
        scatter,
        scatter_object_list,
        send,
    )
    from zero3.deepspeed.distributed import (
        get_local_rank,
        get_rank,
        get_world_size,
        init_distributed,
    )

# DeepSpeed has modules below this one: see _module_finder.py.
__path__: list[str] = []
__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "inference_all_reduce",
    "init_distributed",
    "log_summary",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]
_SETUP = ("get_local_rank", "get_rank", "get_world_size", "init_distributed")
__getattr__, __dir__ = _lazy.names(
    __name__,
    {
        "zero3.deepspeed.distributed": _SETUP,
        "zero3.deepspeed.communication": [name for name in __all__ if name not in _SETUP],
    },
    fallback="torch.distributed",
)
