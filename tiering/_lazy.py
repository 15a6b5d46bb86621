"""Names that a module re-exports from other modules on first use, so that ``import tiering`` does not load torch.

    __getattr__, __dir__ = _lazy.names(__name__, {"zero3.initialize": ("initialize", "EngineParts")})

Type checkers read the same names in an ``if TYPE_CHECKING`` block above; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from tiering import _unsupported
from tiering._placeholders import PACKAGE, placeholder
from tiering._text import similar

ELSEWHERE: Mapping[str, tuple[str, Sequence[str]]] = {
    "accelerator.real_accelerator": ("tiering.accelerator", ("get_accelerator",)),
    "checkpoint.utils": ("zero3.deepspeed.tensors", ("clone_tensors_for_torch_save",)),
    "comm.comm": ("tiering.comm", ()),
    "comm.reduce_op": ("torch.distributed", ("ReduceOp",)),
    "constants": ("zero3.deepspeed.values", ("TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout")),
    "launcher.runner": ("zero3.deepspeed.values", ("DEEPSPEED_ENVIRONMENT_NAME",)),
    "git_version_info": ("zero3.deepspeed.values", ("version",)),
    "ops.adagrad.cpu_adagrad": ("tiering.ops.adagrad", ("DeepSpeedCPUAdagrad",)),
    "ops.lion.cpu_lion": ("tiering.ops.lion", ("DeepSpeedCPULion",)),
    "ops.lion.fused_lion": ("tiering.ops.lion", ("FusedLion",)),
    "runtime.activation_checkpointing": ("tiering", ("checkpointing",)),
    "runtime.activation_checkpointing.checkpointing": ("tiering.checkpointing", ()),
    "runtime.zero.config": ("zero3.deepspeed.values", ("ZeroStageEnum",)),
    "runtime.zero.offload_config": ("zero3.deepspeed.values", ("OffloadDeviceEnum",)),
    "utils.tensor_fragment": ("tiering.utils", ()),
}
"""Modules of DeepSpeed that have no file here: where their names are, and which of them (none listed: all)."""


FALLBACKS: dict[str, str] = {}
"""The modules whose other names are those of another module, and that module."""


def names(
    module: str,
    homes: Mapping[str, Sequence[str]],
    *,
    submodules: Sequence[str] = (),
    fallback: str = "",
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``module``.

    ``homes`` maps a defining module to its names. ``submodules`` are imported on first use. Other names are looked up
    in the module ``fallback``. A name that only DeepSpeed has gives its placeholder; any other raises AttributeError.
    """
    home_of = {name: home for home, defined in homes.items() for name in defined}
    if fallback:
        FALLBACKS[module] = fallback

    def get(name: str) -> object:
        if name in home_of:
            return getattr(import_module(home_of[name]), name)
        if name in submodules:
            return import_module(f"{module}.{name}")
        if fallback and not name.startswith("_") and hasattr(import_module(fallback), name):
            return getattr(import_module(fallback), name)
        path = f"{module}.{name}".removeprefix(f"{PACKAGE}.")
        if path in ELSEWHERE:
            return import_module(f"{module}.{name}")
        # Python looks for names with two underscores in every module.
        if not name.startswith("__") and _unsupported.replacement(path):
            return placeholder(path)
        near = None if name.startswith("_") else similar(name, listed())
        hint = f"; did you mean {near!r}?" if near else ""
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[module]
        )

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[module]), *home_of, *submodules})

    return get, listed
