"""Writes ``deepspeed_signatures.json``: what training scripts call of DeepSpeed, with parameters and defaults.

Run where DeepSpeed is installed: ``DS_ACCELERATOR=cpu python tests/zero3/deepspeed/deepspeed_signatures.py``. The
tests read the file and need no DeepSpeed.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

SIGNATURES = Path(__file__).with_suffix(".json")

CALLED = {
    # module within the package: names
    "": ["initialize", "init_distributed", "add_config_arguments", "get_accelerator", "log_dist"],
    "zero": ["Init", "GatheredParameters", "register_external_parameter"],
    "ops.adam": ["DeepSpeedCPUAdam", "FusedAdam"],
    "ops.lion": ["DeepSpeedCPULion", "FusedLion"],
    "ops.adagrad": ["DeepSpeedCPUAdagrad"],
    "checkpointing": ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"],
    "accelerator": ["get_accelerator"],
    "comm": ["init_distributed", "get_rank", "get_world_size", "get_local_rank", "barrier"],
    "utils": [
        *("log_dist", "RepeatingLoader"),
        *("safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state"),
        *("safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state"),
        *("get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "unset_z3_leaf_modules"),
        "z3_leaf_module",
    ],
    "utils.zero_to_fp32": [
        *("get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint"),
        "convert_zero_checkpoint_to_fp32_state_dict",
    ],
    "runtime.lr_schedules": ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"],
    "runtime.utils": ["see_memory_usage"],
    "runtime.dataloader": ["RepeatingLoader"],
}
PLAIN = (type(None), bool, int, float, str, tuple, list, dict)


def parameters(function: Any) -> list[list[str]]:
    """Name, kind and default (as Python writes it; "" for none, "..." for what has no plain form) of each parameter."""
    rows = []
    for each in inspect.signature(function).parameters.values():
        default = repr(each.default) if isinstance(each.default, PLAIN) else "..."
        without = each.default is inspect.Parameter.empty
        rows.append([each.name, each.kind.name, "" if without else default])
    return rows


def module_of(package: str, name: str) -> Any:
    """``name`` within ``package``, as a script gets it: an attribute, or a module that it imports."""
    module = importlib.import_module(package)
    for part in filter(None, name.split(".")):
        package = f"{package}.{part}"
        module = getattr(module, part, None) or importlib.import_module(package)
    return module


def main() -> None:
    import deepspeed

    functions = {
        f"{module}.{name}".strip("."): parameters(getattr(module_of("deepspeed", module), name))
        for module, names in CALLED.items()
        for name in names
    }
    engine = {
        name: parameters(value)
        for name, value in inspect.getmembers(deepspeed.DeepSpeedEngine, inspect.isfunction)
        if not name.startswith("_") and value.__module__.startswith("deepspeed")
    }
    accelerator = sorted(name for name in dir(deepspeed.get_accelerator()) if not name.startswith("_"))

    def lines(table: dict[str, Any]) -> str:
        return ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table.items())

    SIGNATURES.write_text(
        f'{{"deepspeed": "{deepspeed.__version__}",\n"functions": {{\n{lines(functions)}\n}},'
        f'\n"engine": {{\n{lines(engine)}\n}},\n"accelerator": {json.dumps(accelerator)}}}\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
