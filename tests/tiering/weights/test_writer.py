"""Weights on their way to disk: cut into shards, durable before they are seen, and whole or not there."""

from __future__ import annotations

import errno
import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tiering.errors import CheckpointError
from tiering.weights.files import open_weights
from tiering.weights.tensor_file import TensorSpec
from tiering.weights.writer import WeightWriter, _shards

SPECS = [
    TensorSpec("a", "F32", (3, 5)),
    TensorSpec("none", "F32", (0, 4)),
    TensorSpec("b", "I16", (7,)),
    TensorSpec("c", "U8", (1000,)),
    TensorSpec("nothing", "BOOL", (0,)),
]
CONTENT = np.random.default_rng(1).integers(0, 256, sum(spec.nbytes for spec in SPECS), dtype=np.uint8)


def expected() -> dict[str, bytes]:
    begins = np.cumsum([0, *(spec.nbytes for spec in SPECS)])
    return {
        spec.name: CONTENT[begin : begin + spec.nbytes].tobytes()
        for spec, begin in zip(SPECS, begins, strict=False)
    }


def contents(directory: Path) -> dict[str, bytes]:
    files = open_weights(directory)
    loaded = {name: value.tobytes() for path in files.versions for name, value in load_file(path).items()}
    assert {name: tensor.shape for name, tensor in files.tensors.items()} == {s.name: s.shape for s in SPECS}
    return loaded


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(0, 60))
def test_shards_are_runs_of_no_more_than_asked(sizes: list[int], max_shard_bytes: int) -> None:
    specs = [TensorSpec(str(number), "U8", (size,)) for number, size in enumerate(sizes)]
    shards = _shards(specs, max_shard_bytes)
    assert [spec for shard in shards for spec in shard] == specs
    assert all(
        len(shard) == 1 or sum(spec.nbytes for spec in shard) <= max_shard_bytes for shard in shards if specs
    )
    for shard, after in pairwise(shards):
        assert sum(spec.nbytes for spec in (*shard, after[0])) > max_shard_bytes
    assert _shards(specs, None) == [specs]


@pytest.mark.parametrize("max_shard_bytes", [None, 0, 70, 10**6])
@pytest.mark.parametrize("piece", [1, 64, 10**6])
def test_bytes_come_in_any_pieces(tmp_path: Path, max_shard_bytes: int | None, piece: int) -> None:
    with WeightWriter(tmp_path / "out", SPECS, max_shard_bytes=max_shard_bytes) as writer:
        for first in range(0, CONTENT.size, piece):
            writer.append(CONTENT[first : first + piece])
    assert contents(tmp_path / "out") == expected()
    assert {each.name for each in (tmp_path / "out").iterdir()} == set(writer.files)


def test_a_name_and_metadata_are_as_asked(tmp_path: Path) -> None:
    with WeightWriter(tmp_path, SPECS, stem="adapter_model", metadata={"of": "us"}) as writer:
        writer.append(CONTENT)
    assert [each.name for each in tmp_path.iterdir()] == ["adapter_model.safetensors"]
    assert open_weights(tmp_path).metadata == {"format": "pt", "of": "us"}


def test_each_step_is_on_the_disk_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a power cut could keep the new index and an old shard, which would load."""
    out, done = tmp_path / "out", list[str]()
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def record_fsync(fd: int) -> None:
        fsync(fd)
        done.append(f"fsync {Path(f'/proc/self/fd/{fd}').readlink().name}")

    def record_replace(path: Path, target: Path) -> Path:
        done.append(f"rename {target.name}")
        return replace(path, target)

    def record_unlink(path: Path, missing_ok: bool = False) -> None:
        done.append(f"unlink {path.name}")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Path, "replace", record_replace)
    monkeypatch.setattr(Path, "unlink", record_unlink)
    with WeightWriter(out, SPECS, max_shard_bytes=70) as writer:
        writer.append(CONTENT)
        (writer.folder / "config.json").write_text("{}")
    *shards, index = writer.files
    position = next(number for number, action in enumerate(done) if not action.startswith("fsync"))
    assert set(done[:position]) == {f"fsync {name}" for name in ("config.json", *writer.files)}
    assert sorted(done[position : position + 2]) == ["unlink model.safetensors", f"unlink {index}"]
    renamed = [f"rename {name}" for name in ("config.json", *shards)]
    assert done[position + 2 :] == ["fsync out", *renamed, "fsync out", f"rename {index}", "fsync out"]
    assert len(shards) > 2


@pytest.mark.parametrize("finished", [True, False])
def test_what_is_abandoned_was_never_there(tmp_path: Path, finished: bool) -> None:
    writer = WeightWriter(tmp_path / "a" / "b", SPECS)
    writer.append(CONTENT if finished else CONTENT[:10])
    writer.abandon()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
    with (
        pytest.raises(TypeError, match="bytes-like"),
        WeightWriter(tmp_path / "a" / "b", SPECS) as writer,
    ):
        writer.append("text")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"file cannot be written: E\w+ \(.*; another (file|process) .*"
    ):
        WeightWriter(tmp_path / "file", SPECS)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_index_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with (
        pytest.raises(CheckpointError, match="ENOSPC"),
        WeightWriter(tmp_path / "out", SPECS, max_shard_bytes=0) as writer,
    ):
        writer.append(CONTENT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nth", range(5))
def test_what_cannot_be_moved_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The earlier weights are gone by then."""
    with WeightWriter(tmp_path / "out", SPECS, max_shard_bytes=70) as writer:
        writer.append(CONTENT)
    writer = WeightWriter(tmp_path / "out", SPECS, max_shard_bytes=70)
    writer.append(CONTENT)
    replace, calls = Path.replace, list[Path]()

    def fails(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == nth + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return replace(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fails)
        with pytest.raises(CheckpointError, match=rf"EIO.*move the remaining files from {writer.folder} to"):
            writer.finish()
    writer.abandon()
    assert len(list(writer.folder.iterdir())) == len(writer.files) - nth
    for path in writer.folder.iterdir():
        path.rename(tmp_path / "out" / path.name)
    assert contents(tmp_path / "out") == expected()


def test_the_index_counts_bytes_and_sorts_names(tmp_path: Path) -> None:
    with WeightWriter(tmp_path, SPECS, max_shard_bytes=0) as writer:
        writer.append(CONTENT)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": CONTENT.size}
    assert list(index["weight_map"]) == sorted(spec.name for spec in SPECS)
    assert len(set(index["weight_map"].values())) == len(SPECS)
