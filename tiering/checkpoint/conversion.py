"""A checkpoint's weights as files that anybody loads, and such files as a checkpoint. Needs neither a model nor torch.

Tensors are streamed in windows, and compared with their sums as they are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from optim_cpu import kernels
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import (
    FLOATS,
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
"""What parameters may be converted to, and what files call it."""

FIRST_TAG = "global_step0"

_IN_CONFIG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_PLAIN = ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64")

Told = Callable[[int], None]
"""Is told bytes as they are read."""


@dataclass
class Converted:
    """What was written: parameters and buffers. ``overflowed``: finite elements that became infinite, by tensor."""

    tensors: int = 0
    numel: int = 0
    nbytes: int = 0
    overflowed: dict[str, int] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()  # parameters that the checkpoint does not have
    caveat: str = ""  # what nothing can tell about the checkpoint


def to_weights(
    checkpoint: Checkpoint,
    into: Path,
    dtype: str = "fp32",
    *,
    most_bytes: int | None = None,
    config: Mapping[str, Any] | None = None,
    exclude_frozen: bool = False,
    on_read: Told = lambda _: None,
) -> Converted:
    """Write the parameters of ``checkpoint`` in ``dtype``, and its buffers, as safetensors into the directory ``into``.

    They are rounded as the engine rounds: what it trains in 16 bits is what comes out. ``config``, a model's
    config.json, is put beside them, and told the dtype. Raises CheckpointError or WeightsError.
    """
    files, parameters = checkpoint.with_buffers(0), checkpoint.manifest.parameters
    frozen = {name for name, each in parameters.items() if exclude_frozen and not each.trained}
    excluded = *checkpoint.manifest.excluded, *sorted(frozen)
    converted = Converted(excluded=excluded, caveat=checkpoint.caveat)
    specs = _widest_first(
        TensorSpec(name, DTYPES[dtype] if name in parameters else stored.dtype, stored.shape)
        for name, stored in files.tensors.items()
        if name not in frozen
    )
    order = [part for spec in specs for part in files.parts_of(files.tensors[spec.name])]
    with (
        WeightWriter(into, specs, most_bytes=most_bytes) as writer,
        WeightReader(files, IoConfig(), order) as reader,
    ):
        if config is not None:
            text = json.dumps(_with_dtype(config, _IN_CONFIG[dtype]), indent=2, sort_keys=True)
            (writer.folder / "config.json").write_text(text + "\n")
        for spec in specs:
            for values in _converted(reader, files, spec, converted, on_read):
                writer.append(values)
    return converted


def to_checkpoint(
    files: WeightFiles,
    into: Path,
    tag: str = FIRST_TAG,
    dtype: str | None = None,
    *,
    on_read: Told = lambda _: None,
) -> Converted:
    """Make the tensors of ``files`` the checkpoint ``tag`` of the directory ``into``: step 0, no optimizer state.

    Those of floating point are its parameters, in ``dtype`` or as they are; whatever else there is counts as buffers.
    Raises CheckpointError or WeightsError.
    """
    parameters, buffers = list[TensorSpec](), list[TensorSpec]()
    for name, stored in files.tensors.items():
        if stored.dtype in FLOATS:
            parameters.append(TensorSpec(name, DTYPES[dtype] if dtype else stored.dtype, stored.shape))
        elif stored.dtype in _PLAIN:
            buffers.append(TensorSpec(name, stored.dtype, stored.shape))
        else:
            raise damaged(
                stored.file,
                f"{name!r} is {stored.dtype}",
                "quantised weights cannot be trained: dequantise them and save them anew",
            )
    directory = CheckpointDirectory(into)
    try:
        if any(saved.tag == tag for saved in directory.tags()):
            raise CheckpointError(f"{into} has a checkpoint {tag!r} already; name another directory or --tag")
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
    on_read: Told,
) -> Converted:
    """All files of a checkpoint of one rank."""
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
                for values in _converted(reader, files, spec, converted, on_read):
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
    """In an order in which each tensor begins at a multiple of its element's size."""
    return sorted(specs, key=lambda spec: -nbytes_of(spec.dtype, 1))


def _converted(
    reader: WeightReader, files: WeightFiles, spec: TensorSpec, converted: Converted, on_read: Told
) -> Iterator[np.ndarray]:
    """The bytes of ``spec``, a window after the other."""
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
    """``config`` as transformers would write it for weights of ``dtype``; older versions called that torch_dtype."""
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}


def _in_dtype(raw: np.ndarray, stored: str, wanted: str) -> tuple[np.ndarray, int]:
    """The bytes ``raw`` of ``stored`` elements as ``wanted``, and how many of them have overflowed."""
    if stored == wanted:
        return raw, 0
    with np.errstate(over="ignore"):
        wide = _in_fp32(raw, stored)
    if wanted == "BF16":
        rounded = np.empty(wide.size, dtype="<u2")
        kernels.split(rounded.ctypes.data, 0, wide.ctypes.data, wide.size)
        return rounded.view(np.uint8), 0
    if wanted == "F16":
        with np.errstate(over="ignore"):
            half = wide.astype("<f2")
        return half.view(np.uint8), int(np.count_nonzero(np.isinf(half) & np.isfinite(wide)))
    return wide.view(np.uint8), 0


def _in_fp32(raw: np.ndarray, stored: str) -> np.ndarray:
    if stored == "BF16":
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
    return raw.view(kinds[stored]).astype("<f4", copy=False)
