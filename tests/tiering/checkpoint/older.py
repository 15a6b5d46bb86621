"""Checkpoints of version 1, which had no digests: made from those of today, byte by byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tiering.checkpoint.manifest import MANIFEST, read_sealed, write_sealed
from tiering.storage.arena import PAGE, round_up
from tiering.weights.pages import sums_of_bytes


def as_version_1(source: Path, into: Path) -> Path:
    """A copy of the checkpoint ``source`` as a program of before would have written it."""
    shutil.copytree(source, into)
    content = read_sealed(into / MANIFEST)
    for file in sorted(into.glob("rank-*.json")):
        rank = read_sealed(file)
        del rank["save"]
        rewrite_json(file, rank)
    for sums in sorted(into.glob("checksums-*.safetensors")):
        ending = sums.name.removeprefix("checksums")
        kinds = ("weights", *content["kinds"], "rank")
        tensors = {}
        for name in (f"{kind}{ending}" for kind in kinds):
            _rewrite_tensors(into / name)
            tensors[name] = sums_of_bytes((into / name).read_bytes())
        _write_tensors(sums, tensors)
    del content["save"], content["digests"]
    content["version"] = 1
    content["files"] = {file.name: file.stat().st_size for file in into.iterdir() if file.name != MANIFEST}
    rewrite_json(into / MANIFEST, content)
    return into


def rewrite_json(file: Path, content: dict[str, Any]) -> None:
    """Give a JSON file another content, sealed."""
    file.unlink()
    write_sealed(file, content)


def _rewrite_tensors(file: Path) -> None:
    """The metadata had the names of parts alone, without a prefix."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    del metadata["save"]
    firsts = {name.removeprefix("first:"): first for name, first in metadata.items()}
    header = ({"__metadata__": firsts} if firsts else {}) | header
    file.write_bytes(_header(header) + content[8 + length :])


def _write_tensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "U32", "shape": [values.size], "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    file.write_bytes(_header(header) + b"".join(values.tobytes() for values in tensors.values()))


def _header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (round_up(8 + len(text)) - 8 - len(text))
    assert (8 + len(text)) % PAGE == 0
    return len(text).to_bytes(8, "little") + text
