"""Collectives for scripts, ``tiering.comm``: those of torch.distributed, which end when a rank is lost.

torch's collectives wait for a rank that has died or hangs until the timeout of their group, for minutes, and then name
no rank. These wait as the engine's own collectives do: see peers.py. Without an engine, for work on a GPU, and with
``async_op`` they are torch's. The engine does not check their order: a script may call them for any group of ranks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tiering.config.fields import format_size
from zero3.ranks.joining import standing
from zero3.ranks.peers import has_ended, newest

log = logging.getLogger(__name__)

Collective = Callable[..., Any]

_calls: dict[str, dict[int, tuple[int, float]]] = defaultdict(dict)
"""By collective and bytes of its largest tensor: the number of calls and their duration in seconds."""


def _watched(function: Collective) -> Collective:
    """``function`` of torch.distributed; the peers of an engine, if there is one, wait for it."""
    signature = inspect.signature(function)
    label = f"{function.__name__} of the program"
    can_be_awaited = "async_op" in signature.parameters

    def follow(*args: Any, **kwargs: Any) -> Any:
        peers = newest()
        if peers is None:
            return function(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        if arguments.get("async_op") or not _between_cpus(arguments, look_at_tensors=can_be_awaited):
            return function(*args, **kwargs)
        if not can_be_awaited:
            return peers.follow_call(functools.partial(function, *args, **kwargs), label)
        work = function(**arguments | {"async_op": True})
        # None: this rank is not in the group.
        if work is not None:
            peers.follow(functools.partial(has_ended, work), label)
        return None

    @functools.wraps(function)
    def collective(*args: Any, **kwargs: Any) -> Any:
        tensors = (leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))
        nbytes = max((tensor.nbytes for tensor in tensors), default=0)
        start = time.perf_counter()
        result = follow(*args, **kwargs)
        by_size = _calls[function.__name__]
        count, seconds = by_size.get(nbytes, (0, 0.0))
        by_size[nbytes] = count + 1, seconds + time.perf_counter() - start
        return result

    return collective


def _between_cpus(arguments: dict[str, Any], *, look_at_tensors: bool) -> bool:
    """Whether the collective is one of gloo, for which the CPU waits. torch watches work on a GPU."""
    tensors = [leaf for leaf in tree_leaves(list(arguments.values())) if isinstance(leaf, Tensor)]
    if tensors and look_at_tensors:
        return all(tensor.device.type == "cpu" for tensor in tensors)
    return dist.is_initialized() and str(dist.get_backend(arguments.get("group"))) == "gloo"


all_reduce = _watched(dist.all_reduce)
reduce = _watched(dist.reduce)
broadcast = _watched(dist.broadcast)
all_gather = _watched(dist.all_gather)
all_gather_into_tensor = _watched(dist.all_gather_into_tensor)
all_gather_single = _watched(getattr(dist, "all_gather_single", dist.all_gather_into_tensor))
gather = _watched(dist.gather)
scatter = _watched(dist.scatter)
reduce_scatter = _watched(dist.reduce_scatter)
reduce_scatter_tensor = _watched(dist.reduce_scatter_tensor)
reduce_scatter_single = _watched(getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor))
all_to_all = _watched(dist.all_to_all)
all_to_all_single = _watched(dist.all_to_all_single)
all_gather_object = _watched(dist.all_gather_object)
gather_object = _watched(dist.gather_object)
scatter_object_list = _watched(dist.scatter_object_list)
broadcast_object_list = _watched(dist.broadcast_object_list)
send = _watched(dist.send)
recv = _watched(dist.recv)
_barrier = _watched(dist.barrier)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Wait for the other ranks; a single process without a group does not wait."""
    if not dist.is_initialized() and standing()[1] == 1:
        return None
    return _barrier(group, async_op=async_op, device_ids=device_ids)


def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Tensor:
    """``all_reduce`` of ``tensor`` in place, which is returned; in a single process ``tensor`` itself."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        all_reduce(tensor, op=op, group=group)
    return tensor


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Log on rank 0 the script's own collectives through this module, by kind and size. All ranks call it together.

    ``return_dict`` returns the same figures, of this rank. The time of a call with ``async_op`` is that of its start.
    ``show_straggler`` has no effect: the sidecar shows which rank the others wait for, and the engine's own traffic.
    """
    barrier()
    summary = {
        name: {nbytes: _figures(nbytes, *calls) for nbytes, calls in sorted(by_size.items())}
        for name, by_size in _calls.items()
    }
    rank, world_size = standing()
    if rank == 0:
        lines = [
            f"{name:24} {row['msg_size_str']:>12} {row['count']:8} calls {row['avg_latency_ms']:10.3f} ms each"
            for name, rows in summary.items()
            for row in rows.values()
        ]
        log.info("collectives of the script:\n%s", "\n".join(lines) or "none")
    barrier()
    if not return_dict:
        return None
    metadata = {"world_size": world_size, "rank": rank, "timestamp": datetime.now(UTC).isoformat()}
    return {"summary": summary, "straggler_analysis": None, "metadata": metadata}


def _figures(nbytes: int, count: int, seconds: float) -> dict[str, Any]:
    return {
        "count": count,
        "total_latency_ms": 1e3 * seconds,
        "avg_latency_ms": 1e3 * seconds / count,
        "tput_avg_gbps": 8e-9 * nbytes * count / seconds if seconds else 0.0,
        "msg_size_bytes": nbytes,
        "msg_size_str": format_size(nbytes),
    }
