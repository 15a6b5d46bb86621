"""Values of a training script as JSON and tensors, and back: client_state, schedulers, random states, data positions.

JSON has no tuples, no NaN and only string keys. Values that it lacks are objects with one key that begins with "$":

    (1, "a")             {"$tuple": [1, "a"]}
    {3: "a", "$x": 1}    {"$dict": [[3, "a"], ["$x", 1]]}      if a key is not a string, or begins with "$"
    float("inf")         {"$float": "inf"}
    torch.zeros(2)       {"$tensor": "client_state['x']"}      the name of the tensor, which is stored apart

so the encoding of any dict of a user is unambiguous. Decoding makes values only, and runs no code: a save refuses other
classes, and the error says what to save instead.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tiering._strict_json import short
from tiering.errors import CheckpointError, ConfigError

# A level takes up to three levels of JSON; Python's JSON parser fails before a thousand.
DEPTH = 100
# The dtypes that safetensors can name.
DTYPES = frozenset(
    {
        *(
            torch.float64,
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.bool, torch.complex64),
    }
)

_DICTS = (dict, OrderedDict, defaultdict)
_NOT_FINITE = {str(number): number for number in (math.nan, math.inf, -math.inf)}
_CODES = ("f8", "f4", "f2", "?", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1")
_SCALARS = {np.dtype(code).name: np.dtype(code).type for code in _CODES}
_TORCH_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_T = TypeVar("_T")


class _Place(NamedTuple):
    """A place inside a value. Its text is made only for an error, or for the name of a tensor."""

    outer: _Place | None
    key: Any
    depth: int

    def within(self, key: Any) -> _Place:
        return _Place(self, key, self.depth + 1)

    def __str__(self) -> str:
        return str(self.key) if self.outer is None else f"{self.outer}[{short.repr(self.key)}]"


def encode(value: Any, tensors: dict[str, Tensor], place: str = "value") -> Any:
    """Encode ``value`` for JSON; each tensor and array in it is copied into ``tensors``, under a new name.

    ``where`` is the name of the value in errors and tensor names ("client_state"). ``decode`` returns an equal value,
    except: an OrderedDict or defaultdict becomes a dict, a Parameter a tensor, tensors are on the CPU, and an object
    that is referenced twice becomes two. Raises ConfigError, with the place, for a value without a plain form.
    """
    return _encode(value, tensors, _Place(None, place, 0))


def decode(value: Any, tensors: dict[str, Tensor], place: str = "value") -> Any:
    """The value that ``encode`` encoded; CheckpointError, with the place, if ``value`` is not such an encoding."""
    return _decode(value, tensors, _Place(None, place, 0))


def _encode(value: Any, tensors: dict[str, Tensor], at: _Place) -> Any:
    if at.depth > DEPTH:
        raise ConfigError(
            f"{_shortened(at)} is nested deeper than {DEPTH} levels: it contains itself, or must be"
            " flattened before the save"
        )
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return _encode_items(value, tensors, at)
    if kind is tuple:
        return {"$tuple": _encode_items(value, tensors, at)}
    if kind in _DICTS:
        if all(type(key) is str and _is_plain_key(key) for key in value):
            return {key: _encode(item, tensors, at.within(key)) for key, item in value.items()}
        return {"$dict": _encode_pairs(value, tensors, at)}
    if kind is Counter:
        return {"$counter": _encode_pairs(value, tensors, at)}
    if kind is set or kind is frozenset:
        items = [_encode(item, tensors, at.within(item)) for item in value]
        return {f"${kind.__name__}": sorted(items, key=json.dumps)}  # independent of the hash seed
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, PurePath):
        return {"$path": str(value)}
    if kind is torch.dtype:
        return {"$dtype": str(value)}
    if kind is torch.Size:
        return {"$size": list(value)}
    if isinstance(value, Tensor):
        return {"$tensor": _keep(_copy_of_tensor(value, at), tensors, at)}
    if kind is np.ndarray:
        return {"$array": _keep(_copy_of_array(value, at), tensors, at)}
    if isinstance(value, np.generic) and value.dtype.name in _SCALARS:
        return {"$scalar": [value.dtype.name, _encode(value.item(), tensors, at)]}
    raise ConfigError(
        f"{_shortened(at)} is of class {kind.__module__}.{kind.__qualname__}, which a checkpoint does not support;"
        f" save {_instead(value, at)}"
    )


def _is_plain_key(key: str) -> bool:
    """Whether JSON can hold the key: it has no tag, and no lone surrogate (of a file name that is not UTF-8)."""
    return not key.startswith("$") and key.encode(errors="replace").decode() == key


def _encode_items(value: list[Any] | tuple[Any, ...], tensors: dict[str, Tensor], at: _Place) -> list[Any]:
    return [_encode(item, tensors, at.within(index)) for index, item in enumerate(value)]


def _encode_pairs(value: dict[Any, Any], tensors: dict[str, Tensor], at: _Place) -> list[list[Any]]:
    return [
        [_encode(key, tensors, at.within(key)), _encode(item, tensors, at.within(key))]
        for key, item in value.items()
    ]


def _keep(tensor: Tensor, tensors: dict[str, Tensor], at: _Place) -> str:
    name = place = str(at)
    # Different keys may have the same text.
    while name in tensors:
        name = f"{place}#{len(tensors)}"
    tensors[name] = tensor
    return name


def _copy_of_tensor(value: Tensor, at: _Place) -> Tensor:
    """A contiguous copy, because training may continue while the checkpoint is written."""
    if value.is_nested or value.is_meta or value.layout != torch.strided or value.dtype not in DTYPES:
        raise ConfigError(
            f"{_shortened(at)} is a tensor of {value.dtype} and {value.layout} on {value.device}; a checkpoint supports"
            f" dense tensors of {', '.join(sorted(map(str, DTYPES)))}"
        )
    copy = torch.empty(value.shape, dtype=value.dtype, device="cpu")
    with torch.no_grad():
        copy.copy_(value)
    return copy


def _copy_of_array(value: np.ndarray[Any, Any], at: _Place) -> Tensor:
    if f"torch.{value.dtype.name}" not in map(str, DTYPES) or not value.dtype.isnative:
        raise ConfigError(
            f"{_shortened(at)} is an array of {value.dtype!r}; a checkpoint supports numbers in this machine's byte"
            f" order: save {_shortened(at)}.astype(...), or {_shortened(at)}.tolist()"
        )
    return torch.from_numpy(np.array(value, order="C"))


def _instead(value: Any, at: _Place) -> str:
    """The expression that saves ``value``, for the error."""
    place = _shortened(at)
    if isinstance(value, type):
        return "its name"
    if isinstance(value, enum.Enum):
        return f"{place}.value"
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return f"vars({place})"
    if dataclasses.is_dataclass(value):
        return f"dataclasses.asdict({place})"
    for method in ("_asdict", "state_dict", "get_state"):  # a named tuple's, a module's, a generator's
        if hasattr(value, method):
            return f"{place}.{method}()"
    for plain in (dict, list, tuple, set, str, int, float):
        if isinstance(value, plain):
            return f"{plain.__name__}({place})"
    if isinstance(value, bytearray | memoryview):
        return f"bytes({place})"
    return "the plain values from which it can be built"


def _decode(value: Any, tensors: dict[str, Tensor], at: _Place) -> Any:
    if at.depth > DEPTH:
        raise CheckpointError(
            f"{_shortened(at)} is nested deeper than {DEPTH} levels; the file is damaged, or of another program"
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return _decode_items(value, tensors, at)
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: _decode(item, tensors, at.within(key)) for key, item in value.items()}
    try:
        if len(value) > 1:
            raise ValueError("there is another key next to it")
        return _decode_tagged(tag, value[tag], tensors, at)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"{_shortened(at)} has {short.repr(tag)}, but {error}; the file is damaged, or from a newer version"
        ) from error


def _decode_tagged(tag: str, content: Any, tensors: dict[str, Tensor], at: _Place) -> Any:
    """The value of ``tag``. TypeError, ValueError or OverflowError if ``content`` does not fit the tag."""
    match tag:
        case "$tensor":
            return _check_choice(tensors, content)
        case "$array":
            return _check_choice(tensors, content).numpy()
        case "$scalar":
            name, item = content
            return _check_choice(_SCALARS, name)(_as(int | float, _decode(item, tensors, at)))
        case "$int":
            return int(_as(str, content), 16)
        case "$float":
            return _check_choice(_NOT_FINITE, content)
        case "$bytes":
            return base64.b64decode(_as(str, content), validate=True)
        case "$path":
            return Path(_as(str, content))
        case "$dtype":
            return _check_choice(_TORCH_DTYPES, content)
        case "$size":
            return torch.Size([_as_length(length) for length in _as(list, content)])
        case "$tuple":
            return tuple(_decode_items(_as(list, content), tensors, at))
        case "$set" | "$frozenset":
            items = _decode_items(_as(list, content), tensors, at)
            return (set if tag == "$set" else frozenset)(_unique(items))
        case "$dict" | "$counter":
            pairs = _decode_pairs(_as(list, content), tensors, at)
            return (dict if tag == "$dict" else Counter)(pairs)
    raise ValueError("this version does not know this tag")


def _decode_items(content: list[Any], tensors: dict[str, Tensor], at: _Place) -> list[Any]:
    return [_decode(item, tensors, at.within(index)) for index, item in enumerate(content)]


def _decode_pairs(content: list[Any], tensors: dict[str, Tensor], at: _Place) -> dict[Any, Any]:
    keys = _unique([_decode(key, tensors, at.within(key)) for key, _ in content])
    return {key: _decode(item, tensors, at.within(key)) for key, (_, item) in zip(keys, content, strict=True)}


def _unique(items: list[Any]) -> list[Any]:
    if len(set(items)) != len(items):
        raise ValueError("it contains an item twice")
    return items


def _check_choice(choices: dict[str, _T], name: Any) -> _T:
    if _as(str, name) not in choices:
        raise ValueError(f"{short.repr(name)} is unknown")
    return choices[name]


def _as(kind: Any, content: Any) -> Any:
    if not isinstance(content, kind):
        raise TypeError(f"{short.repr(content)} has the wrong type")
    return content


def _as_length(length: Any) -> int:
    if abs(_as(int, length)) >= 2**63:  # torch accepts it, and fails when it is used
        raise OverflowError(f"{short.repr(length)} is not a length")
    return int(length)


def _shortened(at: _Place) -> str:
    text = str(at)
    return text if len(text) <= 200 else f"{text[:200]}..."
