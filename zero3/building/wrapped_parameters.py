"""Takes wrapped parameters of a model apart for the engine, and puts them together again.

See Note [A wrapped parameter lives on tiers by its inner tensors]. The names of inner tensors continue that of their
parameter ("mlp.up.weight.scale"), or are those that bitsandbytes stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tiering.errors import ConfigError
from zero3.building import bitsandbytes_layers
from zero3.building.bitsandbytes_layers import Place
from zero3.params import inner_tensors, resharded
from zero3.params.inner_tensors import InnerTensor


@dataclass
class WrappedParameters:
    """The wrapped parameters of a model, whose modules have inner tensors as parameters until ``join``.

    A wrapper is then an ordinary attribute of its modules under its own name; a packed parameter of bitsandbytes stays
    a parameter beside its statistics.
    """

    _wrapped: list[nn.Parameter] = field(default_factory=list)
    _places: list[tuple[Place, InnerTensor]] = field(default_factory=list)
    _modules: list[tuple[nn.Module, dict[str, nn.Parameter | None]]] = field(default_factory=list)
    _layers: list[nn.Module] = field(default_factory=list)

    @classmethod
    def split(cls, model: nn.Module, device: torch.device | None = None) -> WrappedParameters:
        """Take the wrapped parameters of ``model`` apart, which ``check_wrapped`` has accepted.

        What is apart already, because the model has an engine, stays so. Wrappers get ``device``; their inner tensors
        stay where they are. Raises ConfigError for a wrapper that cannot.
        """
        split = cls()
        try:
            split._split(model, device)
        except BaseException:
            split.join()
            raise
        return split

    def _split(self, model: nn.Module, device: torch.device | None) -> None:
        known: dict[nn.Parameter, list[InnerTensor]] = {}
        for prefix, module in model.named_modules():
            before = dict(module._parameters)
            after: dict[str, nn.Parameter | None] = {}
            for name, param in before.items():
                if param is None or not (places := list(_places(module, name, param))):
                    after[name] = param
                    continue
                if param not in known:
                    if inner_tensors.is_wrapper(param) and device is not None and param.device != device:
                        _move(f"{prefix}.{name}" if prefix else name, param, device)
                        places = list(_places(module, name, param))
                    known[param] = self._take_apart(param, places)
                if not inner_tensors.is_wrapper(param):
                    after[name] = param
                # The names in this module: a shared weight may have another one elsewhere.
                after |= zip((place.name for place in places), known[param], strict=True)
            if after.keys() != before.keys():
                self._modules.append((module, before))
                module._parameters.clear()
                module._parameters.update(after)
                module.__dict__.update({name: before[name] for name in before.keys() - after.keys()})
            if bitsandbytes_layers.serve(module):
                self._layers.append(module)

    def join(self) -> None:
        """Put the wrapped parameters together from the present values of their inner tensors, as before ``split``.

        What a script has assigned since then, as a merge of adapters does, stays.
        """
        for (holder, attribute, _), inner in self._places:
            if getattr(holder, attribute) is inner:
                setattr(holder, attribute, inner.data)
        for wrapped in self._wrapped:
            parts = inner_tensors.unlink(wrapped)
            # Released parameters may be on another device than before.
            if inner_tensors.is_wrapper(wrapped) and parts and parts[0].device != wrapped.device:
                # A weak reference made since then forbids it: then only the device that the wrapper names is wrong.
                with suppress(RuntimeError):
                    inner_tensors.move(wrapped, parts[0].device)
        for module, before in self._modules:
            _register_again(module, before)
        for layer in self._layers:
            bitsandbytes_layers.restore(layer)
        for entries in (self._places, self._wrapped, self._modules, self._layers):
            entries.clear()

    def undo(self) -> None:
        """``join``, unless values have left the model already."""
        if not any(resharded.is_adopted(inner) for _, inner in self._places):
            self.join()

    def _take_apart(self, param: nn.Parameter, places: list[Place]) -> list[InnerTensor]:
        parts = []
        for place in places:
            tensor = getattr(place.holder, place.attribute)
            part = InnerTensor(tensor.detach(), requires_grad=False)
            # Before the change, as below: after an interruption between the two, ``join`` undoes what was done.
            self._places.append((place, part))
            setattr(place.holder, place.attribute, part)
            parts.append(part)
        own = [] if inner_tensors.is_wrapper(param) else [param]
        self._wrapped.append(param)
        inner_tensors.link(param, [*own, *parts])
        return parts


def _move(name: str, wrapper: nn.Parameter, device: torch.device) -> None:
    try:
        inner_tensors.move(wrapper, device)
    except RuntimeError as error:
        raise ConfigError(
            f"parameter {name!r}, a {type(wrapper).__name__} on {wrapper.device}, cannot become one on {device}"
            f" ({error}): move the model to {device} before initialize"
        ) from error


def _register_again(module: nn.Module, before: dict[str, nn.Parameter | None]) -> None:
    """Make the wrappers ``before`` parameters of ``module`` again, in place of their inner tensors."""
    params = {name: param for name, param in module._parameters.items() if not isinstance(param, InnerTensor)}
    for name, param in before.items():
        if module.__dict__.get(name) is param and param is not None:
            del module.__dict__[name]
            params[name] = param
    module._parameters.clear()
    module._parameters.update({name: params[name] for name in (*before, *params) if name in params})


def _places(module: nn.Module, name: str, param: nn.Parameter) -> Iterator[Place]:
    """Where the inner tensors of ``param`` are, and their names in ``module``; none for an ordinary parameter."""
    if inner_tensors.is_wrapper(param):
        for holder, attribute, path in inner_tensors.places_inside(param):
            yield Place(holder, attribute, f"{name}.{path}")
    elif inner_tensors.parts_of(param) == (param,):
        yield from bitsandbytes_layers.statistics(module, name, param)


def check_wrapped(model: nn.Module) -> None:
    """Raise ConfigError for a wrapped parameter of ``model`` that cannot be taken apart."""
    for prefix, module in model.named_modules():
        for short, param in module._parameters.items():
            if param is None:
                continue
            name = f"{prefix}.{short}" if prefix else short
            bitsandbytes_layers.check(name, module, param)
            if inner_tensors.is_wrapper(param):
                _check_wrapper(name, param)
            elif type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                raise ConfigError(
                    f"parameter {name!r} is a {type(param).__name__}, a tensor subclass with its own storage format"
                    " (quantised?), which does not say what it holds (__tensor_flatten__): keep its codes and scales as"
                    " ordinary frozen parameters of the module, or quantise with tiering.quantize"
                )


def _check_wrapper(name: str, param: nn.Parameter) -> None:
    title = f"parameter {name!r}, a {type(param).__name__},"
    if param.requires_grad:
        raise ConfigError(
            f"{title} requires a gradient, and a quantised weight has none: freeze it with requires_grad_(False), and"
            " train an adapter"
        )
    for holder, attribute, path in inner_tensors.places_inside(param):
        inner: Any = getattr(holder, attribute)
        if inner.layout is not torch.strided or not inner.is_contiguous() or inner.is_meta:
            form = "on the meta device" if inner.is_meta else "not contiguous"
            raise ConfigError(
                f"{title} holds {path!r}, which is {form} and cannot be tiered: quantise the model in memory, with a"
                " format whose tensors are contiguous, or use tiering.quantize"
            )
        try:
            setattr(holder, attribute, inner)
        except (AttributeError, TypeError) as error:
            raise ConfigError(
                f"{title} does not let {path!r} be replaced ({error}), so it cannot be tiered: use tiering.quantize, or"
                " keep codes and scales as ordinary frozen parameters"
            ) from error
