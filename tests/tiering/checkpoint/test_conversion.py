"""``tiering convert``: what comes out is what went in, rounded once, and whole or not there."""

from __future__ import annotations

import json
import re
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from optim_cpu.formats import round_parameters
from tiering.checkpoint import conversion
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.integrity import damages
from tiering.checkpoint.manifest import Manifest, StoredParameter, file_name, write_sealed
from tiering.checkpoint.reader import open_checkpoint
from tiering.cli import main
from tiering.storage.arena import PAGE
from tiering.weights.tensor_file import Output, TensorFileWriter, TensorSpec
from zero3.building.weights import STORED_NAMES

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def values() -> Tensors:
    """Trained parameters, ties among them and what 16 bits cannot hold, and frozen ones in the compute dtype."""
    generator = torch.Generator().manual_seed(1)
    awkward = torch.tensor(
        [0.0, -0.0, 1.00390625, 1.01171875, -1.00390625, 65519.0, 65520.0, 3e38, -1e30, 1e-40]
    )
    return {
        "odd": torch.randn(7, generator=generator, dtype=torch.float32),
        "layers.0.weight": torch.randn(3, 1000, generator=generator),
        "awkward": torch.cat([awkward, torch.tensor([torch.inf, -torch.inf])]),
        "scale": torch.tensor(0.5),
        "none": torch.empty(0, 4),
        "frozen": torch.randn(5, 3, generator=generator).bfloat16(),
        "large": torch.randn(1300, 1000, generator=generator),  # more than a window
    }


BUFFERS: Tensors = {"counted": torch.tensor(12), "mask": torch.tensor([True, False, True])}


def write(
    directory: Path, values: Mapping[str, torch.Tensor], *, ranks: int = 1, buffers: Any = None
) -> Path:
    """A checkpoint of step 3 as ``ranks`` write it: each has a part of every tensor, the first perhaps none."""
    directory.mkdir(parents=True)
    with Output() as output:
        for rank in range(ranks):
            sums: dict[str, np.ndarray] = {}
            parts, begins = {}, {}
            for name, value in values.items():
                cuts = [value.numel() * (each * each) // (ranks * ranks) for each in range(ranks + 1)]
                first, end = cuts[rank], cuts[rank + 1]
                begins[name] = str(first)
                parts[name] = value.flatten()[first:end] if ranks > 1 else value
            _write(
                directory / file_name("weights", rank, ranks),
                parts,
                begins if ranks > 1 else {},
                output,
                sums,
            )
            _write(directory / file_name("rank", rank, ranks), BUFFERS, {}, output, sums)
            write_sealed(
                directory / file_name("rank", rank, ranks, "json"),
                {"buffers": list(BUFFERS) if buffers is None else buffers},
            )
            specs = [TensorSpec(name, "U32", (array.size,)) for name, array in sums.items()]
            writer = TensorFileWriter(directory / file_name("checksums", rank, ranks), specs, output=output)
            for array in sums.values():
                writer.append(array)
            writer.close()
    Manifest(
        run="",
        step=3,
        world_size=ranks,
        created="2026-11-22T08:00:00+00:00",
        optimizer="AdamW",
        precision="bf16",
        kinds=(),
        parameters={
            name: StoredParameter(
                tuple(value.shape), STORED_NAMES[value.dtype], value.dtype == torch.float32, 3
            )
            for name, value in values.items()
        },
        files={file.name: file.stat().st_size for file in directory.iterdir()},
        training={},
    ).write(directory)
    return directory


def _write(
    path: Path, tensors: Tensors, metadata: Mapping[str, str], output: Output, sums: dict[str, np.ndarray]
) -> None:
    specs = [
        TensorSpec(name, STORED_NAMES[value.dtype], tuple(value.shape)) for name, value in tensors.items()
    ]
    pieces: list[np.ndarray] = []
    writer = TensorFileWriter(
        path, specs, metadata, output=output, on_sums=lambda page, each: pieces.append(each.copy())
    )
    for value in tensors.values():
        if value.numel():
            writer.append(value.contiguous().flatten().view(torch.uint8).numpy())
    writer.close()
    sums[path.name] = np.concatenate(pieces)


def same(first: Tensors, other: Tensors) -> bool:
    return first.keys() == other.keys() and all(
        first[name].dtype == value.dtype
        and first[name].shape == value.shape
        and first[name].flatten().view(torch.uint8).equal(value.flatten().view(torch.uint8))
        for name, value in other.items()
    )


def rounded(values: Tensors, dtype: torch.dtype) -> Tensors:
    results = {}
    for name, value in values.items():
        results[name] = torch.empty_like(value, dtype=dtype)
        round_parameters(value, results[name])
    return results | BUFFERS


def convert(*arguments: Any) -> int:
    return main(["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, values: Tensors) -> Path:
    return write(tmp_path_factory.mktemp("checkpoints") / "global_step3", values)


@pytest.mark.parametrize("ranks", [1, 3])
def test_masters_come_out_as_they_are(
    tmp_path: Path, values: Tensors, ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "global_step3", values, ranks=ranks)
    assert convert(source, tmp_path / "out") == 0
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    expected = {name: value.float() for name, value in values.items()} | BUFFERS
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)
    numel = sum(value.numel() for value in expected.values())
    assert capsys.readouterr().out.startswith(
        f"{tmp_path / 'out'}: 9 tensors of {numel} elements, 4.97 MiB, from"
    )


@pytest.mark.parametrize(("word", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_masters_are_rounded_as_the_engine_rounds_them(
    tmp_path: Path, checkpoint: Path, values: Tensors, word: str, dtype: torch.dtype,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """What is beyond the range of fp16 is counted."""
    assert convert(checkpoint, tmp_path / "out", "--dtype", word) == 0
    assert same(load_file(tmp_path / "out" / "model.safetensors"), rounded(values, dtype))
    message = capsys.readouterr().err
    assert ("3 elements of 'awkward' are too large for fp16" in message) == (word == "fp16")


def test_shards_are_those_that_an_index_names(tmp_path: Path, checkpoint: Path, values: Tensors) -> None:
    assert convert(checkpoint, tmp_path / "out", "--max-shard-size", "12KB") == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {*values, *BUFFERS}
    tensors = {}
    for shard in set(index["weight_map"].values()):
        loaded = load_file(tmp_path / "out" / shard)
        assert {index["weight_map"][name] for name in loaded} == {shard}
        tensors |= loaded
    assert same(tensors, {name: value.float() for name, value in values.items()} | BUFFERS)


def test_what_a_checkpoint_excludes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "step3", {"adapter": torch.ones(3)})
    base = {"base.weight": StoredParameter((5, 5), "BF16", False, 0)}
    whole = Manifest.read(source)
    (source / "checkpoint.json").unlink()
    replace(whole, excluded=base).write(source)
    assert convert(source, tmp_path / "out") == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"adapter", *BUFFERS}
    assert "frozen parameters are excluded from" in (message := capsys.readouterr().err)
    assert ": 1, the first 'base.weight'; the model that loads it must have them" in message


def test_frozen_parameters_may_stay_behind(tmp_path: Path, checkpoint: Path, values: Tensors) -> None:
    converted = conversion.to_weights(open_checkpoint(checkpoint), tmp_path / "out", exclude_frozen=True)
    assert converted.excluded == ("frozen",)
    expected = {name: value for name, value in values.items() if name != "frozen"} | BUFFERS
    assert same(load_file(tmp_path / "out" / "model.safetensors"), expected)


def test_of_a_directory_the_latest_is_taken_or_the_one_named(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / "all" / f"step{number}", {"a": torch.full((5,), float(number))})
    (tmp_path / "all" / "latest").write_text("step2")
    assert convert(tmp_path / "all", tmp_path / "latest") == 0
    assert convert(tmp_path / "all", tmp_path / "first", "--tag", "step1") == 0
    for place, number in (("latest", 2), ("first", 1)):
        assert load_file(tmp_path / place / "model.safetensors")["a"].tolist() == [number] * 5
    assert convert(tmp_path / "all", tmp_path / "third", "--tag", "step3") == 1
    assert convert(tmp_path / "all" / "step1", tmp_path / "third", "--tag", "step1") == 2
    assert not (tmp_path / "third").exists()


def test_a_config_is_told_the_dtype(tmp_path: Path, checkpoint: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    config = {"model_type": "llama", "torch_dtype": "float32", "limit": float("inf")}
    (source / "config.json").write_text(json.dumps(config))
    for number, path in enumerate((source, source / "config.json")):
        out = tmp_path / str(number)
        assert convert(checkpoint, out, "--dtype", "bf16", "--config", path) == 0
        written = json.loads((out / "config.json").read_text())
        assert written == {"model_type": "llama", "dtype": "bfloat16", "limit": float("inf")}


@pytest.mark.parametrize("kind", ["a parameter", "a buffer"])
def test_a_flipped_byte_is_found_and_nothing_is_left(
    tmp_path: Path, values: Tensors, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "global_step3", values)
    file = source / file_name({"a parameter": "weights", "a buffer": "rank"}[kind], 0, 1)
    content = bytearray(file.read_bytes())
    content[PAGE + 1] ^= 4
    file.write_bytes(content)
    assert convert(source, tmp_path / "out") == 1
    assert file.name in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("buffers", [{"a": "mask"}, ["nowhere"], [3], ["a"]])
def test_buffers_that_are_not_there_are_damage(
    tmp_path: Path, buffers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "global_step3", {"a": torch.ones(3)}, buffers=buffers)
    assert convert(source, tmp_path / "out") == 1
    assert re.search(r"rank-00001-of-00001.*is damaged: .*buffer", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 1 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(checkpoint, tmp_path / "out") == 1
    assert "EFBIG" in capsys.readouterr().err
    assert convert(checkpoint, tmp_path / "out", "--max-shard-size", "600KB") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{checkpoint}", "{full}"], "exists and is not an empty directory; name a new one"),
        (["{checkpoint}", "{file}"], "exists and is not an empty directory; name a new one"),
        (["{checkpoint}", "{new}", "--max-shard-size", "5XB"], "--max-shard-size: unknown unit 'XB'"),
        (["{checkpoint}", "{new}", "--config", "{file}"], "cannot be read: it is not valid JSON"),
        (["{checkpoint}", "{new}", "--config", "{full}"], "config.json cannot be read: .*No such file"),
        (["{new}", "{new}2"], "does not exist; name a checkpoint or weights"),
        (["{weights}", "{new}", "--max-shard-size", "1GB"], "--max-shard-size is for a checkpoint"),
        (["{weights}", "{new}", "--config", "{full}"], "--config is for a checkpoint"),
    ],
)
def test_wrong_questions_are_answered_in_a_line(
    tmp_path: Path,
    checkpoint: Path,
    arguments: Sequence[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {name: tmp_path / name for name in ("full", "file", "new")} | {
        "checkpoint": checkpoint,
        "weights": tmp_path / "weights.safetensors",
    }
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    save_file({"a": torch.ones(3)}, places["weights"])
    assert convert(*(each.format(**places) for each in arguments)) == 2
    error = capsys.readouterr().err.replace("\n", "")
    assert error.startswith("tiering convert: [TIER-CONFIG]")
    assert re.search(message, error)
    assert not (tmp_path / "new").exists() and (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Tensors]:
    """As transformers saves a model in bf16, in two shards."""
    tensors = {
        "embed.weight": torch.randn(900, 700).bfloat16(),
        "norm.weight": torch.ones(7, dtype=torch.bfloat16),
        "head.weight": torch.randn(3, 5),
        "norm.num_batches": torch.tensor(4),
    }
    place = tmp_path / "weights"
    place.mkdir()
    (place / "config.json").write_text("{}")
    shards = {"embed.weight": 1} | dict.fromkeys(["norm.weight", "head.weight", "norm.num_batches"], 2)
    names = {name: f"model-{number:05}-of-00002.safetensors" for name, number in shards.items()}
    for file in set(names.values()):
        save_file({name: tensors[name] for name, where in names.items() if where == file}, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return place, tensors


def test_weights_become_a_checkpoint_that_is_whole(tmp_path: Path, weights: tuple[Path, Tensors]) -> None:
    source, tensors = weights
    assert convert(source, tmp_path / "checkpoints") == 0
    path = CheckpointDirectory(tmp_path / "checkpoints").find()
    assert path == tmp_path / "checkpoints" / "global_step0"
    checkpoint = open_checkpoint(path)
    assert list(damages(checkpoint)) == []
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.kinds, manifest.world_size) == (0, (), 1)
    assert {name: each.dtype for name, each in manifest.parameters.items()} == {
        "embed.weight": "BF16",
        "norm.weight": "BF16",
        "head.weight": "F32",
    }
    assert all(stored.offset % stored.itemsize == 0 for stored in checkpoint.weights.tensors.values())
    assert checkpoint.rank(0).content["buffers"] == ["norm.num_batches"]
    assert convert(tmp_path / "checkpoints", tmp_path / "again") == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert same(
        again,
        {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()},
    )


def test_a_single_file_becomes_a_checkpoint_beside_others(tmp_path: Path) -> None:
    save_file({"a": torch.full((3,), 65520.0)}, tmp_path / "model.safetensors")
    for tag in ("one", "two"):
        arguments = (tmp_path / "model.safetensors", tmp_path / "all", "--tag", tag, "--dtype", "fp16")
        assert convert(*arguments) == 0
        assert convert(*arguments) == 1  # it is there
    assert [each.tag for each in CheckpointDirectory(tmp_path / "all").tags()] == ["one", "two"]
    checkpoint = open_checkpoint(tmp_path / "all" / "two")
    assert load_file(checkpoint.path / file_name("weights", 0, 1))["a"].tolist() == [torch.inf] * 3


def test_a_disk_too_full_for_a_checkpoint_keeps_none_of_it(
    tmp_path: Path, weights: tuple[Path, Tensors], small_files: None, capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = weights
    assert convert(source, tmp_path / "all") == 1
    assert "EFBIG" in capsys.readouterr().err
    assert CheckpointDirectory(tmp_path / "all").tags() == []
    assert list((tmp_path / "all").iterdir()) == []


def test_damaged_and_quantised_weights_are_refused(
    tmp_path: Path, weights: tuple[Path, Tensors], capsys: pytest.CaptureFixture[str]
) -> None:
    source, _ = weights
    shard = source / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert convert(source, tmp_path / "all") == 1
    assert "truncated" in capsys.readouterr().err
    header = b'{"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}'
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
    assert convert(tmp_path / "model.safetensors", tmp_path / "all") == 1
    assert "'a' is F4; elements of less than a byte cannot be kept" in capsys.readouterr().err
    assert not (tmp_path / "all").exists()


def test_an_empty_directory_is_told_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(tmp_path, tmp_path / "out") == 1
    assert "it has no .safetensors file" in capsys.readouterr().err


def test_neither_direction_loads_torch_and_progress_is_on_stderr(
    tmp_path: Path, checkpoint: Path, weights: tuple[Path, Tensors]
) -> None:
    source, _ = weights
    script = (
        "import sys; from tiering.cli import main;"
        f"codes = [main(['convert', {str(checkpoint)!r}, {str(tmp_path / 'out')!r}, '--dtype', 'bf16']),"
        f" main(['convert', {str(source)!r}, {str(tmp_path / 'all')!r}])];"
        "sys.exit('torch' in sys.modules or codes != [0, 0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2 and "MB" in done.stderr


def test_windows_bound_what_is_in_memory(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    original = conversion._in_dtype

    def record(raw: np.ndarray, stored: str, target: str) -> tuple[np.ndarray, int]:
        sizes.append(raw.size)
        return original(raw, stored, target)

    monkeypatch.setattr(conversion, "_in_dtype", record)
    assert convert(checkpoint, tmp_path / "out", "--dtype", "bf16") == 0
    assert max(sizes) == conversion.WINDOW_BYTES < 1300 * 1000 * 4
