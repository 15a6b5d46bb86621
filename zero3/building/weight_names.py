"""Whose is which stored tensor: names in files, and names in a model.

Names decide, as in ``load_state_dict``. Beside the exact name, what transformers does with names when it loads is done
here: a tied parameter answers to each of its names, a base model's weights fit the same model with a head and the other
way round (``base_model_prefix``), and names of older versions are renamed. Experts that are stored one by one and kept
as one tensor are taken as they lie, one after the other. What else transformers computes from stored tensors
(transposes, interleaved rows) is refused: what is streamed are ranges of files.
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


@dataclass(eq=False)
class Target:
    """A parameter or persistent buffer: where it is registered, and by which name each."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Values:
    """What a target could take: the elements of ``parts``, one part after the other, as ``shape``."""

    parts: tuple[StoredTensor, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the first part."""
        return self.parts[0].name

    @property
    def dtype(self) -> str:
        """Of every part."""
        return self.parts[0].dtype


Partners = dict[Target, list[Values]]
"""What each target could take, its own first name first."""


def _targets(modules: Iterable[tuple[str, nn.Module]]) -> list[Target]:
    found: dict[Tensor, Target] = {}
    for prefix, module in modules:
        persistent = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is not None:
                target = found.setdefault(tensor, Target(tensor))
                target.names.append(f"{prefix}.{name}" if prefix else name)
                target.places.append((module, name))
    return list(found.values())


class Pairs(NamedTuple):
    """Targets, in the order of the model, with what they could take; and the names on both sides that found nobody."""

    partners: Partners
    missing: list[str]
    unexpected: list[str]


def pair(model: nn.Module, files: WeightFiles, names: ModelNames) -> Pairs:
    """Find the targets' tensors by name. Raises WeightsError for what would have to be computed."""
    targets = _targets(names.modules(remove_duplicate=False))
    known = {name: target for target in targets for name in target.names}
    naming, prefix = _Naming.of(model), getattr(model, "base_model_prefix", "")
    found: dict[str, list[Values]] = defaultdict(list)  # by the model's name
    stacks: dict[str, dict[str, list[StoredTensor]]] = defaultdict(lambda: defaultdict(list))
    unexpected = []
    for stored in files.tensors.values():
        name, pattern = naming.rename(stored.name)
        place = _place(name, known, prefix)
        if place is None:  # not in this model, by its newer name
            place, pattern = _place(stored.name, known, prefix), None
        if place is None:
            unexpected.append(stored.name)
        elif pattern is None:
            found[place].append(Values((stored,), stored.shape))
        elif pattern in naming.stacked and isinstance(known[place].tensor, nn.Parameter):
            stacks[place][pattern].append(stored)
        else:
            raise _computed(files, stored.name, place)
    for place, by_pattern in stacks.items():
        columns = naming.stacked[next(iter(by_pattern))]
        found[place].append(_stack(files, place, [by_pattern[column] for column in columns]))
    partners: Partners = defaultdict(list)
    for name, target in known.items():
        partners[target] += sorted(found.get(name, []), key=lambda values: values.name != name)
    missing = [target.names[0] for target, values in partners.items() if not values]
    return Pairs({target: values for target, values in partners.items() if values}, missing, unexpected)


def _place(name: str, known: Mapping[str, Target], prefix: str) -> str | None:
    """The model's word for ``name``: itself, or with the name of the base model put off or on."""
    for spelling in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if spelling in known:
            return spelling
    return None


def _stack(files: WeightFiles, place: str, columns: list[list[StoredTensor]]) -> Values:
    """Experts one after the other, and of each the tensors of ``columns`` (gate and up, say) one above the other."""
    parts = [part for column in columns for part in column]
    alike = len({(part.dtype, part.shape) for part in parts}) == 1
    if len({len(column) for column in columns}) > 1 or not alike or not parts[0].shape:
        raise WeightsError(
            f"{files.path}: {parts[0].name!r} and the others that make up {place!r} are not as many of each kind, or"
            " not of one shape and dtype",
            "download them again",
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
        f"{files.path} stores {name!r} in another form than the model keeps it, in {place!r}: transformers computes the"
        " one from the other when it loads, which a stream cannot",
        "load it once with from_pretrained, where there is memory for that, and save it with save_pretrained(NEW_DIR,"
        " save_original_format=False); then give NEW_DIR",
    )


@dataclass(frozen=True)
class _Naming:
    """What transformers makes of stored names.

    ``rename`` tells a name's newer form and, if its values become part of another tensor, the pattern that says so.
    ``stacked`` has those patterns whose tensors only lie one after the other, with all that take part, in their order.
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
        except ImportError:  # a version that keeps to names
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
    """Experts become rows of dimension 0; what of each expert is concatenated (in dimension 1 then) lies together."""
    steps = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
    stack, concatenate = ("MergeModulelist", 0), ("Concatenate", 1)
    return steps == ([stack] if sources == 1 else [stack, concatenate])
