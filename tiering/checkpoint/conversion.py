"""Converts a checkpoint to safetensors files and safetensors files to a checkpoint. Needs neither a model nor torch.

Tensors are streamed through windows, and compared with their checksums as they are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from optim_cpu import kernels
from tiering._text import counted
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import (
    FLOATS,
    KEPT,
    WEIGHTS,
    Manifest,
    StoredParameter,
    new_run,
    new_save,
)
from tiering.checkpoint.rank_writer import RankWriter
from tiering.checkpoint.reader import Checkpoint
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError
from tiering.weights.files import WeightFiles, damaged, nbytes_of
from tiering.weights.reader import WINDOW_BYTES, WeightReader
from tiering.weights.tensor_file import Output, TensorSpec
from tiering.weights.writer import WeightWriter

DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""The dtypes that parameters may be converted to, with their names in safetensors files."""

FIRST_TAG = "global_step0"

_CONFIG_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

OnRead = Callable[[int], None]
"""Called with the bytes of each read."""


@dataclass
class Converted:
    """The result of a conversion: counts of written parameters and buffers.

    ``overflowed`` counts finite elements that became infinite, by tensor. ``excluded`` are parameters that the
    checkpoint does not have. ``caveats`` are warnings: about a property of the checkpoint that cannot be checked, and
    about codes of quantised layers, which are written as they are.
    """

    tensors: int = 0
    numel: int = 0
    nbytes: int = 0
    overflowed: dict[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    caveats: tuple[str, ...] = ()


def to_weights(
    checkpoint: Checkpoint,
    into: Path,
    dtype: str = "fp32",
    *,
    max_shard_bytes: int | None = None,
    config: Mapping[str, Any] | None = None,
    exclude_frozen: bool = False,
    on_read: OnRead = lambda _: None,
) -> Converted:
    """Writes the parameters of ``checkpoint`` in ``dtype``, and its buffers, as safetensors to the directory ``into``.

    Frozen parameters that are no floats of 16 bits or more keep their dtype.
    Rounding is the engine's: a 16-bit ``dtype`` gives the engine's 16-bit parameters. ``config``, the content of a
    model's config.json, is written to the same directory with its dtype replaced. Shards
    have at most ``max_shard_bytes``. Raises CheckpointError or WeightsError.
    """
    files, parameters = checkpoint.with_buffers(0), checkpoint.manifest.parameters
    frozen = {name for name, each in parameters.items() if exclude_frozen and not each.trained}
    excluded = *checkpoint.manifest.excluded, *sorted(frozen)
    caveats = tuple(filter(None, (checkpoint.caveat, _codes(files, frozen))))
    converted = Converted(excluded=excluded, caveats=caveats)
    specs = _widest_first(
        TensorSpec(
            name,
            DTYPES[dtype] if name in parameters and stored.dtype in FLOATS else stored.dtype,
            stored.shape,
        )
        for name, stored in files.tensors.items()
        if name not in frozen
    )
    order = [part for spec in specs for part in files.parts_of(files.tensors[spec.name])]
    with (
        checkpoint.held(),
        WeightWriter(into, specs, max_shard_bytes=max_shard_bytes) as writer,
        WeightReader(files, IoConfig(), order) as reader,
    ):
        if config is not None:
            text = json.dumps(_with_dtype(config, _CONFIG_DTYPES[dtype]), indent=2, sort_keys=True)
            (writer.folder / "config.json").write_text(text + "\n")
        for spec in specs:
            for values in _convert(reader, files, spec, converted, on_read):
                writer.append(values)
    return converted


def _codes(files: WeightFiles, without: AbstractSet[str]) -> str:
    """A warning about weights that are codes of ``tiering.quantize``; empty if there are none but ``without``."""
    scales = {name for name, stored in files.tensors.items() if stored.dtype == "U8"}
    # Codes of a layer are flat, those of fused experts [experts, bytes].
    names = [
        name
        for name, stored in files.tensors.items()
        if name not in without and f"{name}_scales" in scales
        if stored.dtype in ("U8", "I8") and len(stored.shape) <= 2
    ]
    if not names:
        return ""
    return (
        f"{counted(len(names), 'quantised weight')}, such as {names[0]!r}, {'is' if len(names) == 1 else 'are'} written"
        " as codes, which only a model that is quantised in the same way loads; to write decoded weights, load the"
        " checkpoint and call engine.save_16bit_model(DIR)"
    )


def to_checkpoint(
    files: WeightFiles,
    into: Path,
    tag: str = FIRST_TAG,
    dtype: str | None = None,
    *,
    on_read: OnRead = lambda _: None,
) -> Converted:
    """Writes the tensors of ``files`` as the checkpoint ``tag`` of the directory ``into``: step 0, no optimizer state.

    Floating-point tensors become parameters, in ``dtype`` or in their own dtype. All others become buffers, which are
    also loaded as frozen parameters. Raises CheckpointError or WeightsError.
    """
    parameters, buffers = list[TensorSpec](), list[TensorSpec]()
    for name, stored in files.tensors.items():
        if stored.dtype in FLOATS:
            parameters.append(TensorSpec(name, DTYPES[dtype] if dtype else stored.dtype, stored.shape))
        elif stored.dtype in KEPT:
            buffers.append(TensorSpec(name, stored.dtype, stored.shape))
        else:
            raise damaged(
                stored.file,
                f"{name!r} is {stored.dtype}",
                "elements of less than a byte cannot be kept: store them packed in U8, or dequantise them",
            )
    directory = CheckpointDirectory(into)
    try:
        if any(saved.tag == tag for saved in directory.tags()):
            raise CheckpointError(f"{into} already has a checkpoint {tag!r}; name another directory or --tag")
        run = new_run()
        partial = directory.begin(tag, run=run)
        try:
            converted = _write_checkpoint(files, partial, run, parameters, buffers, on_read)
            directory.commit(partial, tag, run=run)
        except BaseException:
            directory.discard(partial)
            raise
    finally:
        directory.close()
    return converted


def _write_checkpoint(
    files: WeightFiles,
    directory: Path,
    run: str,
    parameters: list[TensorSpec],
    buffers: list[TensorSpec],
    on_read: OnRead,
) -> Converted:
    """Writes all files of a checkpoint with one rank."""
    converted, save = Converted(), new_save()
    contents = {WEIGHTS: _widest_first(parameters), "rank": _widest_first(buffers)}
    order = [files.tensors[spec.name] for specs in contents.values() for spec in specs]
    with (
        Output() as output,
        WeightReader(files, IoConfig(), order) as reader,
        RankWriter(
            directory, 0, 1, save, {kind: (specs, {}) for kind, specs in contents.items()}, output=output
        ) as writer,
    ):
        for kind, specs in contents.items():
            for spec in specs:
                for values in _convert(reader, files, spec, converted, on_read):
                    writer.append(kind, values)
        record = writer.finish({"buffers": [each.name for each in buffers]})
    Manifest(
        run=run,
        step=0,
        world_size=1,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        optimizer=None,
        precision="fp32",
        kinds=(),
        parameters={spec.name: StoredParameter(spec.shape, spec.dtype, True, 0) for spec in parameters},
        files=record.files,
        training={},
        save=save,
        digests=record.digests,
    ).write(directory)
    return converted


def _widest_first(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """``specs`` in descending order of element size, so that each tensor is aligned to its element size."""
    return sorted(specs, key=lambda spec: -nbytes_of(spec.dtype, 1))


def _convert(
    reader: WeightReader, files: WeightFiles, spec: TensorSpec, converted: Converted, on_read: OnRead
) -> Iterator[np.ndarray]:
    """The bytes of ``spec``, window by window."""
    stored = files.tensors[spec.name]
    for part in files.parts_of(stored):
        step = WINDOW_BYTES // part.itemsize
        for first in range(0, part.numel, step):
            numel = min(step, part.numel - first)
            raw = np.frombuffer(reader.read(part, first, numel), dtype=np.uint8)
            values, overflowed = _in_dtype(raw, part.dtype, spec.dtype)
            if overflowed:
                converted.overflowed[spec.name] = converted.overflowed.get(spec.name, 0) + overflowed
            yield values
            on_read(raw.size)
    converted.tensors += 1
    converted.numel += stored.numel
    converted.nbytes += spec.nbytes


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """``config`` with ``dtype``, as current transformers writes it; older versions used the key torch_dtype."""
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}


def _in_dtype(raw: np.ndarray, source: str, target: str) -> tuple[np.ndarray, int]:
    """The bytes ``raw`` converted from dtype ``source`` to ``target``, and the number of elements that overflowed."""
    if source == target:
        return raw, 0
    with np.errstate(over="ignore"):
        wide = _in_fp32(raw, source)
    if target == "BF16":
        rounded = np.empty(wide.size, dtype="<u2")
        kernels.split(rounded.ctypes.data, 0, wide.ctypes.data, wide.size)
        return rounded.view(np.uint8), 0
    if target == "F16":
        with np.errstate(over="ignore"):
            half = wide.astype("<f2")
        return half.view(np.uint8), int(np.count_nonzero(np.isinf(half) & np.isfinite(wide)))
    return wide.view(np.uint8), 0


def _in_fp32(raw: np.ndarray, stored: str) -> np.ndarray:
    if stored == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    return raw.view(kinds[stored]).astype("<f4", copy=False)
