"""Copies of tensors that are nested in lists, tuples and dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Device = torch.device | str


def clone_tensors_for_torch_save(item: Any, device: Device = torch.device("cpu")) -> Any:  # noqa: B008 # immutable
    """``item`` with a detached copy on ``device`` of each tensor in it.

    ``torch.save`` of a view writes the whole memory that it is a view of; of a copy it writes the copy.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    return _mapped(item, lambda part: clone_tensors_for_torch_save(part, device))


def move_to_device(item: Any, device: Device, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """``item`` with each tensor in it on ``device``. Shapes and dtypes stay.

    A tensor for which ``criterion_func`` holds moves in place, so that all references to it see the new memory.
    """
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device).data
        return item
    if isinstance(item, list | tuple | dict):
        return _mapped(item, lambda part: move_to_device(part, device, criterion_func))
    return item.to(device)


def _mapped(item: Any, function: Callable[[Any], Any]) -> Any:
    """``function`` of each part of a list, tuple or dict; any other ``item`` itself."""
    if isinstance(item, dict):
        return type(item)({name: function(part) for name, part in item.items()})
    if isinstance(item, list | tuple):
        parts = [function(part) for part in item]
        return parts if isinstance(item, list) else tuple(parts)
    return item
