"""What of a process's memory the tiers may have, and what its state will take on the disk: before anything is built."""

from __future__ import annotations

from typing import Any

from tiering.plan import Budgets, Plan

from .shape import Shape

BF16 = 2
FP32 = 4
AHEAD = 2
"""Blocks that may be fetched before their turn."""
SPARE = 500 << 20
"""For what nobody counts: temporaries, Python's objects, and the holes that arrays below 32 MiB leave in the heap."""
NO_LIMIT = 1 << 62


def budgets(memory: int, baseline: int, shape: Shape, sequence: int) -> tuple[int, int]:
    """(device, host) budgets so that a process stays within ``memory`` which takes ``baseline`` with torch loaded.

    The embedding is the hard part. It computes in room for several blocks, so that nothing more is needed to fetch
    those ahead. In backward its gradient as the head waits for that as the embedding; then torch adds the two into a
    third. Its values in fp32, while it is filled, are less.
    """
    persistent = (2 * shape.blocks + 1) * shape.width
    device = BF16 * (shape.embedding + persistent) + (1 << 20)
    gradient = BF16 * shape.embedding
    beside = max(3 * gradient, gradient + activations(shape, sequence))
    return device, memory - baseline - device - beside - SPARE


def activations(shape: Shape, sequence: int) -> int:
    """About the bytes that autograd keeps at most, with the logits' temporaries.

    A block keeps some ten tensors of its width and four of its MLP's; of the logits there are up to five in fp32.
    """
    block = BF16 * (10 * shape.width + 4 * shape.mlp)
    return sequence * (shape.blocks * block + 5 * FP32 * shape.vocabulary)


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
            "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
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
    from tiering import ds_config
    from tiering.placement import make_plan
    from zero3.optimizer_choice import choose_optimizer
    from zero3.workload import size_up

    settings, _ = ds_config.load(config, world_size=1)
    chosen = choose_optimizer(model, settings, None, None)
    load = size_up(model, settings, chosen, on_gpu=False, world_size=1).workload
    tiers = settings.tiering
    assert isinstance(tiers.device_budget, int) and isinstance(tiers.host_budget, int)
    return make_plan(load, Budgets(tiers.device_budget, tiers.host_budget, NO_LIMIT))
