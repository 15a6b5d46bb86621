"""Which tensors files of a model's weights hold, by which names, and where in the model their values lie.

The other way round than weight_names.py. transformers stores some models by other names than it keeps them, experts one
by one for instance; files of transformers' own names load anywhere. Of peft's adapters nothing else is stored, without
the adapter's name. Whatever is stored is a range of a parameter: what transformers would have to compute first, as it
does to transpose, is left as the model has it where transformers loads that, too, and refused otherwise.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tiering.errors import ConfigError
from zero3.params.layout import product

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """A tensor to be stored: ``shape`` elements of a parameter or buffer of the model, from its ``first`` on."""

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    first: int = 0

    @property
    def numel(self) -> int:
        return product(self.shape)


def own_names(model: nn.Module) -> list[Saved]:
    """What ``model.state_dict()`` has, by its names; what is tied only once, by the name that a loader expects."""
    names: dict[Tensor, list[str]] = defaultdict(list)
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names[value].append(name)
        else:
            log.warning("%r is no tensor and is not saved (%s)", name, type(value).__name__)
    tied = _tied_by_declaration(model)
    found = []
    for tensor, known in names.items():
        if isinstance(model, _transformers_models()):
            kept = [name for name in known if not any(re.search(pattern, name) for pattern in tied)]
        else:
            kept = []
        found += [Saved(name, tensor, tuple(tensor.shape)) for name in kept or known[:1]]
    return found


def is_from_transformers(model: nn.Module) -> bool:
    """Whether ``model`` has a config that ``from_pretrained`` would find it by."""
    return isinstance(model, _transformers_models())


def is_from_peft(model: nn.Module) -> bool:
    """Whether ``model`` is a model with adapters, as peft wraps it."""
    library = sys.modules.get("peft")
    return library is not None and isinstance(model, library.PeftModel)


def has_adapter(model: nn.Module) -> bool:
    """Whether peft's adapters are in ``model``, wrapped by peft or added to a model of transformers."""
    return is_from_peft(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def transformers_names(model: Any) -> list[Saved]:
    """What ``model.save_pretrained`` would store of a transformers model, by its names.

    Raises ConfigError for tensors that transformers computes for its files.
    """
    ignored = set(model._keys_to_ignore_on_save or ())
    own = [saved for saved in own_names(model) if saved.name not in ignored]
    try:
        from transformers.core_model_loading import WeightConverter, dot_natural_key
    except ImportError:  # a version that keeps to names
        return own
    steps = [step.reverse_transform() for step in reversed(_conversions(model))]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    renamings = [step for step in steps if not isinstance(step, WeightConverter)]
    stored, left = [], []
    # Some renamings depend on this order.
    for saved in sorted(own, key=lambda saved: dot_natural_key(saved.name)):
        parts = _parts(saved, converters)
        left += [] if parts else [saved]
        for part in parts:
            name, _ = _renamed(part.name, renamings)
            stored.append(Saved(name, part.tensor, part.shape, part.first))
    if left:
        _check_loads(model, left)
    return stored + left


def adapter_names(model: Any, adapter: str) -> list[Saved]:
    """What peft, or transformers with an adapter of peft's, would store of ``adapter``, by its names."""
    from peft import get_peft_model_state_dict

    values = {name: v for name, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    places = {name: torch.empty(value.shape, device="meta") for name, value in values.items()}
    found = {id(place): values[name] for name, place in places.items()}
    prefix = "" if is_from_peft(model) else "base_model.model."
    stored = []
    for name, place in get_peft_model_state_dict(model, places, adapter).items():
        if id(place) not in found:
            raise ConfigError(
                f"peft computes {name!r} of adapter {adapter!r} from other tensors when it saves, which a stream"
                " cannot; save with save_16bit_model(DIR), whose names are the model's own"
            )
        stored.append(Saved(prefix + name, found[id(place)], tuple(place.shape)))
    return stored


def _transformers_models() -> tuple[type[nn.Module], ...]:
    library = sys.modules.get("transformers.modeling_utils")
    return () if library is None else (library.PreTrainedModel,)


def _tied_by_declaration(model: nn.Module) -> list[str]:
    """Patterns of the names that transformers ties to others when it loads."""
    return [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]


def _conversions(model: Any) -> list[Any]:
    """What transformers has done to stored tensors when it loaded the model, or would do."""
    known: list[Any] | None = getattr(model, "_weight_conversions", None)
    if known is not None:
        return known
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    steps = get_model_conversion_mapping(model, add_legacy=False)
    # Nothing says whether the files have the prefix.
    return [step for step in steps if not isinstance(step, PrefixChange)]


def _renamed(name: str, steps: Iterable[Any]) -> tuple[str, str | None]:
    """``name`` after all of ``steps``, and the pattern that matched last."""
    matched = None
    for step in steps:
        name, pattern = step.rename_source_key(name)
        matched = pattern or matched
    return name, matched


def _parts(saved: Saved, converters: Iterable[Any]) -> list[Saved]:
    """``saved`` in the parts that transformers stores it in, which are ranges of it; none where it is computed.

    transformers says itself which part becomes which: it is given the numbers of the parts to take apart.
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
        taking = copy.deepcopy(converter)  # it collects what it is given
        taking.add_tensor(name, saved.name, pattern, numbers)
        return [
            Saved(part, saved.tensor, tuple(rows), int(number) * product(rows))
            for part, number in taking.convert(name).items()
        ]
    return [saved]


def _only_unstacks(operations: list[Any], columns: int) -> bool:
    """Whether rows of dimension 0 become experts, after dimension 1 was cut into ``columns`` (gate and up, say)."""
    steps = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
    unstack, cut = ("SplitModulelist", 0), ("Chunk", 1)
    return steps == ([unstack] if columns == 1 else [cut, unstack])


def _check_loads(model: Any, left: list[Saved]) -> None:
    """ConfigError if transformers would take what is stored of ``left``, as the model has it, for something else."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    steps = get_model_conversion_mapping(model)
    steps.sort(key=lambda step: isinstance(step, WeightConverter))  # as it is done when loading
    known = set(model.state_dict(keep_vars=True))
    for saved in left:
        name, pattern = _renamed(saved.name, steps)
        if name in known and (pattern is not None or name != saved.name):
            raise ConfigError(
                f"transformers computes what it stores of {saved.name!r} from several values, which a stream cannot;"
                " save with save_16bit_model(DIR), whose names and tensors are the model's own"
            )
    log.warning(
        "%r is saved as the model has it (%d tensors are): transformers computes its files' form of it, and loads both",
        left[0].name,
        len(left),
    )
