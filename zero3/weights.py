"""Which stored tensor each parameter and buffer of a model takes, and how its values come out of the files.

Names decide, as in ``load_state_dict``. Beside the exact name, what transformers does when it loads is done here: a
tied parameter answers to each of its names, a base model's weights fit the same model with a head and the other way
round (``base_model_prefix``), and names of older versions are renamed. What transformers would have to compute, such
as experts that are stored one by one and kept as one tensor, is refused: a streamed parameter is a range of one file.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from tiering.config import IoConfig
from tiering.errors import EngineStateError, WeightsError
from tiering.weight_files import StoredTensor, WeightFiles, same_bytes
from tiering.weight_reader import WeightReader

log = logging.getLogger(__name__)

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_OTHERS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}
_DTYPES = _FLOATS | _OTHERS

_TOLD = 10  # names in a message
_COMPARED = 300  # names among which the nearest is looked for, which takes a while


@dataclass
class _Open:
    """The reader of a match's files, while they are open."""

    reader: WeightReader | None = None


class FileSource:
    """The values of a parameter, in files, in the precision that they were saved in (``dtype``)."""

    def __init__(self, tensor: StoredTensor, files: _Open) -> None:
        self.tensor = tensor
        self.dtype = _DTYPES[tensor.dtype]
        self._files = files

    def read(self, first: int, numel: int) -> Tensor:
        """Elements [first, first + numel), flat, on the CPU: valid until any source of the same files is read again.

        Raises WeightsError if the file cannot be read, EngineStateError while the files are not open.
        """
        if self._files.reader is None:
            raise EngineStateError(
                f"{self.tensor.name!r} was read while its file is not open: read it within Matched.reading()"
            )
        content = self._files.reader.read(self.tensor, first, numel)
        return torch.frombuffer(content, dtype=self.dtype) if numel else torch.empty(0, dtype=self.dtype)

    def release(self) -> None:
        """Nothing is kept of a parameter: the reader's windows are used over and over."""


@dataclass(frozen=True)
class Matched:
    """What a model takes from ``files``. ``missing`` and ``unexpected`` are names that found no partner.

    Parameters without a source keep their values: those in ``missing``, and those that may be absent by the model's
    own word.
    """

    files: WeightFiles
    sources: dict[nn.Parameter, FileSource]
    buffers: list[tuple[nn.Module, str, StoredTensor]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    _open: _Open = field(repr=False)

    @contextmanager
    def reading(self, io: IoConfig) -> Iterator[Self]:
        """Open the files; in the order of ``sources``, and from their first elements on, they are read fastest."""
        order = [source.tensor for source in self.sources.values()]
        with WeightReader(self.files, io, order) as self._open.reader:
            try:
                yield self
            finally:
                self._open.reader = None

    def fill_buffers(self) -> None:
        """Give buffers their stored values, in the buffers' own dtypes; those on meta get memory on the CPU."""
        for module, name, tensor in self.buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            stored = FileSource(tensor, self._open).read(0, tensor.numel).view(tensor.shape)
            if buffer.is_meta:
                module._buffers[name] = stored.to(buffer.dtype, copy=True)
            else:
                with torch.no_grad():
                    buffer.copy_(stored)


def match(model: nn.Module, files: WeightFiles, *, strict: bool = True) -> Matched:
    """Find each parameter's and persistent buffer's tensor in ``files``. No tensor is read, but those stored twice.

    Raises WeightsError for shapes and dtypes that do not agree and, if ``strict``, for names without a partner, which
    are logged otherwise. F64, F32, BF16 and F16 serve every floating-point parameter; other dtypes only themselves.
    """
    targets = _targets(model)
    partners, unpaired = _partners(model, files, targets)
    _check_shapes(files, partners)
    _check_dtypes(files, partners)
    _warn_of_doubles(partners)
    absent = (target.names[0] for target in targets if target not in partners)
    missing = _not_ignored(absent, _patterns(model, "_keys_to_ignore_on_load_missing"))
    unexpected = _not_ignored(
        unpaired, _patterns(model, "_keys_to_ignore_on_load_unexpected") | _outdated(model)
    )
    if missing or unexpected:
        difference = _difference(files, missing, unexpected)
        if strict:
            raise WeightsError(
                f"{difference}; build the model that these files belong to, or load it with strict=False"
            )
        log.warning("%s; what is missing keeps the values of the model", difference)
    opened = _Open()
    return Matched(
        files=files,
        sources={
            target.tensor: FileSource(stored[0], opened)
            for target, stored in partners.items()
            if isinstance(target.tensor, nn.Parameter)
        },
        buffers=[
            (module, name, stored[0])
            for target, stored in partners.items()
            if not isinstance(target.tensor, nn.Parameter)
            for module, name in target.places
        ],
        missing=missing,
        unexpected=unexpected,
        _open=opened,
    )


@dataclass(eq=False)
class _Target:
    """A parameter or persistent buffer: where it is registered, and by which name each."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


_Partners = dict[_Target, list[StoredTensor]]
"""What each target could take; the first is taken."""


def _targets(model: nn.Module) -> list[_Target]:
    found: dict[Tensor, _Target] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        persistent = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is not None:
                target = found.setdefault(tensor, _Target(tensor))
                target.names.append(f"{prefix}.{name}" if prefix else name)
                target.places.append((module, name))
    return list(found.values())


def _partners(model: nn.Module, files: WeightFiles, targets: list[_Target]) -> tuple[_Partners, list[str]]:
    """In the order of ``targets``, and the names in ``files`` that none of them goes by."""
    known = {name: target for target in targets for name in target.names}
    rename, prefix = _renaming(model), getattr(model, "base_model_prefix", "")
    found: _Partners = {target: [] for target in targets}
    rank: dict[StoredTensor, tuple[int, bool]] = {}
    computed: list[tuple[str, str]] = []
    unpaired = []
    for stored in files.tensors.values():
        renamed, is_computed = rename(stored.name)
        place = _place(renamed, known, prefix)
        if place is None:  # older names, but not in this model
            place, is_computed = _place(stored.name, known, prefix), False
        if place is None:
            unpaired.append(stored.name)
        elif is_computed:
            computed.append((stored.name, place))
        else:
            found[known[place]].append(stored)
            rank[stored] = known[place].names.index(place), stored.name != place
    if computed:
        raise WeightsError(
            f"{files.path} stores {len(computed)} tensors in another form than the model keeps them, as"
            f" {computed[0][0]!r} for {computed[0][1]!r}: transformers computes the one from the other when it loads,"
            " which a stream cannot. In transformers, load the model and save it with"
            " save_pretrained(NEW_DIR, save_original_format=False); then load NEW_DIR"
        )
    return {target: sorted(ones, key=rank.__getitem__) for target, ones in found.items() if ones}, unpaired


def _place(name: str, known: Mapping[str, _Target], prefix: str) -> str | None:
    """The model's word for ``name``: itself, or with the name of the base model put off or on."""
    for spelling in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if spelling in known:
            return spelling
    return None


def _renaming(model: nn.Module) -> Callable[[str], tuple[str, bool]]:
    """A stored name as transformers would have it for ``model``, and whether it would compute the values."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return lambda name: (name, False)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # a version that keeps to names
        return lambda name: (name, False)
    steps = get_model_conversion_mapping(model)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]

    def rename(name: str) -> tuple[str, bool]:
        renamed, converter = rename_source_key(name, renamings, converters)
        return renamed, converter is not None

    return rename


def _check_shapes(files: WeightFiles, partners: _Partners) -> None:
    wrong = [
        f"{stored.name!r} is {list(stored.shape)} and should be {list(target.tensor.shape)}"
        for target, tensors in partners.items()
        for stored in tensors
        if stored.shape != tuple(target.tensor.shape)
    ]
    if wrong:
        raise WeightsError(
            f"{files.path} holds {len(wrong)} tensors of other shapes than the model's: {_first(wrong)};"
            " build the model from the config.json beside the weights"
        )


def _check_dtypes(files: WeightFiles, partners: _Partners) -> None:
    wrong = [
        f"{stored.name!r} is {stored.dtype} and should be {target.tensor.dtype}"
        for target, tensors in partners.items()
        for stored in tensors
        if not _serves(stored.dtype, target.tensor.dtype)
    ]
    if wrong:
        raise WeightsError(
            f"{files.path} holds {len(wrong)} tensors of dtypes that the model's cannot be made of: {_first(wrong)};"
            " quantised weights must be dequantised and saved anew"
        )


def _serves(stored: str, wanted: torch.dtype) -> bool:
    return stored in _FLOATS if wanted in _FLOATS.values() else _DTYPES.get(stored) == wanted


def _warn_of_doubles(partners: _Partners) -> None:
    for taken, *others in partners.values():
        for other in others:
            if not same_bytes(taken, other):
                log.warning(
                    "the model ties %r and %r, but their stored values differ: those of %r are taken; to keep both,"
                    " build the model untied (tie_word_embeddings=False)",
                    taken.name,
                    other.name,
                    taken.name,
                )


def _patterns(model: nn.Module, attribute: str) -> set[str]:
    return set(getattr(model, attribute, None) or ())


def _outdated(model: nn.Module) -> set[str]:
    """Buffers that older versions of transformers saved and newer ones compute."""
    names = [name for name, _ in model.named_buffers()]
    rotary = (
        {r"rotary_emb\.inv_freq"} if any(name.endswith("rotary_emb.inv_freq") for name in names) else set()
    )
    positions = {r"(^|\.)position_ids$"} if any(name.endswith("position_ids") for name in names) else set()
    return rotary | positions


def _not_ignored(names: Iterable[str], patterns: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(re.search(pattern, name) for pattern in patterns))


def _difference(files: WeightFiles, missing: tuple[str, ...], unexpected: tuple[str, ...]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} that it needs are missing ({_with_nearest(missing, unexpected)})")
    if unexpected:
        parts.append(f"{len(unexpected)} are not its own ({_with_nearest(unexpected, missing)})")
    return f"the tensors in {files.path} are not the model's: {' and '.join(parts)}"


def _with_nearest(names: tuple[str, ...], others: tuple[str, ...]) -> str:
    """The first names, each with the one of ``others`` that was perhaps meant."""
    told = []
    for name in names[:_TOLD]:
        nearest = difflib.get_close_matches(name, others[:_COMPARED], n=1)
        told.append(f"{name!r}, perhaps {nearest[0]!r}" if nearest else repr(name))
    return _first(told, len(names))


def _first(told: list[str], count: int | None = None) -> str:
    count = len(told) if count is None else count
    return "; ".join(told[:_TOLD]) + (f" and {count - _TOLD} more" if count > _TOLD else "")
