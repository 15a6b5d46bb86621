"""CPU optimizer arithmetic: fused passes over flat memory, independent of tiers.

    from optim_cpu import AdamW        # also Adam, Lion, Adagrad, SGD: true torch.optim.Optimizer classes
    optimizer = AdamW(model.named_parameters(), lr=1e-4, state_format="bf16")

``optim_cpu.kernels`` works on addresses and needs no torch. The classes work on tensors; their first use imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optim_cpu.adagrad import Adagrad
    from optim_cpu.adam import Adam, AdamW
    from optim_cpu.lion import Lion
    from optim_cpu.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Lion"]

_HOMES = {
    "SGD": "optim_cpu.sgd",
    "Adagrad": "optim_cpu.adagrad",
    "Adam": "optim_cpu.adam",
    "AdamW": "optim_cpu.adam",
    "Lion": "optim_cpu.lion",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
