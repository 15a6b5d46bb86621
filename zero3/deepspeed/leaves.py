"""Marking modules whose parameters are unsharded together, whichever a forward uses: mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tiering.errors import ConfigError
from zero3.params.grouping import MARK


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Before ``initialize``: make each module of these classes one group, as ``leaf_module`` in the configuration.

    A class is given itself, or by its name with or without that of its Python module. Returns the modules. Raises
    ConfigError if there is none.
    """
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo ``set_z3_leaf_modules``, before ``initialize``."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark ``model`` itself, or remove the mark."""
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
    modules = [module for module in model.modules() if any(_is_of(module, each) for each in classes)]
    if not modules and raise_if_not_found:
        names = ", ".join(each if isinstance(each, str) else each.__name__ for each in classes)
        raise ConfigError(f"the model has no module of class {names}; print(model) shows its modules")
    for module in modules:
        set_z3_leaf_module(module, flag)
    return modules


def _is_of(module: nn.Module, module_class: type | str) -> bool:
    if isinstance(module_class, type):
        return isinstance(module, module_class)
    kind = type(module)
    return module_class in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
