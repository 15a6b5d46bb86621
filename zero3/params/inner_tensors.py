"""Parameters that wrap other tensors, such as quantised weights of torchao and bitsandbytes, and these inner tensors.

Note [A wrapped parameter lives on tiers by its inner tensors]
    A tensor subclass with a storage format of its own has no bytes: it holds codes, scales and zero points as ordinary
    tensors, which torch's protocol names (``__tensor_flatten__``). Each of them becomes a frozen parameter of the same
    module, an ``InnerTensor``, which is planned, moved, sharded and saved like any other one. The wrapper itself stays
    what the module computes with, the same object, and holds the inner parameters in place of the tensors. While one of
    these is resharded, the wrapper has another class, which fetches all of them before any operation, or raises.

    A packed parameter of bitsandbytes is itself a parameter with bytes; its statistics become inner tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from tiering.errors import ResidencyError
from zero3.params import resharded
from zero3.params.compilation import eager

TINY = 4096
"""Smaller inner tensors, such as a codebook or an offset, do not leave the device: a page is the smallest transfer."""

_parts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # wrapped parameter -> its parts


class InnerTensor(nn.Parameter):
    """A tensor inside a wrapped parameter, as a frozen parameter that keeps its dtype.

    ``wrapper`` is a weak reference to a tensor subclass around it, and None if the wrapped parameter has bytes itself.
    """

    wrapper: Callable[[], Tensor | None] | None = None

    @property
    def is_tiny(self) -> bool:
        """Whether it stays on the device."""
        return self.numel() * self.element_size() < TINY


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no bytes of its own, but inner tensors."""
    return is_traceable_wrapper_subclass(tensor)


def places_inside(wrapper: Tensor, path: str = "") -> Iterator[tuple[Tensor, str, str]]:
    """(holder, attribute, dotted path) of each ordinary tensor in ``wrapper``; wrappers may be inside of wrappers."""
    for attribute in wrapper.__tensor_flatten__()[0]:  # type: ignore[attr-defined] # of is_wrapper
        inner = getattr(wrapper, attribute)
        if is_wrapper(inner):
            yield from places_inside(inner, f"{path}{attribute}.")
        else:
            yield wrapper, attribute, f"{path}{attribute}"


def ordinary_tensors(tensor: Tensor) -> Iterable[Tensor]:
    """``tensor``, or the ordinary tensors inside of it."""
    if not is_wrapper(tensor):
        return (tensor,)
    return (getattr(holder, attribute) for holder, attribute, _ in places_inside(tensor))


def move(wrapper: nn.Parameter, device: torch.device) -> None:
    """Make ``device`` that of ``wrapper``, which keeps its inner tensors: their owner moves these by itself.

    Torch lets no wrapper take data on another device, so the object gets the inside of a new wrapper. Raises
    RuntimeError if weak references to the object forbid that.
    """
    inner = [getattr(holder, attribute) for holder, attribute, _ in places_inside(wrapper)]
    own = dict(vars(wrapper))
    twin = nn.Parameter(_empty_like(wrapper, device), requires_grad=False)
    torch.utils.swap_tensors(wrapper, twin)
    vars(wrapper).update({name: value for name, value in own.items() if name not in vars(wrapper)})
    for (holder, attribute, _), tensor in zip(places_inside(wrapper), inner, strict=True):
        setattr(holder, attribute, tensor)


def _empty_like(tensor: Any, device: torch.device) -> Tensor:
    if not is_wrapper(tensor):
        return torch.empty_like(tensor, device=device)
    names, context = tensor.__tensor_flatten__()
    inner = {name: _empty_like(getattr(tensor, name), device) for name in names}
    made: Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
    return made


def link(wrapped: Tensor, parts: Iterable[nn.Parameter]) -> None:
    """Note that ``wrapped`` consists of ``parts``; those that are inside of a wrapper refer to it from now on."""
    parts = tuple(parts)
    _parts[wrapped] = parts
    if is_wrapper(wrapped):
        for part in parts:
            assert isinstance(part, InnerTensor)
            part.wrapper = weakref.ref(wrapped)


def unlink(wrapped: Tensor) -> tuple[nn.Parameter, ...]:
    """Undo ``link``, when the engine has ended or has not started; returns the parts, none without a ``link``."""
    parts: tuple[nn.Parameter, ...] = _parts.pop(wrapped, ())
    for part in parts:
        if isinstance(part, InnerTensor):
            part.wrapper = None
    wrapped.__class__ = _plain_form(type(wrapped))
    return parts


def parts_of(param: nn.Parameter) -> tuple[nn.Parameter, ...]:
    """The parameters on tiers that ``param`` consists of: itself, if it wraps nothing."""
    parts: tuple[nn.Parameter, ...] = _parts.get(param, (param,))
    return parts


def follow(part: nn.Parameter) -> None:
    """Give the wrapper around ``part``, which has just been shown or hidden, the class for that."""
    wrapper = part.wrapper() if isinstance(part, InnerTensor) and part.wrapper is not None else None
    if wrapper is not None:
        plain = _plain_form(type(wrapper))
        hidden = any(resharded.is_resharded(each) for each in _parts[wrapper])
        wrapper.__class__ = _hidden_form(plain) if hidden else plain


class _Hidden:
    """Mixed into the class of a wrapper while one of its inner tensors is resharded."""

    @classmethod
    @eager
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if resharded.is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        _show(func, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    @eager
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # For code that bypasses __torch_function__: nodes of autograd, and torch's own C++.
        kwargs = kwargs or {}
        _show(func, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self: Any) -> str:
        inner = ", ".join(map(repr, _parts[self]))
        return f"{type(self).__name__} of shape {tuple(self.shape)}, resharded: {inner}"


@cache
def _hidden_form(plain: type[Tensor]) -> type[Tensor]:
    return type(plain.__name__, (_Hidden, plain), {"__module__": __name__})


def _plain_form(kind: type[Tensor]) -> type[Tensor]:
    return kind.__bases__[-1] if kind.__bases__[0] is _Hidden else kind


def _is_hidden(value: Any) -> bool:
    return isinstance(value, _Hidden)


def _show(func: Callable[..., Any], arguments: Any) -> None:
    """Fetch the inner tensors of all wrappers among ``arguments`` into the running pass; ResidencyError without one."""
    wrappers = list(_hidden_among(arguments))
    for wrapper in wrappers:
        for part in _parts[wrapper]:
            resharded.bring(part, func)
    # Room for the last one may have been made by resharding an earlier one.
    if any(map(_is_hidden, wrappers)):
        raise ResidencyError(
            f"{getattr(func, '__name__', func)} reads several quantised weights, and the device has no room for all of"
            " them. Raise device_budget, or stage3_prefetch_bucket_size if the budget has room"
        )


def _hidden_among(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments.values() if isinstance(arguments, dict) else arguments:
        if _is_hidden(argument):
            yield argument
        elif isinstance(argument, list | tuple | dict):
            yield from _hidden_among(argument)
