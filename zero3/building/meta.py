"""Models that were built on the meta device: their parameters and buffers have shapes, but no initial values.

The initializers of an ordinary build run now: ``reset_parameters`` of each module, in the order in which constructors
finish, and for models of transformers ``initialize_weights``. They run under ``zero.Init``, so they take no memory
either. Values that only a constructor computes are lost; where that can be detected, it is an error.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tiering.errors import ConfigError
from zero3.building.peft_models import initialise_adapters
from zero3.building.weights import Matched
from zero3.building.zero_init import Init, forget
from zero3.params import resharded

REMEDY = "build this model inside `with tiering.zero.Init():`, which records all operations"


def copied_to_meta(model: nn.Module) -> tuple[nn.Module, dict[int, nn.Parameter]]:
    """A copy of ``model`` whose parameters are on the meta device, and these by the ids of those of ``model``."""
    copies = {
        id(param): nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        for param in model.parameters()
    }
    return copy.deepcopy(model, dict[int, Any](copies)), copies


def build_on_meta(model: nn.Module, loaded: Matched | None = None) -> None:
    """Give tensors on the meta device their initial values: buffers at once, parameters when they are needed.

    Tensors in ``loaded`` get their values from the files instead, and adapters over them those that peft gives. Raises
    ConfigError, with all tensors on meta again, if initial values are unknown: a constructor wrote a parameter in
    another way than ``reset_parameters``, or no initializer writes it.
    """
    names = {param: name for name, param in model.named_parameters() if param.is_meta}
    buffers_on_meta = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
    if not names and not buffers_on_meta:
        return
    stored = () if loaded is None else loaded.sources
    stored_buffers = () if loaded is None else {module._buffers[short] for module, short, _ in loaded.buffers}
    referred = [name for param, name in names.items() if weakref.getweakrefs(param)]
    if referred:
        raise ConfigError(
            f"{_first(referred)}: on the meta device, and it cannot get memory there while weak references to it exist,"
            f" such as those of nn.LSTM; {REMEDY}"
        )
    versions = {param: param._version for param in names if param not in stored}
    replaced = _replaced(model, versions)
    try:
        with Init() as build:
            for param in names:
                _give_memory(param)
                build.tape.may_free(param)
            for param in model.parameters():
                # Its values are in the files, or it has some, as an adapter that was loaded.
                if param in stored or param not in names:
                    param._is_hf_initialized = True  # type: ignore[attr-defined] # the mark of transformers
            for module, short, param in replaced:
                replacement = nn.Parameter(torch.empty(param.shape, dtype=param.dtype))
                build.tape.may_free(replacement)
                module._parameters[short] = replacement
                versions[replacement] = 0
            new_buffers = {
                name: torch.empty_like(buffer, device="cpu") for name, buffer in buffers_on_meta.items()
            }
            for name, buffer in new_buffers.items():
                _put_buffer(model, name, buffer)
            added: Counter[nn.Parameter] = Counter()
            for module in _children_first(model):
                added.update(_initialise(module, versions, set(new_buffers.values())))
            # After transformers, which takes the layers of an adapter for those of its model.
            adapters = set() if loaded is None else initialise_adapters(model, versions)
            unset = [
                name
                for param, name in names.items()
                if param in versions
                and param not in adapters
                and (param._version == 0 or param._version - added[param] != versions[param])
            ]
            for name, buffer in buffers_on_meta.items():
                if buffer not in stored_buffers and model.get_buffer(name)._version == 0:
                    unset.append(name)
            if unset:
                raise ConfigError(
                    f"{_first(unset)}: built on the meta device, and no initializer sets the values that the"
                    f" constructors set; {REMEDY}"
                )
    except BaseException:
        for param in names:
            _back_to_meta(param)
        for name, buffer in buffers_on_meta.items():
            _put_buffer(model, name, buffer)
        raise
    finally:
        for module, short, param in replaced:
            module._parameters[short] = param


def _first(names: list[str]) -> str:
    return ", ".join(names[:10]) + (" and others" if len(names) > 10 else "")


def _replaced(
    model: nn.Module, params: Collection[nn.Parameter]
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, name, parameter) where a tied parameter has replaced one that the constructor had initialized.

    In models of transformers these are all places but the first. In other models either order is common.
    """
    places, visited = [], set()
    for name, module in model.named_modules():
        for short, param in module._parameters.items():
            if param is None or param not in params:
                continue
            if param in visited and not _is_of_transformers(model):
                raise ConfigError(
                    f"{name}.{short} is tied to another parameter, and both are on the meta device, so it is unknown"
                    f" which initial values they share; {REMEDY}"
                )
            if param in visited:
                places.append((module, short, param))
            visited.add(param)
    return places


def _is_of_transformers(module: nn.Module) -> bool:
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _give_memory(param: nn.Parameter) -> None:
    """Allocate memory without values for a parameter on meta. It stays the same object."""
    _become(param, torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device="cpu"))


def _back_to_meta(param: nn.Parameter) -> None:
    forget([param])
    resharded.release(param)
    _become(param, torch.empty(param.size(), dtype=param.dtype, device="meta"))


def _become(param: nn.Parameter, values: Tensor) -> None:
    """Replace the tensor of ``param`` by ``values``, which may be on another device."""
    other = nn.Parameter(values, requires_grad=param.requires_grad)
    other.__class__ = type(param)
    other.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, other)


def _put_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    module, _, short = name.rpartition(".")
    model.get_submodule(module)._buffers[short] = buffer


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order in which constructors finish."""
    for child in module.children():
        yield from _children_first(child)
    yield module


def _initialise(
    module: Any, params: Collection[nn.Parameter], buffers: Collection[Tensor]
) -> dict[nn.Parameter, int]:
    """Run the initializers of the module's own parameters and buffers, and then those of transformers.

    Returns how often transformers has written each parameter.
    """
    own = any(param in params for param in module._parameters.values())
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None and (own or any(buffer in buffers for buffer in module._buffers.values())):
        reset()
    before = {param: param._version for param in module.parameters()} if _is_of_transformers(module) else {}
    if before:
        module.initialize_weights()
    return {param: param._version - version for param, version in before.items()}
