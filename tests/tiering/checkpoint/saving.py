"""Small checkpoints, as real as those of an engine: what a save of one rank writes, and whether all of it is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tiering.checkpoint.manifest import WEIGHTS, Manifest, StoredParameter, new_save
from tiering.checkpoint.rank_writer import RankRecord, RankWriter
from tiering.checkpoint.reader import open_checkpoint
from tiering.storage.arena import PAGE
from tiering.weights.tensor_file import Output, TensorSpec

SHAPES: Mapping[str, tuple[int, ...]] = {
    "layers.0.weight": (3, 1000),
    "layers.1.weight": (1500,),
    "bias": (7,),
}
KINDS = ("exp_avg",)
RUN = "6e1f0c"


def write_checkpoint(
    directory: Path,
    number: int,
    output: Output,
    *,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    ranks: int = 1,
    varied: bool = False,
) -> None:
    """A checkpoint of step ``number``, which is also what every element of it is, unless they are ``varied``."""
    save = new_save()
    values = np.random.default_rng(number) if varied else None
    records = [
        _write_rank(directory, number, output, shapes, rank, ranks, save, values) for rank in range(ranks)
    ]
    record = RankRecord.of_all(records)
    parameters = {name: StoredParameter(shape, "F32", True, number) for name, shape in shapes.items()}
    Manifest(
        run=RUN,
        step=number,
        world_size=ranks,
        created="2026-11-22T08:00:00+00:00",
        optimizer="Lion",
        precision="bf16",
        kinds=KINDS,
        parameters=parameters,
        files=record.files,
        training={},
        save=save,
        digests=record.digests,
    ).write(directory)


def number_of(path: Path) -> int:
    """The step of the checkpoint ``path``, which is whole: AssertionError or CheckpointError otherwise."""
    checkpoint = open_checkpoint(path)
    for file, sums in checkpoint.sums.items():
        content = np.fromfile(file, np.uint8)
        content = np.pad(content, (0, -content.size % PAGE))
        assert sums.first_difference(content.ctypes.data, 0, content.size // PAGE) is None, file
    number = checkpoint.manifest.step
    for tensors in (checkpoint.weights, *checkpoint.states.values()):
        for tensor in tensors.tensors.values():
            for part in tensors.parts_of(tensor):
                elements = np.fromfile(part.file, "<f4", part.numel, offset=part.offset)
                assert (elements == number).all(), (part.file, part.name)
    for rank in range(checkpoint.manifest.world_size):
        content = checkpoint.rank(rank).content
        assert content == {"save": checkpoint.manifest.save, "number": number, "buffers": ["buffer"]}
    return number


def _write_rank(
    directory: Path,
    number: int,
    output: Output,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    ranks: int,
    save: str,
    values: np.random.Generator | None,
) -> RankRecord:
    mine, begins = _parts(shapes, rank, ranks)
    files: dict[str, Any] = dict.fromkeys((WEIGHTS, *KINDS), (mine, begins))
    files["rank"] = [TensorSpec("buffer", "F32", (5,))], {}
    with RankWriter(directory, rank, ranks, save, files, output=output) as writer:
        for kind, (specs, _) in files.items():
            for spec in specs:
                numel = spec.nbytes // 4
                if values is None:
                    writer.append(kind, np.full(numel, number, dtype="<f4"))
                else:
                    writer.append(kind, values.standard_normal(numel, dtype=np.float32))
        return writer.finish({"number": number, "buffers": ["buffer"]})


def _parts(
    shapes: Mapping[str, tuple[int, ...]], rank: int, ranks: int
) -> tuple[list[TensorSpec], dict[str, str]]:
    if ranks == 1:
        return [TensorSpec(name, "F32", shape) for name, shape in shapes.items()], {}
    specs, begins = [], {}
    for name, shape in shapes.items():
        numel = int(np.prod(shape))
        first, end = rank * numel // ranks, (rank + 1) * numel // ranks
        specs.append(TensorSpec(name, "F32", (end - first,)))
        begins[name] = str(first)
    return specs, begins
