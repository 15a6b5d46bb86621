"""Whatever happens to a byte of a checkpoint is found by whoever reads it, or changes nothing that is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.checkpoint.mutations import Mutations
from tests.tiering.checkpoint.saving import write_checkpoint
from tiering.checkpoint.conversion import to_weights
from tiering.checkpoint.inspection import inspect
from tiering.checkpoint.manifest import MANIFEST
from tiering.checkpoint.reader import open_checkpoint
from tiering.config.training import IoConfig
from tiering.errors import CheckpointError, WeightsError
from tiering.weights.files import WeightFiles
from tiering.weights.reader import WeightReader
from tiering.weights.tensor_file import Output

RANKS = 2
IO = IoConfig(engine="threads")


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two saves of one layout."""
    root = tmp_path_factory.mktemp("saves")
    with Output(IO) as output:
        for number in (100, 200):
            (root / str(number)).mkdir()
            write_checkpoint(root / str(number), number, output, ranks=RANKS, varied=True)
    return root / "100", root / "200"


def loaded(path: Path) -> dict[str, Any]:
    """All that a load could read of the checkpoint ``path``; it names what is wrong otherwise."""
    checkpoint = open_checkpoint(path)
    content: dict[str, Any] = {"step": checkpoint.manifest.step, "parameters": checkpoint.manifest.parameters}
    for kind, files in {"weights": checkpoint.weights, **checkpoint.states}.items():
        content[kind] = tensors_of(files)
    for number in range(checkpoint.manifest.world_size):
        rank = checkpoint.rank(number)
        content[f"rank {number}"] = rank.content, rank.buffers, tensors_of(rank.tensors)
    return content


def tensors_of(files: WeightFiles) -> dict[str, bytes]:
    with WeightReader(files, IO) as reader:
        return {
            name: b"".join(bytes(reader.read(part, 0, part.numel)) for part in files.parts_of(tensor))
            for name, tensor in files.tensors.items()
        }


def converted(path: Path, into: Path) -> bytes:
    to_weights(open_checkpoint(path), into)
    return (into / "model.safetensors").read_bytes()


def assert_found_or_harmless(saves: tuple[Path, Path], tmp_path: Path, count: int, seed: int) -> Counter[str]:
    mutations = Mutations(*saves, seed, ranks=RANKS)
    whole, weights = loaded(saves[0]), converted(saves[0], tmp_path / "whole")
    assert loaded(saves[1]) != whole
    counts: Counter[str] = Counter()
    for number in range(count):
        done = mutations.apply(tmp_path / "edited", number)
        try:
            content = loaded(tmp_path / "edited")
        except (CheckpointError, WeightsError):
            counts["found"] += 1
            assert not inspect(tmp_path / "edited").whole, f"seed {seed}, {done}: inspect calls it whole"
        else:
            counts["harmless"] += 1
            # Of checkpoint.json the content is sealed, and of all other files each byte is.
            assert MANIFEST in done, f"seed {seed}, {done}: nobody has noticed"
            assert content == whole, f"seed {seed}, {done}: it loads, with something else"
            assert inspect(tmp_path / "edited").whole, f"seed {seed}, {done}: inspect calls it damaged"
        try:
            tensors = converted(tmp_path / "edited", tmp_path / f"converted{number}")
        except (CheckpointError, WeightsError):
            continue
        assert tensors == weights, f"seed {seed}, {done}: it converts, to something else"
    return counts


def test_edits_are_found_or_harmless(saves: tuple[Path, Path], tmp_path: Path) -> None:
    counts = assert_found_or_harmless(saves, tmp_path, 60, seed=1)
    assert counts["found"] > 40


@pytest.mark.slow
def test_hundreds_of_edits_are_found_or_harmless(saves: tuple[Path, Path], tmp_path: Path) -> None:
    counts = assert_found_or_harmless(saves, tmp_path, 600, seed=2)
    print(dict(counts))
    assert counts["found"] > 500
    assert counts["harmless"] > 5
