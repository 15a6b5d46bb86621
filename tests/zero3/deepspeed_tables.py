"""Writes ``deepspeed_tables.json``: what DeepSpeed's own schedules and loss scales give, update by update.

Run where DeepSpeed is installed: ``DS_ACCELERATOR=cpu python tests/zero3/deepspeed_tables.py``. The tests read the
tables and need no DeepSpeed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TABLES = Path(__file__).with_suffix(".json")
UPDATES = 24

WARMUP = {"warmup_num_steps": 7}
CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 6}
LISTS = {"cycle_min_lr": [0.01, 0.02], "cycle_max_lr": [0.1, 0.3], "cycle_first_step_size": 5}

CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    # schedule, optimizer, param groups, parameters
    ("WarmupLR", "AdamW", 1, WARMUP),
    ("WarmupLR", "AdamW", 1, {}),
    (
        "WarmupLR",
        "AdamW",
        1,
        WARMUP | {"warmup_type": "linear", "warmup_min_lr": 1e-5, "warmup_max_lr": 3e-4},
    ),
    ("WarmupLR", "AdamW", 1, {"warmup_num_steps": 1, "warmup_max_lr": 0.1}),
    ("WarmupLR", "AdamW", 1, {"warmup_num_steps": 1, "warmup_max_lr": 0.1, "warmup_type": "linear"}),
    ("WarmupLR", "AdamW", 1, {"warmup_num_steps": 2, "warmup_max_lr": 0.0, "warmup_min_lr": 0.3}),
    ("WarmupLR", "SGD", 2, WARMUP | {"warmup_min_lr": [1e-5, 2e-5], "warmup_max_lr": [0.1, 0.7]}),
    ("WarmupLR", "AdamW", 2, WARMUP),
    ("WarmupDecayLR", "AdamW", 1, WARMUP | {"total_num_steps": 17}),
    ("WarmupDecayLR", "AdamW", 1, WARMUP | {"total_num_steps": 17, "warmup_type": "linear"}),
    ("WarmupDecayLR", "AdamW", 2, WARMUP | {"total_num_steps": 100, "warmup_min_lr": [1e-5, 0.0]}),
    ("WarmupDecayLR", "AdamW", 1, WARMUP | {"total_num_steps": 5, "warmup_max_lr": 0.3}),
    ("WarmupDecayLR", "AdamW", 1, WARMUP | {"total_num_steps": 7, "warmup_max_lr": 0.3}),
    ("WarmupDecayLR", "AdamW", 1, {"total_num_steps": 11, "warmup_num_steps": 1, "warmup_min_lr": 0.0001}),
    ("WarmupCosineLR", "AdamW", 1, WARMUP | {"total_num_steps": 17}),
    ("WarmupCosineLR", "AdamW", 2, WARMUP | {"total_num_steps": 17, "warmup_type": "linear"}),
    (
        "WarmupCosineLR",
        "SGD",
        2,
        WARMUP | {"total_num_steps": 50, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.3},
    ),
    ("WarmupCosineLR", "AdamW", 1, WARMUP | {"total_num_steps": 5}),
    ("WarmupCosineLR", "AdamW", 1, {"total_num_steps": 9, "warmup_num_steps": 1, "warmup_min_ratio": 0.01}),
    ("OneCycle", "AdamW", 1, CYCLE),
    ("OneCycle", "AdamW", 2, LISTS | {"cycle_min_mom": [0.7, 0.8], "cycle_max_mom": [0.9, 0.95]}),
    (
        "OneCycle",
        "AdamW",
        1,
        CYCLE | {"cycle_second_step_size": 3, "decay_step_size": 2, "decay_lr_rate": 0.5},
    ),
    ("OneCycle", "AdamW", 1, CYCLE | {"decay_step_size": 4, "decay_mom_rate": 0.01, "cycle_momentum": True}),
    ("OneCycle", "AdamW", 1, CYCLE | {"decay_lr_rate": 0.5, "decay_mom_rate": 0.5}),
    ("OneCycle", "AdamW", 1, CYCLE | {"cycle_first_stair_count": 3}),
    ("OneCycle", "AdamW", 1, CYCLE | {"cycle_first_stair_count": 4, "cycle_second_stair_count": 2}),
    ("OneCycle", "AdamW", 1, CYCLE | {"cycle_second_step_size": 13, "cycle_second_stair_count": 5}),
    ("OneCycle", "AdamW", 1, CYCLE | {"cycle_second_step_size": 0}),
    ("OneCycle", "AdamW", 1, CYCLE | {"cycle_first_step_size": 1, "cycle_second_step_size": 1}),
    ("OneCycle", "AdamW", 1, CYCLE | {"cycle_first_step_size": 7.5, "cycle_first_stair_count": -1}),
    ("OneCycle", "AdamW", 1, CYCLE | {"cycle_momentum": False}),
    ("OneCycle", "SGD", 1, CYCLE),
    ("LRRangeTest", "AdamW", 1, {"lr_range_test_step_size": 5}),
    ("LRRangeTest", "AdamW", 1, {}),
    ("LRRangeTest", "SGD", 2, {"lr_range_test_min_lr": [1e-4, 3e-4], "lr_range_test_step_size": 3}),
    (
        "LRRangeTest",
        "AdamW",
        1,
        {"lr_range_test_step_size": 5, "lr_range_test_step_rate": 0.3, "lr_range_test_staircase": True},
    ),
    ("LRRangeTest", "AdamW", 1, {"lr_range_test_step_size": 1}),
]


LOSS_SCALES: list[dict[str, Any]] = [
    # init_scale, scale_window, delayed_shift (hysteresis), consecutive_hysteresis, min_scale
    {"init_scale": 2**16, "scale_window": 5, "delayed_shift": 2},
    {"init_scale": 2**16, "scale_window": 5, "delayed_shift": 1},
    {"init_scale": 2**16, "scale_window": 1, "delayed_shift": 3},
    {"init_scale": 2**16, "scale_window": 5, "delayed_shift": 2, "consecutive_hysteresis": True},
    {"init_scale": 2**16, "scale_window": 4, "delayed_shift": 3, "consecutive_hysteresis": True},
    {"init_scale": 16, "scale_window": 6, "delayed_shift": 1, "min_scale": 3},
    {"init_scale": 4, "scale_window": 50, "delayed_shift": 2, "min_scale": 1},
]


def make_optimizer(name: str, groups: int) -> Any:
    """The optimizer of a case: ``groups`` param groups with rates of their own."""
    import torch

    kinds: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.003 * (1 + g)} for g in range(groups)]
    return kinds[name](params, **momentum)


def rates_and_momenta(optimizer: Any) -> list[list[Any]]:
    """What a schedule has set in ``optimizer``: per param group the learning rate, and betas or momentum."""
    return [[group["lr"], group.get("betas", group.get("momentum"))] for group in optimizer.param_groups]


def schedule_tables() -> list[dict[str, Any]]:
    from deepspeed.runtime import lr_schedules

    tables = []
    for schedule, name, groups, params in CASES:
        optimizer = make_optimizer(name, groups)
        scheduler = getattr(lr_schedules, schedule)(optimizer, **params)
        values = [rates_and_momenta(optimizer)]
        for _ in range(UPDATES):
            scheduler.step()
            values.append(rates_and_momenta(optimizer))
        tables.append(
            {"type": schedule, "optimizer": name, "groups": groups, "params": params, "values": values}
        )
    return tables


def loss_scale_tables() -> list[dict[str, Any]]:
    """Scales after each update of a random run; the last is null where DeepSpeed gave up."""
    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist.get_rank = lambda: 0  # no process group here
    tables = []
    for seed, params in enumerate(LOSS_SCALES):
        scaler = loss_scaler.DynamicLossScaler(**{"min_scale": 1, "consecutive_hysteresis": False} | params)
        run, values = random.Random(seed), []
        overflows = [run.random() < 0.2 for _ in range(80)]
        for overflow in overflows:
            try:
                scaler.update_scale(overflow)
            except Exception:  # this is what it raises
                values.append(None)
                break
            values.append(scaler.loss_scale)
        tables.append({"params": params, "overflows": [int(o) for o in overflows], "values": values})
    return tables


def main() -> None:
    import deepspeed

    def lines(tables: list[dict[str, Any]]) -> str:
        return ",\n".join(json.dumps(table) for table in tables)

    TABLES.write_text(
        f'{{"deepspeed": "{deepspeed.__version__}",\n"schedules": [\n{lines(schedule_tables())}\n],'
        f'\n"loss_scales": [\n{lines(loss_scale_tables())}\n]}}\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
