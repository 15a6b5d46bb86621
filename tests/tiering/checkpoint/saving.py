"""Small checkpoints, as real as those of an engine: what a save of one rank writes, and whether all of it is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tiering.arena import PAGE
from tiering.checkpoint.manifest import WEIGHTS, Manifest, StoredParameter, file_name, write_sealed
from tiering.checkpoint.reader import open_checkpoint
from tiering.checkpoint.sums_file import SumsFile
from tiering.checkpoint.writer import Output, TensorFileWriter, TensorSpec, pages_of

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
) -> None:
    """A checkpoint of step ``number``, which is also what every element of it is."""
    for rank in range(ranks):
        _write_rank(directory, number, output, shapes, rank, ranks)
    files = {file.name: file.stat().st_size for file in directory.iterdir()}
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
        files=files,
        training={},
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
        assert checkpoint.rank(rank).content == {"number": number}
    return number


def _write_rank(
    directory: Path, number: int, output: Output, shapes: Mapping[str, tuple[int, ...]], rank: int, ranks: int
) -> None:
    mine, begins = _parts(shapes, rank, ranks)
    files = {file_name(kind, rank, ranks): (mine, begins) for kind in (WEIGHTS, *KINDS)}
    files[file_name("rank", rank, ranks)] = [TensorSpec("buffer", "F32", (5,))], {}
    pages = {name: pages_of(specs, metadata) for name, (specs, metadata) in files.items()}
    sums = SumsFile(directory / file_name("checksums", rank, ranks), pages)
    for name, (specs, metadata) in files.items():
        writer = TensorFileWriter(directory / name, specs, metadata, output=output, on_sums=sums.of(name))
        for spec in specs:
            writer.append(np.full(spec.nbytes // 4, number, dtype="<f4"))
        writer.close()
    sums.close()
    write_sealed(directory / file_name("rank", rank, ranks, "json"), {"number": number})


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
