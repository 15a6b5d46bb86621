"""Layers of bitsandbytes: the statistics that their packed weights need, by the names under which they are stored.

bitsandbytes is not imported: classes are known by their names and attributes.

- A ``Params4bit`` holds its codes, and a ``QuantState`` that no module registers: the scale of each block (``absmax``),
  the codebook, and for scales that are quantised once more those of theirs.
- A ``Linear8bitLt`` holds its codes as ``Int8Params``, and computes with a second reference to them and to the scale of
  each row (``CB`` and ``SCB`` of its ``state``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tiering.errors import ConfigError

_PACKED_FOR_CPU = "support_avx512bf16_for_cpu"
"""The attribute of a 4-bit layer that lets evaluation on a CPU store the codes in another order."""


class Place(NamedTuple):
    """``attribute`` of ``holder`` is an inner tensor; ``name`` is its name as a parameter of the module."""

    holder: Any
    attribute: str
    name: str


def statistics(module: nn.Module, name: str, param: nn.Parameter) -> Iterator[Place]:
    """The statistics of ``param``, the parameter ``name`` of ``module``, if it is packed by bitsandbytes."""
    state: Any = getattr(param, "quant_state", None)
    if isinstance(getattr(state, "absmax", None), Tensor):
        yield Place(state, "absmax", f"{name}.absmax")
        yield Place(state, "code", f"{name}.quant_map")
        if state.nested:
            yield Place(state.state2, "absmax", f"{name}.nested_absmax")
            yield Place(state.state2, "code", f"{name}.nested_quant_map")
            yield Place(state, "offset", f"{name}.nested_offset")
        # Its name keeps a checkpoint apart from one of the other type, which has tensors of the same shapes.
        yield Place(
            SimpleNamespace(form=_form(state)), "form", f"{name}.quant_state.bitsandbytes__{state.quant_type}"
        )
    elif _is_8_bit(param):
        layer: Any = module
        if layer.weight.CB is not None:
            layer.init_8bit_state()
        yield Place(layer.state, "SCB", "SCB")


def check(name: str, module: nn.Module, param: nn.Parameter) -> None:
    """Raise ConfigError for a packed parameter that cannot be tiered."""
    if getattr(getattr(param, "quant_state", None), "packing_format_for_cpu", False):
        raise ConfigError(
            f"an evaluation on the CPU has stored parameter {name!r} in another order, in which it cannot be trained:"
            " load the model again, and initialize the engine before you evaluate it"
        )
    if _is_8_bit(param) and not hasattr(getattr(module, "state", None), "SCB"):
        raise ConfigError(
            f"parameter {name!r} is an Int8Params of bitsandbytes in a {type(module).__name__}; only those of its"
            " Linear8bitLt can be tiered: keep this module in floats (llm_int8_skip_modules)"
        )


def serve(module: nn.Module) -> bool:
    """Make a layer of bitsandbytes compute with its parameters alone, wherever they are; False for other modules.

    The statistics of ``module`` are its parameters by now.
    """
    layer: Any = module
    if getattr(layer, _PACKED_FOR_CPU, False):
        setattr(layer, _PACKED_FOR_CPU, False)
    elif not _is_8_bit(dict(module._parameters).get("weight")) or isinstance(layer.state, _Served):
        return False
    else:
        kind: Any = type(layer.state)
        layer.state.CB = None
        layer.state.layer = layer
        layer.state.__class__ = _served_form(kind)
    return True


def restore(module: nn.Module) -> None:
    """Undo ``serve``."""
    layer: Any = module
    if hasattr(layer, _PACKED_FOR_CPU):
        setattr(layer, _PACKED_FOR_CPU, True)
        return
    layer.state.__class__ = type(layer.state).__bases__[-1]
    del layer.state.layer
    layer.state.CB = layer.weight.data


class _Served:
    """Mixed into the state of an 8-bit layer: its codes are the layer's parameter, also after that has moved."""

    layer: Any

    # The name in bitsandbytes, here and below.
    @property
    def CB(self) -> Tensor:  # noqa: N802
        # Not .data, whose readers may change it unseen.
        codes: Tensor = self.layer.weight.detach()
        return codes

    @CB.setter
    def CB(self, codes: Tensor) -> None:  # noqa: N802
        """The layer assigns what it has read."""


@cache
def _served_form(kind: type) -> type:
    return type(kind.__name__, (_Served, kind), {"__module__": __name__})


def _is_8_bit(param: Tensor | None) -> bool:
    named = any(base.__name__ == "Int8Params" for base in type(param).__mro__)
    # Before it is quantised, it holds ordinary numbers.
    return named and isinstance(param, Tensor) and not param.is_floating_point()


def _form(state: Any) -> Tensor:
    """What the packed bytes mean, as bitsandbytes stores it with them; the offset is a tensor of its own."""
    fields = {
        "quant_type": state.quant_type,
        "blocksize": state.blocksize,
        "dtype": str(state.dtype).removeprefix("torch."),
        "shape": tuple(state.shape),
    }
    if state.nested:
        fields |= {
            "nested_blocksize": state.state2.blocksize,
            "nested_dtype": str(state.state2.dtype).removeprefix("torch."),
        }
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8, device="cpu")
