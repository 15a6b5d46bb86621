"""``deepspeed.utils.z3_leaf_module``: modules whose parameters are unsharded together.

It is also the function of the same name in ``deepspeed.utils``: an import of this module sets that name to the module.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from tiering import _lazy

if TYPE_CHECKING:
    from torch import nn

    from zero3.deepspeed.leaves import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        unset_z3_leaf_modules,
        z3_leaf_module,
    )

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]
__getattr__, __dir__ = _lazy.names(__name__, {"zero3.deepspeed.leaves": __all__})


class _CallableModule(ModuleType):
    def __call__(self, model: nn.Module) -> bool:
        """As ``z3_leaf_module`` of this module."""
        return bool(self.z3_leaf_module(model))


sys.modules[__name__].__class__ = _CallableModule
