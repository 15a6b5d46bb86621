"""Weights on disk: what the safetensors package reads is read here too; no header, index or directory is believed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from tiering.errors import WeightsError
from tiering.weights.files import StoredTensor, open_weights, same_bytes


def entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def contents(header: dict[str, Any] | str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


TWO = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}
DATA = bytes(range(32))


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(*args: Any, name: str = "model.safetensors", **options: Any) -> Path:
        path = tmp_path / name
        path.write_bytes(contents(*args, **options))
        return path

    return write


def refusal(path: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        open_weights(path)
    message = str(caught.value)
    assert message.startswith("[TIER-WEIGHTS] ") and "; " in message
    return message


def bytes_of(tensor: StoredTensor) -> bytes:
    return tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


# What is right


def test_a_file(file: Callable[..., Path]) -> None:
    path = file({"__metadata__": {"format": "pt"}} | TWO, DATA)
    files = open_weights(path)
    a, b = files.tensors.values()
    begin = path.stat().st_size - 32
    assert a == StoredTensor("a", "F32", (2, 3), path, begin, 24)
    assert b == StoredTensor("b", "BF16", (4,), path, begin + 24, 8)
    assert (a.numel, a.itemsize, b.numel, b.itemsize) == (6, 4, 4, 2)
    assert files.metadata == {"format": "pt"} and files.path == path
    with pytest.raises(TypeError):
        files.tensors["c"] = a


def test_scalars_nothing_and_halves_of_bytes(file: Callable[..., Path]) -> None:
    header = {
        "whole": entry("F64", [], 0, 8),
        "none": entry("F32", [3, 0, 2], 8, 8),
        "nibbles": entry("F4", [2, 3], 8, 11),
        "end": entry("U8", [0], 11, 11),
    }
    files = open_weights(file(header, bytes(11)))
    assert {name: (tensor.numel, tensor.nbytes) for name, tensor in files.tensors.items()} == {
        "whole": (1, 8),
        "none": (0, 0),
        "nibbles": (6, 3),
        "end": (0, 0),
    }
    with pytest.raises(ValueError, match="'nibbles' is F4, whose elements are not whole bytes"):
        _ = files.tensors["nibbles"].itemsize
    assert open_weights(file({})).tensors == {}


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
TENSORS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)

# Without an entry, safetensors 0.8 writes what no parser takes.
METADATA = st.none() | st.dictionaries(st.text(max_size=4), st.text(max_size=4), min_size=1, max_size=2)


def serialized(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None = None) -> bytes:
    arrays = {name: torch.ones(shape).to(DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    return bytes(save(arrays, metadata))


def read_here(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        tensors = open_weights(Path(file.name)).tensors.values()
        return {tensor.name: (tensor.dtype, list(tensor.shape), bytes_of(tensor)) for tensor in tensors}


def read_there(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    read = safetensors.deserialize(content)
    return {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in read}


@given(TENSORS, METADATA)
@settings(max_examples=50, deadline=None)
def test_what_the_safetensors_package_writes(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None
) -> None:
    content = serialized(tensors, metadata)
    assert read_here(content) == read_there(content)
    assert {name: (dtype, shape) for name, (dtype, shape, _) in read_here(content).items()} == tensors


VALID = serialized({"a.weight": ("F32", [2, 3]), "b": ("BF16", [4]), "c": ("I64", [])}, {"format": "pt"})
CHANGES = st.lists(
    st.tuples(st.integers(0, len(VALID) - 1), st.sampled_from([*b'0123456789-+.eE[]{}",:\\ \0\xff'])),
    min_size=1,
    max_size=3,
)


@given(CHANGES, st.integers(-3, 3))
@settings(max_examples=400, deadline=None)
def test_a_damaged_file_is_refused_or_is_what_the_package_reads(
    changes: list[tuple[int, int]], longer: int
) -> None:
    damaged = bytearray(VALID)
    for at, byte in changes:
        damaged[at] = byte
    content = bytes(damaged) + b"x" * longer if longer >= 0 else bytes(damaged[:longer])
    try:
        tensors = read_here(content)
    except WeightsError:
        return
    assert tensors == read_there(content)


# What is wrong with a file


@pytest.mark.parametrize("length", [0, 7, 8, 9, 40])
def test_a_file_that_ends_too_early(file: Callable[..., Path], length: int) -> None:
    path = file(TWO, DATA)
    os.truncate(path, length)
    message = refusal(path)
    assert str(path) in message and "download it again" in message
    if length < 8:
        assert "has no room for a header" in message
    elif length > 8:
        claimed = len(json.dumps(TWO))
        assert f"claims a header of {claimed} bytes, but has {length} bytes: truncated" in message


@pytest.mark.parametrize("claimed", [1 << 63, (1 << 64) - 1, 100_000_001, 1 << 40])
def test_a_header_that_claims_too_much(file: Callable[..., Path], claimed: int) -> None:
    assert f"claims a header of {claimed} bytes" in refusal(file(TWO, DATA, length=claimed))


def test_a_header_beyond_the_limit_of_the_format(file: Callable[..., Path]) -> None:
    path = file(TWO, DATA, length=100_000_001)
    os.truncate(path, 100_000_100)  # sparse
    assert "claims a header of 100000001 bytes" in refusal(path)


def test_truncated_and_prolonged_data(file: Callable[..., Path]) -> None:
    begin = len(contents(TWO))
    path = file(TWO, DATA[:-1])
    ends = f"its tensors end at byte {begin + 32}, but the file at byte"
    assert f"{ends} {begin + 31} (truncated)" in refusal(path)
    path = file(TWO, DATA + b"?")
    assert f"{ends} {begin + 33} (bytes were appended)" in refusal(path)


NESTED = "[" * 200_000


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"\xff{}", "does not start with '{'"),
        (b" {}", "does not start with '{'"),
        (b"[]", "does not start with '{'"),
        (b'{"\xff": 1}', "it is not valid JSON"),
        (b'{"\\ud800": 1}', "it is not valid JSON"),
        (b'{"a": ', "it is not valid JSON"),
        (b"{}{}", "it is not valid JSON"),
        (b'{"a": ' + NESTED.encode(), "it is nested too deeply"),
        (b'{"a": NaN}', "'NaN' is not a whole number"),
        (b'{"a": -Infinity}', "'-Infinity' is not a whole number"),
        (b'{"a": 1e400}', "'1e400' is not a whole number"),
        (b'{"a": -1}', "'-1' is not a whole number"),
        (b'{"a": ' + b"9" * 100_000 + b"}", "is not a whole number below 10**18"),
        (b'{"a": 1, "a": 1}', "'a' appears twice"),
        (b'{"a": {"dtype": "U8", "dtype": "U8"}}', "'dtype' appears twice"),
        (b'{"__metadata__": {"a": 1}}', "'__metadata__' does not map strings to strings"),
        (b'{"__metadata__": []}', "'__metadata__' does not map strings to strings"),
        (b'{"a": 1}', "the keys of 'a' are not 'dtype', 'shape' and 'data_offsets'"),
        (
            b'{"a": {"dtype": "U8", "shape": []}}',
            "the keys of 'a' are not 'dtype', 'shape' and 'data_offsets'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_that_is_none(file: Callable[..., Path], header: bytes, why: str) -> None:
    assert why in refusal(file(header))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (entry("F33", [2], 0, 8), "'t' has the unknown dtype 'F33'"),
        (entry("F32" * 100_000, [2], 0, 8), "'t' has the unknown dtype"),
        (entry(["F32"], [2], 0, 8), "'t' has the unknown dtype"),
        (entry("F32", [True, 2], 0, 8), "not lists of whole numbers"),
        (entry("F32", ["2"], 0, 8), "not lists of whole numbers"),
        (entry("F32", [[2]], 0, 8), "not lists of whole numbers"),
        (entry("U8", [0], False, False), "not lists of whole numbers"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "not lists of whole numbers"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "not lists of whole numbers"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}, "not lists of whole numbers"),
        (
            entry("F32", [2], 0, 8) | {"packed": "yes"},
            "the keys of 't' are not 'dtype', 'shape' and 'data_offsets'",
        ),
        (entry("F32", [2], 8, 0), "'t' has data_offsets 8 to 0, -8 bytes for F32 [2]"),
        (entry("F32", [3], 0, 8), "'t' has data_offsets 0 to 8, 8 bytes for F32 [3]"),
        (entry("F4", [3], 0, 1), "'t' has data_offsets 0 to 1, 1 bytes for F4 [3]"),
        (entry("F32", [1 << 40, 1 << 40], 0, 8), "more elements than 63 bits can count"),
        (entry("F32", [1 << 40, 1 << 40, 0], 0, 0), "more elements than 63 bits can count"),
        (entry("F32", [10**17] * 100_000, 0, 8), "more elements than 63 bits can count"),
        (entry("F32", [2], 4, 12), "'t' leaves a gap after the header"),
        (entry("F32", [10**15], 0, 4 * 10**15), "(truncated)"),
    ],
)
def test_a_tensor_that_lies(file: Callable[..., Path], wrong: dict[str, Any], why: str) -> None:
    message = refusal(file({"t": wrong}, bytes(8)))
    assert "its header is damaged: " in message and why in message
    assert len(message) < 800  # whatever a stranger wrote


def test_overlaps_and_holes(file: Callable[..., Path]) -> None:
    twice = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}
    assert "'b' overlaps 'a'" in refusal(file(twice, bytes(6)))
    same = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}
    assert "'b' overlaps 'a'" in refusal(file(same, bytes(4)))
    hole = {"b": entry("U8", [2], 4, 6), "a": entry("U8", [3], 0, 3)}
    assert "'b' leaves a gap after 'a'" in refusal(file(hole, bytes(6)))
    beyond = {"a": entry("U8", [3], 0, 3), "none": entry("U8", [0], 7, 7)}
    assert "'none' leaves a gap after 'a'" in refusal(file(beyond, bytes(3)))


def test_names_as_long_as_they_like_make_no_long_message(file: Callable[..., Path]) -> None:
    assert len(refusal(file({"n" * 10**6: entry("U8", [4], 2, 6)}, bytes(6)))) < 800


def test_what_is_no_file_of_weights(tmp_path: Path) -> None:
    assert "it does not exist; name a .safetensors file" in refusal(tmp_path / "absent.safetensors")
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    assert "it is not a regular file" in refusal(pipe)
    pointer = tmp_path / "pointer.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "it is a Git LFS pointer, not the file itself; run git lfs pull" in refusal(pointer)
    link = tmp_path / "gone.safetensors"
    link.symlink_to(tmp_path / "blobs" / "0")
    assert "it is a symbolic link to a file that does not exist; download it again" in refusal(link)
    page = tmp_path / "page.safetensors"
    page.write_text("<!DOCTYPE html><html>404</html>")
    assert "truncated, or not a safetensors file" in refusal(page)


# Directories and shards


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., Path]:
    """A directory with two shards and an index, of which parts may be given otherwise."""

    def write(index: dict[str, Any] | str | None = None, **others: dict[str, Any]) -> Path:
        for name, header in (
            {"one": {"a": TWO["a"]}, "two": {"b": entry("BF16", [4], 0, 8)}} | others
        ).items():
            nbytes = max(entry["data_offsets"][1] for entry in header.values())
            (tmp_path / f"{name}.safetensors").write_bytes(contents(header, bytes(nbytes)))
        if index is None:
            index = {
                "metadata": {"total_size": 32.0},
                "weight_map": {"b": "two.safetensors", "a": "one.safetensors"},
            }
        text = index if isinstance(index, str) else json.dumps(index)
        (tmp_path / "model.safetensors.index.json").write_text(text)
        return tmp_path

    return write


def test_shards(shards: Callable[..., Path], tmp_path: Path) -> None:
    directory = shards()
    files = open_weights(directory)
    assert list(files.tensors) == ["b", "a"]
    assert files.tensors["b"].file == directory / "two.safetensors"
    assert set(files.versions) == {directory / "one.safetensors", directory / "two.safetensors"}
    assert files == open_weights(directory / "model.safetensors.index.json")


def test_shards_behind_symbolic_links(shards: Callable[..., Path], tmp_path: Path) -> None:
    """As in the cache of huggingface_hub."""
    directory = shards()
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, path in enumerate(sorted(directory.glob("*.*"))):
        blob = tmp_path / "blobs" / str(number)
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("..") / "blobs" / str(number))
    assert set(open_weights(snapshot).tensors) == {"a", "b"}
    (tmp_path / "blobs" / "1").unlink()
    assert "it lists 'one.safetensors', which does not exist; download the missing shards" in refusal(
        snapshot
    )


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ("{", "it is not valid JSON"),
        ("[]", "it is not a JSON object"),
        (NESTED, "it is nested too deeply"),
        ({"metadata": {}}, "it has no 'weight_map'"),
        ({"weight_map": ["a"]}, "'weight_map' does not map strings to strings"),
        ({"weight_map": {"a": 1}}, "'weight_map' does not map strings to strings"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "'a' appears twice"),
        ({"weight_map": {"a": "../one.safetensors"}}, "is not a .safetensors file in its directory"),
        ({"weight_map": {"a": "/etc/one.safetensors"}}, "is not a .safetensors file in its directory"),
        ({"weight_map": {"a": "..\\one.safetensors"}}, "is not a .safetensors file in its directory"),
        ({"weight_map": {"a": "one\0.safetensors"}}, "is not a .safetensors file in its directory"),
        ({"weight_map": {"a": ".."}}, "is not a .safetensors file in its directory"),
        ({"weight_map": {"a": "one.bin"}}, "is not a .safetensors file in its directory"),
        (
            {"weight_map": {"a": "three.safetensors", "b": "four.safetensors"}},
            "it lists 'four.safetensors', 'three.safetensors', which does not exist; download the missing shards",
        ),
        (
            {"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}},
            "it lacks 'b', which the index lists for it; index and shards belong to different saves",
        ),
    ],
)
def test_an_index_that_lies(shards: Callable[..., Path], index: Any, why: str) -> None:
    assert why in refusal(shards(index))


def test_a_name_in_two_shards(shards: Callable[..., Path]) -> None:
    message = refusal(shards(two={"a": TWO["a"], "b": TWO["b"]}))
    assert "two.safetensors: it has 'a', which the index lists for 'one.safetensors'" in message


def test_a_tensor_that_the_index_does_not_name(shards: Callable[..., Path]) -> None:
    message = refusal(shards(two={"b": entry("BF16", [4], 0, 8), "c": entry("U8", [1], 8, 9)}))
    assert "two.safetensors: it has 'c', which the index does not list" in message


def test_a_damaged_shard_is_named(shards: Callable[..., Path]) -> None:
    directory = shards()
    os.truncate(directory / "two.safetensors", 60)
    assert str(directory / "two.safetensors") in refusal(directory)


def test_a_huge_index(shards: Callable[..., Path]) -> None:
    directory = shards()
    os.truncate(directory / "model.safetensors.index.json", 100_000_001)  # sparse
    assert "it has 100000001 bytes, too many for an index" in refusal(directory)


def test_which_file_of_a_directory(tmp_path: Path) -> None:
    def touch(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_bytes(contents({"weight_map": {}} if name.endswith(".json") else {}))
            if name.endswith(".json"):
                (tmp_path / name).write_text('{"weight_map": {}}')

    assert "it has no .safetensors file" in refusal(tmp_path)
    touch("pytorch_model.bin", "training_args.bin")
    assert "pytorch_model.bin: it is a pickle, which is not supported" in refusal(tmp_path)
    assert "it is a pickle" in refusal(tmp_path / "pytorch_model.bin")
    touch("one.safetensors")
    assert open_weights(tmp_path).path.name == "one.safetensors"
    touch("two.safetensors")
    several = "it has 'one.safetensors', 'two.safetensors', and no index"
    assert several in refusal(tmp_path)
    touch("other.safetensors.index.json")
    assert open_weights(tmp_path).path.name == "other.safetensors.index.json"
    touch("third.safetensors.index.json")
    several = "it has 'other.safetensors.index.json', 'third.safetensors.index.json'; name the file to load"
    assert several in refusal(tmp_path)
    touch("model.safetensors")
    assert open_weights(tmp_path).path.name == "model.safetensors"
    touch("model.safetensors.index.json")
    assert "it has 'model.safetensors', 'model.safetensors.index.json'" in refusal(tmp_path)
    assert open_weights(tmp_path / "one.safetensors").path.name == "one.safetensors"


def test_equal_bytes(file: Callable[..., Path], tmp_path: Path) -> None:
    size = (2 << 20) + 5
    header = {
        "a": entry("U8", [size], 0, size),
        "b": entry("U8", [size], size, 2 * size),
        "c": entry("I8", [size], 2 * size, 3 * size),
    }
    data = os.urandom(size)
    path = file(header, data * 3)
    a, b, c = open_weights(path).tensors.values()
    assert same_bytes(a, b) and not same_bytes(a, c)
    with path.open("r+b") as changed:
        changed.seek(b.offset + size - 1)
        changed.write(bytes([data[-1] ^ 1]))
    assert not same_bytes(a, b)
    os.truncate(path, b.offset + 5)
    with pytest.raises(WeightsError, match=r"it ends at byte \d+: another process is changing it"):
        same_bytes(a, b)


def test_a_header_is_read_without_the_c_extension(file: Callable[..., Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from tiering.weights.files import open_weights;"
        " print(*sorted(open_weights(Path(sys.argv[1])).tensors));"
        " sys.exit('tiering._aio' in sys.modules)"
    )
    path = file(TWO, DATA)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("a b\n", "", 0)
