"""Marking modules whose parameters come together, whichever of them a forward uses: mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tiering.errors import ConfigError
from zero3.params.grouping import MARK


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Before ``initialize``: make each module of these classes one group; as ``leaf_module`` in the configuration.

    A class, or its name with or without the module's. Returns the modules; ConfigError if there are none.
    """
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo ``set_z3_leaf_modules``, before ``initialize``."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark ``model`` itself, or take the mark away."""
    setattr(model, MARK, flag)


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether ``model`` itself is marked."""
    return bool(getattr(model, MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules inside ``model`` that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def _set(
    model: nn.Module, classes: Sequence[type | str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    found = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    if not found and raise_if_not_found:
        names = ", ".join(each if isinstance(each, str) else each.__name__ for each in classes)
        raise ConfigError(f"the model has no module of class {names}; print(model) shows what it has")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_of(module: nn.Module, wanted: type | str) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    kind = type(module)
    return wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
