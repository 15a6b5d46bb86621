"""The commit record comes back as it was written, and nothing else is taken for one."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.checkpoint import manifest
from tiering.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredParameter,
    read_sealed,
    run_of,
    write_sealed,
)
from tiering.errors import CheckpointError

RECORD = Manifest(
    run="6e1f0c",
    step=7,
    world_size=2,
    created="2026-11-22T09:00:00+00:00",
    optimizer="AdamW",
    precision="bf16",
    kinds=("exp_avg", "exp_avg_sq"),
    parameters={"a": StoredParameter((2, 3), "F32", True, 7), "ä $": StoredParameter((), "BF16", False, 0)},
    files={"weights-00001-of-00002.safetensors": 4096},
    training={"micro_steps": 14, "loss_scale": {"value": 65536.0}},
    excluded={"base": StoredParameter((4096, 4096), "BF16", False, 0)},
    tied={"head.weight": "a"},
    save="51",
    digests={"rank-00001-of-00002.json": "0" * 64},
)
FROZEN = {"shape": [1], "dtype": "F32", "trained": False, "steps": 0}
PARTS = {
    "t.0": {"shape": [3, 5], "dtype": "F32", "trained": True, "steps": 7},
    "t.1": {"shape": [2, 5], "dtype": "F32", "trained": True, "steps": 6},
}


def tiled(tiles: Any = ("t.0", "t.1"), **changes: Any) -> dict[str, Any]:
    """Content with a weight "t" of ``tiles``; the second stored part with ``changes``."""
    parts = PARTS | {"t.1": PARTS["t.1"] | changes}
    return {
        "parameters": parts,
        "tiled": {"t": list(tiles) if isinstance(tiles, tuple) else tiles},
        "tied": {},
    }


def test_it_comes_back(tmp_path: Path) -> None:
    for number, record in enumerate(
        [
            RECORD,
            replace(RECORD, optimizer=None, kinds=(), parameters={}, tied={}),
            replace(RECORD, save=None, digests={}),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        record.write(tmp_path / str(number))
        assert Manifest.read(tmp_path / str(number)) == record
    content, later = content_of(tmp_path), ("excluded", "tied")
    before_there_was_that = {name: each for name, each in content.items() if name not in later}
    write_sealed(tmp_path / MANIFEST, before_there_was_that)
    assert Manifest.read(tmp_path) == replace(RECORD, excluded={}, tied={})
    write_sealed(tmp_path / "older.json", before_there_was_that | {"version": 1})
    (tmp_path / "older.json").rename(tmp_path / MANIFEST)
    assert Manifest.read(tmp_path) == replace(RECORD, excluded={}, tied={}, save=None, digests={})


def test_tiles_come_back_and_are_joined(tmp_path: Path) -> None:
    write_sealed(tmp_path / MANIFEST, content_of(tmp_path) | tiled() | {"tied": {"head": "t"}})
    record = Manifest.read(tmp_path)
    assert record.tiled == {"t": ("t.0", "t.1")} and [*record.parameters] == ["t.0", "t.1"]
    weight = record.joined().parameters["t"]
    assert (weight.shape, weight.steps) == ((5, 5), 7)
    # By elements: of each tile, of both, and of the last row.
    assert [weight.steps_of(*part) for part in ((0, 15), (15, 25), (0, 25), (20, 25))] == [7, 6, 7, 6]
    (tmp_path / MANIFEST).unlink()
    record.write(tmp_path)
    assert Manifest.read(tmp_path) == record


def content_of(directory: Path) -> dict[str, Any]:
    RECORD.write(directory)
    content = read_sealed(directory / MANIFEST)
    (directory / MANIFEST).unlink()
    return content


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "another"}, "its format is 'another'"),
        ({"version": 4}, "format version 4.*load it with the version of tiering that saved it"),
        ({"step": -1}, "its 'step' is -1"),
        ({"step": 2**53}, "its 'step' is 9007199254740992, not a count"),
        ({"tied": {"head": "none"}}, "it has an invalid tie of 'head' to 'none'"),
        ({"tied": {"head": ["a"]}}, r"it has an invalid tie of 'head' to \['a'\]"),
        ({"tied": {"a": "a"}}, "invalid tie of 'a' to 'a'"),
        ({"tiled": ["a"]}, r"its 'tiled' is \['a'\]"),
        (tiled(3), "the tiles of 't' are not names"),
        (tiled(()), "the tiles of 't' are not names"),
        (tiled(("t.0", 1)), "the tiles of 't' are not names"),
        (tiled(("t.0", "t.0")), "it lists 't', or a tile of it, twice"),
        (tiled() | {"tiled": {"t": ["t.0", "t.1"], "u": ["t.1"]}}, "it lists 'u', or a tile of it, twice"),
        (tiled() | {"tiled": {"t.0": ["t.0", "t.1"]}}, r"it lists 't\.0', or a tile of it, twice"),
        (tiled() | {"excluded": {"t": FROZEN}}, "it lists 't', or a tile of it, twice"),
        (tiled(("t.0", "t.2")), "it lacks tiles of 't'"),
        (tiled(("t.2",)), "it lacks tiles of 't'"),
        (tiled(("t.0", "f")) | {"excluded": {"f": FROZEN}}, "it lacks tiles of 't'"),
        (tiled(dtype="BF16", trained=False, steps=0), "the tiles of 't' differ in more than their rows"),
        (tiled(trained=False, steps=0), "the tiles of 't' differ in more than their rows"),
        (tiled(shape=[2, 6]), "the tiles of 't' differ in more than their rows"),
        (tiled(shape=[2, 5, 1]), "the tiles of 't' differ in more than their rows"),
        (tiled(shape=[]), "the tiles of 't' differ in more than their rows"),
        (tiled() | {"tied": {"head": "t.2"}}, r"it has an invalid tie of 'head' to 't\.2'"),
        (tiled() | {"tied": {"head": "t.0"}}, r"it has an invalid tie of 'head' to 't\.0'"),
        (tiled() | {"tied": {"t": "t"}}, "it has an invalid tie of 't' to 't'"),
        ({"step": True}, "its 'step' is True"),
        ({"world_size": 0}, "its 'world_size' is 0"),
        ({"world_size": 10**9}, "its 'world_size' is 1000000000"),
        ({"kinds": ["weights"]}, "an invalid kind of state 'weights'"),
        ({"kinds": ["../up"]}, "an invalid kind of state '../up'"),
        ({"kinds": [["exp_avg"]]}, "an invalid kind of state"),
        ({"kinds": ["exp_avg", "exp_avg"]}, "lists a kind of state twice"),
        ({"save": None}, "its 'save' is None"),
        ({"save": ""}, "its 'save' is empty"),
        ({"digests": None}, "its 'digests' is None"),
        ({"digests": {"a": "0"}}, "the digest of 'a' is '0', not a SHA-256"),
        ({"files": {"../../etc/passwd": 3}}, "which is not a file name"),
        ({"files": {".hidden": 3}}, "which is not a file name"),
        ({"excluded": {"a": FROZEN}}, "it excludes 'a', which is stored"),
        ({"excluded": {"b": FROZEN | {"trained": True}}}, "it excludes 'b', which is stored or trained"),
        ({"excluded": {"b": {}}}, "the keys of 'b' are not 'shape'"),
        ({"excluded": []}, r"its 'excluded' is \[\]"),
        ({"files": {"a": -3}}, "its 'a' is -3"),
        ({"parameters": []}, "its 'parameters' is"),
        ({"parameters": {"a": {"shape": [1]}}}, "the keys of 'a' are not 'shape'"),
        ({"optimizer": 3}, "its 'optimizer' is not a name"),
        ({"training": None}, "its 'training' is None"),
    ],
    ids=str,
)
def test_what_it_cannot_say_is_damage(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    write_sealed(tmp_path / MANIFEST, content_of(tmp_path) | change)
    with pytest.raises(CheckpointError, match=match):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [([-1], "F32"), ([2**40, 2**40], "F32"), ([1.0], "F32"), (3, "F32"), ([1], "I8")],
    ids=str,
)
def test_a_parameter_that_cannot_be(tmp_path: Path, shape: Any, dtype: str) -> None:
    content = content_of(tmp_path)
    content["parameters"]["a"] = {"shape": shape, "dtype": dtype, "trained": True, "steps": 0}
    write_sealed(tmp_path / MANIFEST, content)
    with pytest.raises(CheckpointError, match=r"checkpoint.json.*'a' has "):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(("dtype", "is_known"), [("U8", True), ("F8_E4M3", True), ("F4", False)])
def test_a_frozen_parameter_may_keep_its_dtype(tmp_path: Path, dtype: str, is_known: bool) -> None:
    content = content_of(tmp_path)
    content["parameters"]["a"] = {"shape": [3], "dtype": dtype, "trained": False, "steps": 0}
    write_sealed(tmp_path / MANIFEST, content)
    with (
        nullcontext() if is_known else pytest.raises(CheckpointError, match="'a' has the invalid dtype 'F4'")
    ):
        assert Manifest.read(tmp_path).parameters["a"].dtype == dtype


@given(st.data())
def test_each_changed_byte_is_found(data: st.DataObject) -> None:
    content = {"a": [1, 2.5, None, True, "x", {"b": -3}], "c": {"d": []}}
    text = json.dumps({"crc32": manifest._sum(content), "content": content}, indent=1).encode()
    place = data.draw(st.integers(0, len(text) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != text[place]))
    changed = text[:place] + bytes([value]) + text[place + 1 :]
    try:
        record = manifest.parse(changed)
        same = record["content"] == content and record["crc32"] == manifest._sum(content)
        refused = record.keys() != {"crc32", "content"} or record["crc32"] != manifest._sum(record["content"])
    except (ValueError, TypeError, KeyError, AttributeError, manifest.FormatError):
        return
    assert refused or same  # white space alone


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_sealed(tmp_path / "file", {"a": 1})
    with pytest.raises(FileExistsError):
        write_sealed(tmp_path / "file", {"a": 2})
    assert read_sealed(tmp_path / "file") == {"a": 1}


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("1e999", "'1e999' is too large for a number"),
        ("-1e999", "'-1e999' is too large for a number"),
        ("NaN", "'NaN' is not a whole number"),
        ("Infinity", "'Infinity' is not a whole number"),
        ("1" * 5000, "it is not valid JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
    ids=["1e999", "-1e999", "NaN", "Infinity", "5000 digits", "100000 levels"],
)
def test_numbers_and_depths_that_no_save_has_written(tmp_path: Path, value: str, match: str) -> None:
    text = f'{{"crc32": "00000000", "content": {{"format": "tiering-checkpoint", "step": {value}}}}}'
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=match):
        read_sealed(tmp_path / MANIFEST)
    assert run_of(tmp_path) is None


def test_any_depth_is_read_or_refused(tmp_path: Path) -> None:
    """What Python reads and what it writes again need not be equally deep."""
    for depth in range(900, 1010):
        inner = '{"a":' * depth + "1" + "}" * depth
        (tmp_path / MANIFEST).write_text(f'{{"crc32": "00000000", "content": {inner}}}')
        with pytest.raises(CheckpointError, match=r"nested too deeply|does not match its crc32"):
            read_sealed(tmp_path / MANIFEST)
