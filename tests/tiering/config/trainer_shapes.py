"""Configurations as they are written for a trainer, after those of projects that build on one.

Each has the sections and keys of a published file, "auto" where the file has it, and values of its size.
"""

from __future__ import annotations

import copy
from typing import Any

Config = dict[str, Any]

BATCH: Config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
CLIPPED: Config = BATCH | {"gradient_clipping": "auto"}
FP16: Config = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BF16: Config = {"bf16": {"enabled": "auto"}}
IN_BF16: Config = {"bf16": {"enabled": True}}
EITHER: Config = {"fp16": FP16} | BF16
ADAMW: Config = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    }
}
TORCH_ADAM: Config = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    }
}
WARMUP: Config = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    }
}
DECAY: Config = {
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": WARMUP["scheduler"]["params"] | {"total_num_steps": "auto"},
    }
}
PRINTS: Config = {"steps_per_print": 2000, "wall_clock_breakdown": False}
COMPILED: Config = {"compile": {"disable": False, "backend": "inductor"}}
UNTESTED: Config = {"zero_allow_untested_optimizer": True}

CPU: Config = {"device": "cpu", "pin_memory": True}
NVME: Config = {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "buffer_count": 5}
NONE: Config = {"device": "none", "pin_memory": True}
# A stage beyond the first, without its number.
BUCKETS: Config = {
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
}
ROBIN: Config = BUCKETS | {"overlap_comm": False, "round_robin_gradients": True}
STAGE3: Config = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
UNLIMITED: Config = STAGE3 | {
    "sub_group_size": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}


def zero(stage: int, base: Config | None = None, **offload: Config) -> Config:
    """The section zero_optimization; ``optimizer`` and ``param`` are its offload sections."""
    sections = {f"offload_{name}": section for name, section in offload.items()}
    return {"zero_optimization": {"stage": stage} | (base or {}) | sections}


Z2 = zero(2, BUCKETS)
Z2_CPU = zero(2, BUCKETS, optimizer=CPU)
Z3 = zero(3, STAGE3)
Z3_CPU = zero(3, STAGE3, optimizer=CPU, param=CPU)

TRAINER: Config = EITHER | ADAMW | WARMUP | CLIPPED | PRINTS
FACTORY: Config = CLIPPED | UNTESTED | EITHER
SWIFT: Config = EITHER | CLIPPED | PRINTS
TUNER: Config = (
    {"gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}
    | {"gradient_clipping": "auto", "zero_force_ds_cpu_optimizer": False}
    | UNTESTED
    | {"fp16": {"enabled": "auto", "initial_scale_power": 16}}
    | BF16
)
# What the plugin of Accelerate makes of its questions, and the files of its tests.
PLUGIN: Config = (
    BATCH
    | {"gradient_clipping": 1.0, "steps_per_print": float("inf"), "fp16": {"enabled": "auto"}}
    | UNTESTED
    | BF16
)
PLUGIN_FILE: Config = CLIPPED | {"fp16": FP16 | {"auto_cast": False}, "steps_per_print": float("inf")} | BF16
PLUGIN_TRAINS: Config = PLUGIN_FILE | TORCH_ADAM | WARMUP

SHAPES: dict[str, Config] = {
    "trainer zero0": TRAINER | zero(0),
    "trainer zero1": TRAINER | zero(1),
    "trainer zero2": TRAINER | Z2_CPU,
    "trainer zero2 round robin": EITHER | CLIPPED | zero(2, ROBIN),
    "trainer zero2 in bf16": BF16 | CLIPPED | Z2,
    "trainer zero2 in fp16": {"fp16": FP16 | {"enabled": True}} | ADAMW | CLIPPED | Z2,
    "trainer zero3": TRAINER | Z3_CPU,
    "trainer zero3 on the device": TRAINER | Z3,
    "trainer zero3 nvme": TRAINER | DECAY | zero(3, STAGE3, optimizer=NVME, param=NVME),
    "trainer zero3 inference": EITHER | BATCH | Z3,
    "trainer with its accumulation": EITHER | ADAMW | BATCH | {"gradient_accumulation_steps": 4} | Z2,
    "trainer with fp32 reductions": EITHER | ADAMW | CLIPPED | {"communication_data_type": "fp32"} | Z3,
    "plugin 0": PLUGIN | zero(0),
    "plugin 1": PLUGIN | zero(1),
    "plugin 2": PLUGIN | zero(2, optimizer={"device": "none"}, param={"device": "none"}),
    "plugin 2 cpu": PLUGIN | zero(2, optimizer={"device": "cpu"}, param={"device": "none"}),
    "plugin 3": PLUGIN | zero(3, {"stage3_gather_16bit_weights_on_model_save": False}),
    "plugin 3 cpu": PLUGIN | zero(3, optimizer={"device": "cpu"}, param={"device": "cpu"}),
    "plugin file zero2": PLUGIN_TRAINS | Z2_CPU,
    "plugin file zero3": PLUGIN_TRAINS | Z3_CPU,
    "plugin file zero2 model only": PLUGIN_FILE | Z2_CPU,
    "plugin file zero3 model only": PLUGIN_FILE | Z3_CPU,
    "llama-factory z0": FACTORY | zero(0, ROBIN),
    "llama-factory z2": FACTORY | zero(2, ROBIN),
    "llama-factory z2 offload": FACTORY | zero(2, ROBIN, optimizer=CPU),
    "llama-factory z2 autotp": {"_comment": "models with tensor parallelism"}
    | FACTORY
    | {"tensor_parallel": {"autotp_size": 2}}
    | zero(2, ROBIN),
    "llama-factory z3": FACTORY | Z3,
    "llama-factory z3 offload": FACTORY | Z3_CPU,
    "axolotl zero1": SWIFT | zero(1, {"overlap_comm": True}),
    "axolotl zero1 compiled": SWIFT | COMPILED | zero(1, {"overlap_comm": True}),
    "axolotl zero2": SWIFT | zero(2, {"contiguous_gradients": True}, optimizer={"device": "cpu"}),
    "axolotl zero2 compiled": SWIFT | COMPILED | zero(2, {"contiguous_gradients": True}),
    "axolotl zero3": SWIFT | zero(3, UNLIMITED),
    "axolotl zero3 bf16": IN_BF16 | CLIPPED | PRINTS | zero(3, UNLIMITED),
    "axolotl zero3 bf16 offload all": IN_BF16 | CLIPPED | zero(3, UNLIMITED, optimizer=CPU, param=CPU),
    "axolotl zero3 bf16 offload params": IN_BF16 | CLIPPED | zero(3, UNLIMITED, param=CPU),
    "swift zero0": SWIFT | zero(0, BUCKETS),
    "swift zero1": SWIFT | zero(1, BUCKETS, optimizer=NONE),
    "swift zero2": SWIFT | zero(2, BUCKETS, optimizer=NONE),
    "swift zero2 offload": SWIFT | Z2_CPU,
    "swift zero3": SWIFT | zero(3, STAGE3, optimizer=NONE, param=NONE),
    "swift zero3 offload": SWIFT | Z3_CPU,
    "xtuner zero1": TUNER | zero(1, {"overlap_comm": True}),
    "xtuner zero2": TUNER | zero(2, {"overlap_comm": True}),
    "xtuner zero2 offload": TUNER | zero(2, {"overlap_comm": True}, optimizer=CPU),
    "xtuner zero3": TUNER | zero(3, {"overlap_comm": True}),
    "xtuner zero3 offload": TUNER | zero(3, {"overlap_comm": True}, optimizer=CPU, param=CPU),
    "fastchat s2": {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    | UNTESTED
    | {"fp16": {"enabled": "auto", "loss_scale": 0}}
    | zero(2, optimizer={"device": "cpu"}),
    "fastchat s3": {"fp16": {"enabled": True}} | BATCH | Z3_CPU,
    "llava zero2": EITHER | BATCH | zero(2, {"overlap_comm": True, "reduce_bucket_size": "auto"}),
    "llava zero3": EITHER | BATCH | Z3,
    "llava zero3 offload": TRAINER | Z3_CPU,
    "dolly a100": BF16 | ADAMW | WARMUP | CLIPPED | PRINTS | Z3,
    "dolly v100": {"fp16": {"enabled": True}} | ADAMW | WARMUP | CLIPPED | Z3_CPU,
    "flan-t5 z2": TRAINER | Z2,
    "flan-t5 z3 bf16": BF16 | ADAMW | WARMUP | CLIPPED | PRINTS | Z3,
    "lmflow zero2": TRAINER | DECAY | Z2_CPU,
    "lmflow zero3 evaluation": {"fp16": {"enabled": False}, "train_micro_batch_size_per_gpu": 1}
    | IN_BF16
    | PRINTS
    | Z3_CPU,
    "trlx zero2": {"fp16": FP16 | {"opt_level": "O2"}} | BATCH | zero(2, BUCKETS | {"cpu_offload": False}),
    "tensor parallel": EITHER | CLIPPED | {"tensor_parallel": {"autotp_size": 4}} | zero(1),
}
"""By project and file."""

REFUSED = {"llama-factory z2 autotp": {"tensor_parallel"}, "tensor parallel": {"tensor_parallel"}}
"""The keys that are refused also for a trainer, because ignoring them would change the training."""


def shape(name: str) -> Config:
    """A copy of the configuration ``name``."""
    return copy.deepcopy(SHAPES[name])
