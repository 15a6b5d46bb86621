"""torch's DistributedDataParallel on one rank, in fp32. ``settings``: ``sharded``, whether the optimizer's state is."""

from __future__ import annotations

from typing import Any

from .serve import Work, serve
from .torch_side import FUSED_ADAMW, TorchSide


def build(work: Work, settings: dict[str, Any]) -> TorchSide:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    module = work.model.build()
    numel = sum(parameter.numel() for parameter in module.parameters())
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if settings["sharded"]:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **FUSED_ADAMW)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **FUSED_ADAMW)
    return TorchSide(model, optimizer, numel)


if __name__ == "__main__":
    serve(build)
