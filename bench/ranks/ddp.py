"""torch's DistributedDataParallel on one rank, in fp32. ``settings``: ``sharded``, whether the optimizer's state is."""

from __future__ import annotations

from typing import Any

from frame.reference_model import Model
from frame.training import serve_training

from .torch_loop import FUSED_ADAMW, TorchLoop


def build(reference: Model, settings: dict[str, Any]) -> TorchLoop:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    module = reference.build()
    numel = sum(parameter.numel() for parameter in module.parameters())
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if settings["sharded"]:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **FUSED_ADAMW)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **FUSED_ADAMW)
    return TorchLoop(model, optimizer, numel)


if __name__ == "__main__":
    serve_training(build)
