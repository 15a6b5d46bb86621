"""Reads the values of a model's parameters and buffers from files of weights."""

from __future__ import annotations

import bisect
import difflib
import itertools
import logging
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn

from tiering._text import counted
from tiering.config.training import IoConfig
from tiering.errors import EngineStateError, WeightsError
from tiering.weights.files import StoredTensor, WeightFiles, same_bytes
from tiering.weights.reader import Request, WeightReader
from zero3.building.encoded_weights import (
    EncodedTensor,
    StoredValues,
    encoded_sources,
    encoded_tensors,
)
from zero3.building.model_names import ModelNames
from zero3.building.quantized_experts import SCALES, QuantizedExperts
from zero3.building.quantized_linear import QuantizedLinear
from zero3.building.weight_names import Partners, Target, Values, pair

log = logging.getLogger(__name__)

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NOT_FLOATS = {
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
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_DTYPES = _FLOATS | _NOT_FLOATS
STORED_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""The name of each dtype in the file format."""

# Names in a message.
_NAMES_SHOWN = 10
# Names that are searched for the nearest one, which is slow.
_COMPARED = 300


@dataclass
class OpenFiles:
    """The reader of some files, while they are open."""

    reader: WeightReader | None = None

    @contextmanager
    def reading(self, files: WeightFiles, io: IoConfig, order: Iterable[Request]) -> Iterator[None]:
        """Open ``files``. Reads are fastest in ``order``, and from the first elements of each tensor on."""
        with WeightReader(files, io, order) as self.reader:
            try:
                yield
            finally:
                self.reader = None


class FileSource:
    """The stored values of a parameter, in the dtype in which they were saved (``dtype``)."""

    def __init__(self, parts: Iterable[StoredTensor], files: OpenFiles) -> None:
        self.parts = tuple(parts)
        self.dtype = _DTYPES[self.parts[0].dtype]
        self._files = files
        self._ends = list(itertools.accumulate(part.numel for part in self.parts))

    def read(self, first: int, numel: int) -> Tensor:
        """Elements [first, first + numel), flat, on the CPU: valid until any source of the same files is read again.

        Raises WeightsError if the file cannot be read, EngineStateError while the files are not open.
        """
        if self._files.reader is None:
            raise EngineStateError(
                f"{self.parts[0].name!r} was read while its file is not open: read it within Matched.reading()"
            )
        if first < 0 or numel < 0 or first + numel > self._ends[-1]:
            raise ValueError(
                f"{self.parts[0].name!r} has {self._ends[-1]} elements, not [{first}, {first + numel})"
            )
        pieces = list(self._pieces(first, first + numel))
        if len(pieces) == 1:
            return self._read(self._files.reader, *pieces[0])
        joined, at = torch.empty(numel, dtype=self.dtype, device="cpu"), 0
        for part, start, count in pieces:
            joined[at : at + count] = self._read(self._files.reader, part, start, count)
            at += count
        return joined

    def of_tiles(self, tiles: Iterable[nn.Parameter]) -> dict[nn.Parameter, StoredValues]:
        """The sources of ``tiles``, which have these elements one after the other."""
        sources: dict[nn.Parameter, StoredValues] = {}
        first = 0
        for tile in tiles:
            sources[tile] = self._range(first, first + tile.numel())
            first += tile.numel()
        return sources

    def _range(self, start: int, end: int) -> FileSource:
        parts = (part.range(first, numel) for part, first, numel in self._pieces(start, end))
        return FileSource(parts, self._files)

    def release(self) -> None:
        """No memory to free: all parameters are read through the windows of the reader."""

    def _pieces(self, start: int, end: int) -> Iterator[tuple[StoredTensor, int, int]]:
        """(part, first element in it, number of elements) of the parts that hold elements [start, end)."""
        number = bisect.bisect_right(self._ends, start)
        while start < end:
            stop = min(end, self._ends[number])
            part = self.parts[number]
            yield part, start - self._ends[number] + part.numel, stop - start
            start, number = stop, number + 1

    def _read(self, reader: WeightReader, part: StoredTensor, first: int, numel: int) -> Tensor:
        return torch.frombuffer(reader.read(part, first, numel), dtype=self.dtype)


@dataclass(frozen=True)
class Matched:
    """The stored tensors of a model in ``files``. ``missing`` and ``unexpected`` are names without a partner.

    Parameters without a source keep their values: those in ``missing``, and those that the model declares optional.
    """

    files: WeightFiles
    sources: dict[nn.Parameter, StoredValues]
    buffers: list[tuple[nn.Module, str, StoredTensor]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    opened: OpenFiles = field(repr=False)

    @contextmanager
    def reading(self, io: IoConfig, wanted: Container[nn.Parameter] | None = None) -> Iterator[Self]:
        """Open the files. Reads are fastest in the order of ``sources``, and from their first elements on.

        Only the values of ``wanted`` parameters are read, by default of all.
        """
        sources = (each for param, each in self.sources.items() if wanted is None or param in wanted)
        order = [part for source in sources for part in source.parts]
        with self.opened.reading(self.files, io, order):
            yield self

    def fill_buffers(self) -> None:
        """Set buffers to their stored values, in the buffers' own dtypes; buffers on meta get memory on the CPU."""
        for module, name, tensor in self.buffers:
            buffer = module._buffers[name]
            assert buffer is not None
            source = FileSource(self.files.parts_of(tensor), self.opened)
            stored = source.read(0, tensor.numel).view(tensor.shape)
            if buffer.is_meta:
                module._buffers[name] = stored.to(buffer.dtype, copy=True)
            else:
                with torch.no_grad():
                    buffer.copy_(stored)


def match(
    model: nn.Module,
    files: WeightFiles,
    *,
    names: ModelNames | None = None,
    strict: bool = True,
    excluded: Collection[str] = (),
    encode: bool = False,
) -> Matched:
    """Find the stored tensor of each parameter and persistent buffer by ``names`` (None: the current names).

    Only tensors that are stored twice are read. Raises WeightsError for different shapes and dtypes and, if ``strict``,
    for names without a partner, which are logged otherwise; names in ``excluded`` may be missing. Tensors in F64, F32,
    BF16 and F16 fit every floating-point parameter; other dtypes fit only the same dtype. With ``encode``, a quantised
    layer takes a weight that is stored as floats, whose ranges are encoded when they are read.
    """
    names = names or ModelNames(model)
    partners, absent, unknown = pair(model, files, names)
    encoded = _encoded_tensors(model, partners) if encode else {}
    _check_shapes(files, partners, encoded)
    _check_dtypes(files, partners, encoded)
    _warn_of_doubles(partners)
    made = {each.scales for each in encoded.values()}
    known = {name for name, param in names.parameters(remove_duplicate=False) if param in made}
    absent = [name for name in absent if name not in excluded and name not in known]
    missing = _not_ignored(absent, _patterns(model, "_keys_to_ignore_on_load_missing"))
    ignored = _patterns(model, "_keys_to_ignore_on_load_unexpected") | _outdated(model)
    unexpected = _not_ignored(unknown, ignored)
    if missing or unexpected:
        difference = _difference(files, missing, unexpected)
        if strict:
            raise WeightsError(
                difference, "build the model that these files belong to, or load it with strict=False"
            )
        outcome = "missing tensors keep the model's values" if missing else "these tensors are not loaded"
        log.warning("%s; %s", difference, outcome)
    opened = OpenFiles()
    stored: dict[nn.Parameter, StoredValues] = {}
    for target, values in partners.items():
        if isinstance(target.tensor, nn.Parameter):
            source = FileSource(itertools.chain.from_iterable(map(files.parts_of, values[0].parts)), opened)
            stored |= source.of_tiles(target.tiles) if target.tiles else {target.tensor: source}
    return Matched(
        files=files,
        sources=stored | encoded_sources(encoded.values(), stored),
        buffers=[
            (module, name, values[0].parts[0])
            for target, values in partners.items()
            if not isinstance(target.tensor, nn.Parameter)
            for module, name in target.places
        ],
        missing=missing,
        unexpected=unexpected,
        opened=opened,
    )


def _encoded_tensors(model: nn.Module, partners: Partners) -> dict[Tensor, EncodedTensor]:
    """The quantised weights that are stored as floats, by their codes."""
    stored = {target.tensor: values[0].dtype for target, values in partners.items()}
    return {each.codes: each for each in encoded_tensors(model) if stored.get(each.codes) in _FLOATS}


def _check_shapes(files: WeightFiles, partners: Partners, encoded: Mapping[Tensor, EncodedTensor]) -> None:
    shapes = {codes: each.shape for codes, each in encoded.items()}
    wrong = {
        target: f"{values.name!r} {_verb(values)} {list(values.shape)} and should be {list(shape)}"
        for target, candidates in partners.items()
        for shape in [shapes.get(target.tensor, target.shape)]
        for values in candidates
        if values.shape != shape
    }
    if wrong:
        raise WeightsError(
            f"{files.path} has {counted(len(wrong), 'tensor')} whose shape differs from the model's:"
            f" {_first(list(wrong.values()))}{_quantisation(files, wrong)}",
            "build the model from the config.json in the directory of the weights",
        )


def _check_dtypes(files: WeightFiles, partners: Partners, encoded: Container[Tensor]) -> None:
    wrong = {
        target: f"{values.name!r} is {values.dtype} and should be {target.tensor.dtype}"
        for target, candidates in partners.items()
        for values in candidates
        if not _serves(values.dtype, torch.float32 if target.tensor in encoded else target.tensor.dtype)
    }
    if wrong:
        raise WeightsError(
            f"{files.path} has {counted(len(wrong), 'tensor')} whose dtype cannot be converted to the model's:"
            f" {_first(list(wrong.values()))}{_quantisation(files, wrong)}",
            "a frozen parameter that is no float of 16 bits or more is never converted: build the model with the dtypes"
            " of the files, or dequantise quantised weights and save them again",
        )


def _quantisation(files: WeightFiles, wrong: Iterable[Target]) -> str:
    """A part of a message: the first of the ``wrong`` tensors that is quantised in the model or in ``files``."""
    for target in wrong:
        for module, name in target.places:
            stored = name.endswith(SCALES) or any(f"{each}_scales" in files.tensors for each in target.names)
            if isinstance(module, QuantizedLinear | QuantizedExperts):
                return (
                    f" ({module.label} is in {module.form} here, {'and in another format' if stored else 'and not'}"
                    " in the files: quantise the model as it was when they were saved)"
                )
            if name == "weight" and stored:
                return (
                    f" ({target.names[0]!r} is quantised in the files: quantise the model in the same format)"
                )
    return ""


def _verb(values: Values) -> str:
    return "is" if len(values.parts) == 1 else f"and {len(values.parts) - 1} more make up"


def _serves(stored: str, dtype: torch.dtype) -> bool:
    return stored in _FLOATS if dtype in _FLOATS.values() else _DTYPES.get(stored) == dtype


def _warn_of_doubles(partners: Partners) -> None:
    for chosen, *duplicates in partners.values():
        for duplicate in duplicates:
            same_parts = len(chosen.parts) == len(duplicate.parts)
            if not same_parts or not all(map(same_bytes, chosen.parts, duplicate.parts)):
                log.warning(
                    "the model ties %r and %r, but their stored values differ: the values of %r are used; to keep both,"
                    " build the model untied (tie_word_embeddings=False)",
                    chosen.name,
                    duplicate.name,
                    chosen.name,
                )


def _patterns(model: nn.Module, attribute: str) -> set[str]:
    return set(getattr(model, attribute, None) or ())


def _outdated(model: nn.Module) -> set[str]:
    """Patterns of buffers that older versions of transformers saved and newer ones compute."""
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
        parts.append(f"{len(missing)} missing ({_with_nearest(missing, unexpected)})")
    if unexpected:
        parts.append(f"{len(unexpected)} unexpected ({_with_nearest(unexpected, missing)})")
    return f"the tensors in {files.path} do not match the model: {' and '.join(parts)}"


def _with_nearest(names: tuple[str, ...], candidates: tuple[str, ...]) -> str:
    """The first names, each with the most similar of the ``candidates``."""
    texts = []
    for name in names[:_NAMES_SHOWN]:
        nearest = difflib.get_close_matches(name, candidates[:_COMPARED], n=1)
        texts.append(f"{name!r}, perhaps {nearest[0]!r}" if nearest else repr(name))
    return _first(texts, len(names))


def _first(texts: list[str], count: int | None = None) -> str:
    count = len(texts) if count is None else count
    more = f" and {count - _NAMES_SHOWN} more" if count > _NAMES_SHOWN else ""
    return "; ".join(texts[:_NAMES_SHOWN]) + more
