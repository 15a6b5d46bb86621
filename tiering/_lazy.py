"""Names that a module re-exports from other modules on first use, so that ``import tiering`` does not load torch.

    __getattr__, __dir__ = _lazy.names(__name__, {"zero3.initialize": ("initialize", "EngineParts")})

Type checkers read the same names in an ``if TYPE_CHECKING`` block above; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

MIGRATION_GUIDE = "docs/guide/migrate-from-deepspeed.md"


def names(
    module: str,
    homes: Mapping[str, Sequence[str]],
    *,
    submodules: Sequence[str] = (),
    fallback: str = "",
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``module``.

    ``homes`` maps a defining module to its names. ``submodules`` are imported on first use. Other names are looked up
    in the module ``fallback``; without it they raise AttributeError, which names the list of DeepSpeed's names.
    """
    home_of = {name: home for home, defined in homes.items() for name in defined}

    def get(name: str) -> object:
        if name in home_of:
            return getattr(import_module(home_of[name]), name)
        if name in submodules:
            return import_module(f"{module}.{name}")
        if fallback and not name.startswith("_") and hasattr(import_module(fallback), name):
            return getattr(import_module(fallback), name)
        hint = "" if name.startswith("_") else f"; {MIGRATION_GUIDE} lists the supported names of DeepSpeed"
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[module]
        )

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[module]), *home_of, *submodules})

    return get, listed
