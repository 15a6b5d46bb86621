"""``deepspeed.utils``: what of it training scripts import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from tiering.utils import groups, logging, zero_to_fp32
    from zero3.deepspeed.leaves import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )
    from zero3.deepspeed.logs import log_dist, logger
    from zero3.deepspeed.state import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
    )
    from zero3.loop.data_loader import RepeatingLoader

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "log_dist",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]
__getattr__, __dir__ = _lazy.names(
    __name__,
    {
        "zero3.deepspeed.leaves": (
            *("get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "unset_z3_leaf_modules"),
            "z3_leaf_module",
        ),
        "zero3.deepspeed.logs": ("log_dist", "logger"),
        "zero3.deepspeed.state": (
            *("safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state"),
            *("safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state"),
        ),
        "zero3.loop.data_loader": ("RepeatingLoader",),
    },
    submodules=("groups", "logging", "zero_to_fp32"),
)
