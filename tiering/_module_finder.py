"""Makes the modules of DeepSpeed that have no file here, when a script imports them.

Most have only placeholders (_placeholders.py). Some have names that exist here in another module.
"""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType

from tiering import _lazy, _unsupported
from tiering._placeholders import PACKAGE


class Finder:
    """Finds the modules below ``tiering`` that have no file. It is the last finder, so that it hides no file."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, below = name.partition(".")
        if package != PACKAGE or not (below in _lazy.ELSEWHERE or _unsupported.replacement(below)):
            return None
        # A package: DeepSpeed has modules below many of these names.
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type] # a protocol of two methods

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        home, names = _lazy.ELSEWHERE.get(module.__name__.partition(".")[2], ("", ()))
        homes = {home: names} if names else {}
        module.__getattr__, module.__dir__ = _lazy.names(  # type: ignore[method-assign]
            module.__name__, homes, fallback="" if names else home
        )


FINDER = Finder()
