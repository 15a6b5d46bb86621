"""Matches stored tensors to a model by name.

Names decide, as in ``load_state_dict``. A model that peft has wrapped matches the files of its base. Besides exact
names, the rules of transformers apply: a tied parameter matches any of its names, the weights of a base model fit the
same model with a head and vice versa (``base_model_prefix``), and names of older versions are renamed. Experts that are
stored one by one are concatenated if the model has them as one tensor. Other computations of transformers on stored
tensors (transposes, interleaved rows) are an error, because ranges of the files are streamed.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from tiering.errors import WeightsError
from tiering.weights.files import StoredTensor, WeightFiles
from zero3.building.model_names import ModelNames
from zero3.building.peft_models import base_of, name_in_base
from zero3.params.row_tiles import RowTiles, tile_modules


@dataclass(eq=False)
class Target:
    """A parameter or persistent buffer, with all its names and the modules in which it is registered.

    A weight that is cut into ``tiles`` has the first of them as ``tensor``.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    tiles: tuple[nn.Parameter, ...] = ()


@dataclass(frozen=True)
class Values:
    """Stored values for a target: the elements of ``parts``, one part after the other, as ``shape``."""

    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the first part."""
        return self.parts[0].name

    @property
    def dtype(self) -> str:
        """The dtype of every part."""
        return self.parts[0].dtype


Partners = dict[Target, list[Values]]
"""The candidates for each target; one with the target's own name comes first."""


def _targets(modules: Iterable[tuple[str, nn.Module]]) -> list[Target]:
    targets: dict[Tensor, Target] = {}
    named = list(modules)
    tiles = tile_modules(module for _, module in named)
    for prefix, module in named:
        # The layer around it has the weight of which it is a part.
        if module in tiles:
            continue
        persistent = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        whole = {"weight": module.tile_weights[0]} if isinstance(module, RowTiles) else {}
        for name, tensor in (*whole.items(), *module._parameters.items(), *persistent.items()):
            if tensor is not None:
                target = targets.setdefault(tensor, Target(tensor, tuple(tensor.shape)))
                if isinstance(module, RowTiles) and name in whole:
                    target.shape, target.tiles = module.shape, module.tile_weights
                target.names.append(f"{prefix}.{name}" if prefix else name)
                target.places.append((module, name))
    return list(targets.values())


class Pairs(NamedTuple):
    """Targets, in the order of the model, with their candidates, and the names on both sides without a partner."""

    partners: Partners
    missing: list[str]
    unexpected: list[str]


def pair(model: nn.Module, files: WeightFiles, names: ModelNames) -> Pairs:
    """Find the stored tensors of all targets by name. Raises WeightsError for values that must be computed."""
    targets = _targets(names.modules(remove_duplicate=False))
    target_of = {name: target for target in targets for name in target.names}
    # Also in a plan of adapters without peft.
    in_base: dict[str, list[Target]] = defaultdict(list)
    for name, target in target_of.items():
        in_base[name_in_base(name)].append(target)
    target_of = {name: several[-1] for name, several in in_base.items()} | target_of
    base = base_of(model)
    naming, prefix = _Naming.of(base), getattr(base, "base_model_prefix", "")
    candidates: dict[str, list[Values]] = defaultdict(list)  # by the model's name
    stacks: dict[str, dict[str, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    unexpected = []
    for stored in files.tensors.values():
        name, pattern = naming.rename(stored.name)
        place = _place(name, target_of, prefix)
        if place is None:  # not in this model, by its newer name
            place, pattern = _place(stored.name, target_of, prefix), None
        if place is None:
            unexpected.append(stored.name)
        elif pattern is None:
            candidates[place].append(Values((stored,), stored.shape))
        elif pattern in naming.stacked and isinstance(target_of[place].tensor, nn.Parameter):
            stacks[place][pattern].append(stored)
        else:
            raise _computed(files, stored.name, place)
    for place, by_pattern in stacks.items():
        columns = naming.stacked[next(iter(by_pattern))]
        candidates[place].append(_stack(files, place, [by_pattern[column] for column in columns]))
    partners: Partners = defaultdict(list)
    for name, target in target_of.items():
        partners[target] += sorted(candidates.get(name, []), key=lambda values: values.name != name)
    # A layer that peft trains as a whole: the frozen original, and its copy.
    for name, several in in_base.items():
        for target in several:
            if not partners[target]:
                partners[target] += candidates.get(name, [])
    missing = [target.names[0] for target, values in partners.items() if not values]
    return Pairs({target: values for target, values in partners.items() if values}, missing, unexpected)


def _place(name: str, names: Mapping[str, Target], prefix: str) -> str | None:
    """The model's name for ``name``: the same, or without or with the prefix of the base model."""
    for spelling in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if spelling in names:
            return spelling
    return None


def _stack(files: WeightFiles, place: str, columns: list[list[StoredTensor]]) -> Values:
    """The experts one after the other; for each expert, its tensors of ``columns`` (for example gate and up)."""
    parts = [part for column in columns for part in column]
    alike = len({(part.dtype, part.shape) for part in parts}) == 1
    if len({len(column) for column in columns}) > 1 or not alike or not parts[0].shape:
        raise WeightsError(
            f"{files.path}: {parts[0].name!r} and the other tensors of {place!r} differ in number, shape or dtype",
            "download the files again",
        )
    rows = parts[0].shape
    if len(columns) > 1:
        rows = (len(columns) * rows[0], *rows[1:])
    experts = zip(*(sorted(column, key=_natural) for column in columns), strict=True)
    return Values(tuple(part for expert in experts for part in expert), (len(columns[0]), *rows))


def _natural(stored: StoredTensor) -> list[tuple[bool, int, str]]:
    """Expert 10 after expert 9."""
    return [(word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in stored.name.split(".")]


def _computed(files: WeightFiles, name: str, place: str) -> WeightsError:
    return WeightsError(
        f"{files.path} stores {name!r} in another form than the model's {place!r}: transformers converts it when it"
        " loads, but streamed weights cannot be converted",
        "load it with from_pretrained on a machine with enough memory, save it with save_pretrained(NEW_DIR,"
        " save_original_format=False), and pass NEW_DIR",
    )


@dataclass(frozen=True)
class _Naming:
    """The conversion of stored names in transformers.

    ``rename`` returns the current form of a name and, if its values become part of another tensor, the pattern of that
    conversion. ``stacked`` has the patterns whose tensors are only concatenated, each with all patterns of its
    conversion, in order.
    """

    rename: Callable[[str], tuple[str, str | None]]
    stacked: Mapping[str, list[str]]

    @classmethod
    def of(cls, model: nn.Module) -> _Naming:
        library = sys.modules.get("transformers.modeling_utils")
        if library is None or not isinstance(model, library.PreTrainedModel):
            return cls(lambda name: (name, None), {})
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
        except ImportError:
            # This version does not convert names.
            return cls(lambda name: (name, None), {})
        steps = get_model_conversion_mapping(model)
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        stacked = {
            pattern: list(converter.source_patterns)
            for converter in converters
            if _only_stacks(converter.operations, len(converter.source_patterns))
            for pattern in converter.source_patterns
        }
        return cls(lambda name: rename_source_key(name, renamings, converters), stacked)


def _only_stacks(operations: list[Any], sources: int) -> bool:
    """Whether experts become rows of dimension 0, and the tensors of an expert are joined in dimension 1."""
    steps = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
    stack, concatenate = ("MergeModulelist", 0), ("Concatenate", 1)
    return steps == ([stack] if sources == 1 else [stack, concatenate])
