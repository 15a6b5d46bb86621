"""The tensors of exported files: their names, and the ranges of the model's parameters that they store.

This is the inverse of weight_names.py. transformers stores some models under other names than those in memory, for
example experts one by one; files with transformers' own names load anywhere. A peft adapter is stored alone, without
its name. Every stored tensor is a range of a parameter. A tensor that transformers computes before a save, for example
by a transposition, is stored as it is in the model if transformers loads that, too; otherwise it is refused.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tiering.errors import ConfigError
from tiering.placement.row_tiles import joined_shape
from zero3.building.encoded_weights import EncodedTensor, encoded_tensors
from zero3.building.peft_models import is_from_peft
from zero3.params.inner_tensors import InnerTensor
from zero3.params.layout import product
from zero3.params.row_tiles import tiled_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A tensor to store: the elements of a parameter or buffer of the model from ``first`` on, in ``shape``.

    If ``tensor`` has the codes of ``quantised``, elements are those of the decoded weight. If it is cut into ``tiles``,
    ``tensor`` is the first of them.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    first: int = 0
    quantised: EncodedTensor | None = None
    tiles: tuple[Tensor, ...] = ()

    @property
    def numel(self) -> int:
        return product(self.shape)


def own_names(model: nn.Module) -> list[Saved]:
    """The tensors of ``model.state_dict()``; a tied tensor once, under the name that a loader expects.

    The codes and scales of a quantised weight are one tensor: the weight.
    """
    tiles = _tiles(model)
    quantised: dict[Tensor, EncodedTensor] = {each.codes: each for each in encoded_tensors(model)}
    scales = {each.scales for each in quantised.values()}
    names: dict[Tensor, list[str]] = defaultdict(list)
    for name, value in _state(model).items():
        if isinstance(value, Tensor):
            names[value].append(name)
        else:
            log.warning("%r is not a tensor and is not saved (%s)", name, type(value).__name__)
    tied = _tied_by_declaration(model)
    saved_tensors = []
    for tensor, tensor_names in names.items():
        if tensor in scales:
            continue
        encoded, parts = quantised.get(tensor), tiles.get(tensor, ())
        shape = (
            joined_shape([tuple(each.shape) for each in parts or (tensor,)])
            if encoded is None
            else encoded.shape
        )
        if isinstance(model, _transformers_models()):
            untied_names = [
                name for name in tensor_names if not any(re.search(pattern, name) for pattern in tied)
            ]
        else:
            untied_names = []
        saved_tensors += [
            Saved(name, tensor, shape, quantised=encoded, tiles=parts)
            for name in untied_names or tensor_names[:1]
        ]
    return saved_tensors


def _tiles(model: nn.Module) -> dict[Tensor, tuple[Tensor, ...]]:
    """The tiles of each weight that is cut, by the first of them."""
    layers = (each.layer for each in tiled_weights(model.named_modules()))
    return {layer.tile_weights[0]: layer.tile_weights for layer in layers}


def _state(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict(keep_vars=True)``; of a weight that is cut, the first tile under the name of the weight."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for tiled in tiled_weights(model.named_modules(remove_duplicate=False)):
        parts = [state.pop(name) for name in tiled.tiles if name in state]
        if parts:
            state[tiled.name] = parts[0]
    return state


def is_from_transformers(model: nn.Module) -> bool:
    """Whether ``model`` is a transformers model, with a config for ``from_pretrained``."""
    return isinstance(model, _transformers_models())


def has_adapter(model: nn.Module) -> bool:
    """Whether ``model`` has peft adapters: a wrapped model, or a transformers model with added adapters."""
    return is_from_peft(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def transformers_names(model: Any) -> list[Saved]:
    """The tensors that ``model.save_pretrained`` stores of a transformers model, under their names.

    Raises ConfigError for tensors that transformers computes for its files.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    own = [saved for saved in own_names(model) if saved.name not in ignored]
    for saved in own:
        if isinstance(saved.tensor, InnerTensor) and saved.tensor.wrapper is not None:
            raise ConfigError(
                f"{saved.name!r} is a part of a quantised weight, which transformers stores in a form of its own: to"
                " export the model, call release() of the engine and then save_pretrained() of the model"
            )
    try:
        from transformers.core_model_loading import WeightConverter, dot_natural_key
    # A version without conversions stores the names of the model.
    except ImportError:
        return own
    steps = [step.reverse_transform() for step in reversed(_conversions(model))]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    renamings = [step for step in steps if not isinstance(step, WeightConverter)]
    stored, unconverted = [], []
    # Some renamings depend on this order.
    for saved in sorted(own, key=lambda saved: dot_natural_key(saved.name)):
        parts = _parts(saved, converters)
        unconverted += [] if parts else [saved]
        for part in parts:
            name, _ = _renamed(part.name, renamings)
            stored.append(replace(part, name=name))
    if unconverted:
        _check_loads(model, unconverted)
    return stored + unconverted


def adapter_names(model: Any, adapter: str) -> list[Saved]:
    """The tensors that peft, or transformers with a peft adapter, stores of ``adapter``, under their names."""
    from peft import get_peft_model_state_dict

    tiles = _tiles(model)
    values = {name: v for name, v in _state(model).items() if isinstance(v, Tensor)}
    shapes = {
        name: joined_shape([tuple(each.shape) for each in tiles.get(value, (value,))])
        for name, value in values.items()
    }
    places = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    value_of = {id(place): values[name] for name, place in places.items()}
    prefix = "" if is_from_peft(model) else "base_model.model."
    stored = []
    for name, place in get_peft_model_state_dict(model, places, adapter).items():
        if id(place) not in value_of:
            raise ConfigError(
                f"peft computes {name!r} of adapter {adapter!r} from other tensors when it saves, which a streamed"
                " save does not support; save with save_16bit_model(DIR), whose names are the model's own"
            )
        value = value_of[id(place)]
        stored.append(Saved(prefix + name, value, tuple(place.shape), tiles=tiles.get(value, ())))
    return stored


def _transformers_models() -> tuple[type[nn.Module], ...]:
    library = sys.modules.get("transformers.modeling_utils")
    return () if library is None else (library.PreTrainedModel,)


def _tied_by_declaration(model: nn.Module) -> list[str]:
    """Patterns of the names that transformers ties to other names when it loads."""
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]


def _conversions(model: Any) -> list[Any]:
    """The conversions of stored tensors with which transformers loads the model."""
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        return conversions
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    steps = get_model_conversion_mapping(model, add_legacy=False)
    # It is unknown whether the files have the prefix.
    return [step for step in steps if not isinstance(step, PrefixChange)]


def _renamed(name: str, steps: Iterable[Any]) -> tuple[str, str | None]:
    """``name`` after all of ``steps``, and the pattern that matched last."""
    last_pattern = None
    for step in steps:
        name, pattern = step.rename_source_key(name)
        last_pattern = pattern or last_pattern
    return name, last_pattern


def _parts(saved: Saved, converters: Iterable[Any]) -> list[Saved]:
    """The parts of ``saved`` that transformers stores, which are ranges of it; none if transformers computes them.

    transformers itself splits a tensor with the numbers of the parts, which gives the name of each part.
    """
    for converter in converters:
        name, pattern = converter.rename_source_key(saved.name)
        if pattern is None:
            continue
        columns = len(converter.target_patterns)
        if not _only_unstacks(converter.operations, columns):
            return []
        experts, *rows = saved.shape
        if columns > 1:
            rows[0] //= columns
        blocks = (experts, 1) if columns == 1 else (experts, columns, 1)
        numbers = torch.arange(experts * columns, device="cpu").view(blocks)
        # A copy, because a converter collects the tensors that it gets.
        splitter = copy.deepcopy(converter)
        splitter.add_tensor(name, saved.name, pattern, numbers)
        return [
            replace(saved, name=part, shape=tuple(rows), first=int(number) * product(rows))
            for part, number in splitter.convert(name).items()
        ]
    return [saved]


def _only_unstacks(operations: list[Any], columns: int) -> bool:
    """Whether ``operations`` only cut dimension 1 into ``columns`` (gate and up) and dimension 0 into experts."""
    steps = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
    unstack, cut = ("SplitModulelist", 0), ("Chunk", 1)
    return steps == ([unstack] if columns == 1 else [cut, unstack])


def _check_loads(model: Any, unconverted: list[Saved]) -> None:
    """ConfigError if transformers would misread a tensor of ``unconverted``, stored as it is in the model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    steps = get_model_conversion_mapping(model)
    # The order in which transformers loads.
    steps.sort(key=lambda step: isinstance(step, WeightConverter))
    model_names = set(model.state_dict(keep_vars=True))
    for saved in unconverted:
        name, pattern = _renamed(saved.name, steps)
        if name in model_names and (pattern is not None or name != saved.name):
            raise ConfigError(
                f"transformers computes what it stores of {saved.name!r} from several values, which a streamed save"
                " does not support; save with save_16bit_model(DIR), whose names and tensors are the model's own"
            )
    log.warning(
        "%r is saved as it is in the model (%d such tensors): transformers would convert it, and loads both forms",
        unconverted[0].name,
        len(unconverted),
    )
