"""Operations of torch: which memory each reads and writes, who does it, and where."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import zero3

from .order import Place

ROOT = str(Path(zero3.__file__).parents[1])
PLACE_DEPTH = 7

NO_ACCESS = {"set_", "resize_", "record_stream", "empty", "empty_like", "empty_strided", "new_empty"}
NO_ACCESS |= {"new_empty_strided"}
CROSSING = {"copy_", "_to_copy"}
WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}
"""What makes the CPU wait for the device, to know a value or a size."""


class Shape(NamedTuple):
    """What a schema says of an operation: its name, and of each argument whether it is written."""

    name: str
    written: tuple[bool, ...]  # by position
    written_names: frozenset[str]
    views: bool  # gives another look at an argument's memory

    @property
    def makes(self) -> bool:
        """Whether tensors that come of it, and did not go into it, have new memory."""
        return not self.views and self.name != "set_"

    @property
    def accesses(self) -> bool:
        return not self.views and self.name not in NO_ACCESS


@cache
def shape_of(operation: Any) -> Shape:
    arguments = operation._schema.arguments
    marks = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    names = frozenset(a.name for a, mark in zip(arguments, marks, strict=True) if mark)
    shared = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
    name = operation._schema.name.split("::")[1]
    return Shape(name, tuple(marks), names, shared and any(r.alias_info for r in operation._schema.returns))


def touched(shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors among the arguments, and whether they are written."""
    for position, value in enumerate(args):
        yield from ((tensor, shape.written[position]) for tensor in tensors_in(value))
    for name, value in kwargs.items():
        yield from ((tensor, name in shape.written_names) for tensor in tensors_in(value))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_cpu and value.layout is torch.strided and value.numel():
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first element of ``tensor`` to the end of the last."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


@cache
def _short(file: str) -> str:
    """The path of a file of the project; empty for what is not, and for what watches."""
    inside = file.startswith(ROOT) and "/.venv/" not in file
    watches = "/zero3/fake/" in file or file.endswith("/zero3/fake_device.py")
    return file[len(ROOT) + 1 :] if inside and not watches else ""


def place() -> Place:
    """Where the program is, as far as it is this project's."""
    frame, frames = sys._getframe(1), list[tuple[str, int, str]]()
    while frame is not None and len(frames) < PLACE_DEPTH:
        if file := _short(frame.f_code.co_filename):
            frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(frames)
