"""Names that a module has and other modules define: imported on first use, so that ``import tiering`` loads no torch.

    __getattr__, __dir__ = lazy.names(__name__, {"zero3.initialize": ("initialize", "EngineParts")})

Type checkers read the same names in an ``if TYPE_CHECKING`` block above; a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

PAGE = "docs/guide/migrate-from-deepspeed.md"


def names(
    module: str,
    homes: Mapping[str, Sequence[str]],
    *,
    submodules: Sequence[str] = (),
    rest: str = "",
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``module``.

    ``homes`` says which module defines which names. ``submodules`` need no import of their own to be used; what nobody
    lists is looked up in the module ``rest``, else missing: the error says where all that is here is listed.
    """
    home_of = {name: home for home, defined in homes.items() for name in defined}

    def get(name: str) -> object:
        if name in home_of:
            return getattr(import_module(home_of[name]), name)
        if name in submodules:
            return import_module(f"{module}.{name}")
        if rest and not name.startswith("_") and hasattr(import_module(rest), name):
            return getattr(import_module(rest), name)
        where = "" if name.startswith("_") else f"; {PAGE} lists what of DeepSpeed is here"
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}{where}", name=name, obj=sys.modules[module]
        )

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[module]), *home_of, *submodules})

    return get, listed
