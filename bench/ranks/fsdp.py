"""torch's FSDP2 on one rank: ``fully_shard`` on every block and the root, a fused AdamW over fp32 shards.

``settings``: ``precision``, bf16 or fp32; ``reduce``, the dtype in which gradients travel; ``ahead``: gathers do not
block, and begin before they are needed (by default they block on a CPU, which has no streams); ``whole``: parameters
stay gathered between forward and backward, as in stage 2.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from frame.reference_model import Model
from frame.training import serve_training

from .torch_loop import FUSED_ADAMW, TorchLoop


def build(reference: Model, settings: dict[str, Any]) -> TorchLoop:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = reference.build()
    numel = sum(parameter.numel() for parameter in model.parameters())
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    compute, reduce = (dtypes[settings[name]] for name in ("precision", "reduce"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    keep: dict[str, Any] = {"reshard_after_forward": False} if settings["whole"] else {}
    blocks = list(model.blocks)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **keep)
    if settings["ahead"]:
        _look_ahead(model, blocks)
    return TorchLoop(model, torch.optim.AdamW(model.parameters(), **FUSED_ADAMW), numel)


def _look_ahead(model: Any, blocks: list[Any]) -> None:
    for module in (model, *blocks):
        module._set_unshard_async_op(True)
    model.set_modules_to_forward_prefetch(blocks[:1])
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


if __name__ == "__main__":
    serve_training(build)
