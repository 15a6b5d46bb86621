"""What of a process's memory the tiers may have, and what its state will take on the disk: before anything is built."""

from __future__ import annotations

from typing import Any

from tiering.placement.plan import Budgets, Plan

from .shape import Shape

BF16 = 2
FP32 = 4
AHEAD = 2
"""Blocks that may be fetched before their turn."""
SPARE = 300_000_000
"""For what nobody counts: temporaries, Python's objects, holes in the heap."""
NO_LIMIT = 1 << 62


def budgets(memory: int, baseline: int, shape: Shape, sequence: int) -> tuple[int, int]:
    """(device, host) budgets so that a process stays within ``memory`` which takes ``baseline`` with torch loaded.

    The embedding is the hard part. It computes in room for several blocks, so that nothing more is needed to fetch
    those ahead. At the end of backward its gradient as the head, which has waited, and that as the embedding are added
    into a third, while the heap has not given back what activations took. Its values in fp32, while it is filled, are
    less.
    """
    persistent = (2 * shape.blocks + 1) * shape.width
    device = BF16 * (shape.embedding + persistent) + (1 << 20)
    beside = 3 * BF16 * shape.embedding + activations(shape, sequence) + SPARE
    return device, memory - baseline - device - beside


def activations(shape: Shape, sequence: int) -> int:
    """About the bytes that autograd keeps: a block's ten tensors of its width and four of its MLP's, and the logits."""
    block = BF16 * (10 * shape.width + 4 * shape.mlp)
    return sequence * (shape.blocks * block + (BF16 + FP32) * shape.vocabulary)


def configuration(directory: str, shape: Shape, device: int, host: int) -> dict[str, Any]:
    """As ``tiering.initialize`` takes it: everything may go to ``directory``."""
    swap = {"device": "nvme", "nvme_path": directory}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "zero_optimization": {
            "stage": 3,
            "offload_param": swap,
            "offload_optimizer": swap,
            "stage3_prefetch_bucket_size": AHEAD * shape.block,
        },
        "tiering": {"device_budget": device, "host_budget": host, "telemetry": {"enabled": False}},
    }


def planned(model: Any, config: dict[str, Any]) -> Plan:
    """The plan for ``model``, which may be on meta, on a disk without end. Raises PlacementError."""
    from tiering.config import ds_config
    from tiering.placement.placement import make_plan
    from zero3.setup.model_size import size_up
    from zero3.setup.optimizer_choice import choose_optimizer

    settings, _ = ds_config.load(config, world_size=1)
    chosen = choose_optimizer(model, settings, None, None)
    load = size_up(model, settings, chosen, on_gpu=False, world_size=1).workload
    tiers = settings.tiering
    assert isinstance(tiers.device_budget, int) and isinstance(tiers.host_budget, int)
    return make_plan(load, Budgets(tiers.device_budget, tiers.host_budget, NO_LIMIT))
