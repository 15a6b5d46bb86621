"""Writes ``deepspeed_keys.json``: every key that DeepSpeed's configuration has, by its dotted path, and its default.

Run where DeepSpeed is installed: ``DS_ACCELERATOR=cpu python tests/tiering/config/deepspeed_keys.py``. The tests read
the file and need no DeepSpeed.

Half of DeepSpeed's sections are pydantic models, which are asked for their fields. The other half are read with
``get`` from the dict that was loaded; there a dict that notes what it is asked for is loaded instead.
"""

from __future__ import annotations

import inspect
import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Union, get_args, get_origin

KEYS = Path(__file__).with_suffix(".json")

# Sections that are read with get, and those inside them. They must be there: an absent one is not looked into.
READ: dict[str, Any] = {
    "activation_checkpointing": {},
    "aio": {},
    "autotuning": {"model_info": {}},
    "checkpoint": {"parallel_write": {}, "writer": {}},
    "data_efficiency": {
        "data_routing": {"random_ltd": {"layer_token_lr_schedule": {}}},
        "data_sampling": {"curriculum_learning": {}, "dynamic_batching": {}},
    },
    "data_types": {},
    "expert_parallel": {},
    "flops_profiler": {},
    "optimizer": {},
    "scheduler": {},
    "torch_autocast": {},
}
MODELS = {  # sections that are pydantic models, and where they are
    "zero_optimization": "runtime.zero.config.DeepSpeedZeroConfig",
    "bf16": "runtime.precision_config.DeepSpeedBF16Config",
    "bfloat16": "runtime.precision_config.DeepSpeedBF16Config",
    "fp16": "runtime.precision_config.DeepSpeedFP16Config",
    "comms_logger": "comm.config.CommsLoggerConfig",
    "tensorboard": "monitor.config.TensorBoardConfig",
    "wandb": "monitor.config.WandbConfig",
    "csv_monitor": "monitor.config.CSVConfig",
    "comet": "monitor.config.CometConfig",
    "hybrid_engine": "runtime.config.HybridEngineConfig",
    "compile": "compile.config.CompileConfig",
    "weight_quantization": "inference.config.WeightQuantConfig",
    "timers.throughput": "utils.config.DeepSpeedThroughputTimerConfig",
    "tensor_parallel": "runtime.tensor_parallel.config.TPTrainingConfig",
}
OPTIMIZERS = {  # type -> the classes that DeepSpeed may make of it
    "Adam": ["ops.adam.FusedAdam", "ops.adam.DeepSpeedCPUAdam", "torch.optim.Adam"],
    "AdamW": ["ops.adam.FusedAdam", "ops.adam.DeepSpeedCPUAdam", "torch.optim.AdamW"],
    "Adagrad": ["ops.adagrad.DeepSpeedCPUAdagrad", "torch.optim.Adagrad"],
    "Lamb": ["ops.lamb.FusedLamb"],
    "Lion": ["ops.lion.FusedLion", "ops.lion.DeepSpeedCPULion"],
    "SGD": ["torch.optim.SGD"],
}
SCHEDULES = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"]
# Taken from the parameters before an optimizer is made, or given to one that is no class of parameters.
TAKEN = {
    "Adam": ["torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach", "max_grad_norm"],
    "AdamW": ["torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach", "max_grad_norm"],
    "Muon": [
        "lr",
        "momentum",
        "weight_decay",
        "betas",
        "eps",
        "ns_method",
        "muon_lr",
        "adam_lr",
        "per_head_muon",
    ],
}
# Sections whose keys are names of the user, or are handed to another package as they are.
OPEN = [
    "autotuning.arg_mappings",
    "data_efficiency.data_routing.random_ltd",
    "data_efficiency.data_sampling.curriculum_learning",
    "datastates_ckpt",
    "tensor_parallel.partition_config",
    "weight_quantization.post_init_quant",
    "weight_quantization.quantized_initialization",
]
# Read elsewhere than where the configuration is loaded: key -> its default.
ELSEWHERE: dict[str, Any] = {
    "data_efficiency.data_sampling.dynamic_batching.max_batch_size": None,
    "data_efficiency.data_sampling.dynamic_batching.max_tokens": None,
    "data_efficiency.data_sampling.dynamic_batching.metrics_path": None,
    "data_parallel_size": None,
    "optimizer.legacy_fusion": False,
    "optimizer.type": None,
    "pipeline.use_reentrant": True,
    "scheduler.type": None,
    "sequence_parallel_size": 1,
    "torch_autocast.dtype": None,
    "torch_autocast.lower_precision_safe_modules": None,
}


class Asked(dict[str, Any]):
    """A section that notes the keys it is asked for, with the defaults that the reader has in mind."""

    noted: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, inner: dict[str, Any], prefix: str = "") -> None:
        super().__init__({name: Asked(section, f"{prefix}{name}.") for name, section in inner.items()})
        self.prefix = prefix

    def get(self, name: str, default: Any = None) -> Any:
        Asked.noted.setdefault(self.prefix + name, plain(default))
        return super().get(name, default)

    def __bool__(self) -> bool:
        return True  # an empty section is not looked into

    def __contains__(self, name: object) -> bool:
        Asked.noted.setdefault(f"{self.prefix}{name}", {})
        return super().__contains__(name)


def plain(default: Any) -> dict[str, Any]:
    """How a default is written down: not at all for a section, or for what is made when it is needed."""
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, tuple):
        default = list(default)
    if default is None or isinstance(default, bool | int | float | str | list):
        return {"default": default}
    return {}


def member(path: str) -> Any:
    """The class at the dotted ``path``, of torch or of DeepSpeed."""
    module, _, name = (path if path.startswith("torch.") else f"deepspeed.{path}").rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


def fields(model: Any, prefix: str) -> dict[str, dict[str, Any]]:
    """Of a pydantic model and the models inside it."""
    from pydantic import BaseModel

    keys: dict[str, dict[str, Any]] = {}
    for name, info in model.model_fields.items():
        kinds = get_args(info.annotation) if get_origin(info.annotation) is Union else (info.annotation,)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        extra = info.json_schema_extra or {}
        entry = {} if inner else plain(info.default)
        if extra.get("deprecated"):
            entry["deprecated"] = extra.get("new_param", "")
        for spelling in {name, info.alias or name}:
            keys[f"{prefix}{spelling}"] = entry
            for section in inner:
                keys |= fields(section, f"{prefix}{spelling}.")
    return keys


def parameters(path: str, skip: int) -> dict[str, dict[str, Any]]:
    """What the class at ``path`` takes, after the first ``skip``."""
    arguments = list(inspect.signature(member(path)).parameters.values())[skip:]
    return {
        each.name: plain(each.default) if each.default is not inspect.Parameter.empty else {"required": True}
        for each in arguments
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }


def main() -> None:
    import deepspeed
    from deepspeed.runtime import config as reader

    config = Asked({**READ, "train_batch_size": {}})
    config["train_batch_size"] = 1
    for name, path in MODELS.items():
        Asked.noted.update(fields(member(path), f"{name}."))
    reader.DeepSpeedConfig(config)
    config["zero_optimization"] = True
    reader.get_zero_config(config)
    pipeline = reader.get_pipeline_config({})
    Asked.noted |= {f"pipeline.{name}": plain(default) for name, default in pipeline.items()}
    Asked.noted |= {key: {"default": default} for key, default in ELSEWHERE.items()}
    sections = {key.rpartition(".")[0] for key in Asked.noted} - {*OPEN}
    sections |= {key.rpartition(".")[0] for key in sections}

    removed = [*reader._REMOVED_TOP_LEVEL_CONFIG_KEYS]
    removed += [f"zero_optimization.{name}" for name in reader._REMOVED_ZERO_CONFIG_KEYS]
    classes = {
        kind: {path.rpartition(".")[2]: parameters(path, 1) for path in paths}
        for kind, paths in OPTIMIZERS.items()
    }
    table = {
        "deepspeed": deepspeed.__version__,
        "keys": {key: Asked.noted[key] for key in sorted({*Asked.noted} - sections - {*removed})},
        "removed": sorted(removed),
        "open": OPEN,
        "optimizers": classes,
        "taken": TAKEN,
        "schedules": {name: parameters(f"runtime.lr_schedules.{name}", 1) for name in SCHEDULES},
    }
    KEYS.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(table['keys'])} keys of DeepSpeed {table['deepspeed']} in {KEYS}", file=sys.stderr)


if __name__ == "__main__":
    main()
