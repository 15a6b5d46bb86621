"""The metadata of a checkpoint: its tag, checkpoint.json, the commit record, and one JSON file per rank.

Each is sealed: ``{"crc32": "<8 hex digits>", "content": {...}}``. The CRC32 covers the compact dump of the content with
sorted keys. A checkpoint is a directory with

    checkpoint.json                        written last: the list of files, and the state that all ranks share
    rank-00001-of-00002.json               state of one rank: random states, position in the data, client_state
    rank-00001-of-00002.safetensors        the tensors of that state, and the model's buffers on this rank
    weights-00001-of-00002.safetensors     fp32 masters of trained parameters; others in the compute dtype
    exp_avg-00001-of-00002.safetensors     ... a file for each kind of optimizer state
    checksums-00001-of-00002.safetensors   CRC32C of every page of the rank's other safetensors files (U32, by file)

Tensors have the parameters' names. With several ranks, each file has flat parts of parameters, and its ``__metadata__``
maps "first:NAME" to the index of the part's first element, as "4096". Frozen parameters that a save excludes are in no
file; checkpoint.json lists them under "excluded", not under "parameters". A parameter that several modules share is
stored under its first name; "tied" maps the other names to it. A weight may be stored as tiles, each with some of its
rows and a name of its own; "tiled" maps the name of the weight to theirs, in the order of the rows.

**The root.** checkpoint.json identifies every other file, so files of two saves are never accepted as one checkpoint.
Its "digests" hold, for each rank, the SHA-256 of the rank's JSON file and that of the last tensor in the rank's
checksums file. That tensor has the CRC32C of each page of the checksums file before it; those pages have the CRC32C of
each page of the rank's other files. To verify this chain when a checkpoint is opened takes one number for each 4 MiB of
the rank's files. Every file has the id of its save ("save"), so that a message can name a file of another save.

**Snapshots.** In a snapshot (version 3) weights and optimizer state are not in files of the checkpoint: the JSON file
of a rank names ranges of swap files for them (swap_places.py). Whether these ranges are damaged cannot be checked.

Version 1 had neither "save" nor "digests", nor the last tensor of checksums, and "NAME" in place of "first:NAME". It
can still be read, but whether all its files belong to one save cannot be checked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from tiering._remedies import ANOTHER_CHECKPOINT
from tiering._strict_json import FormatError, parse, short
from tiering.errors import CheckpointError, WeightsError
from tiering.placement.row_tiles import joined_shape
from tiering.weights.files import opened

FORMAT = "tiering-checkpoint"
VERSION = 2
# The previous version.
WITHOUT_DIGESTS = 1
# The version of a snapshot.
SNAPSHOT = 3
MANIFEST = "checkpoint.json"
# The file that names the checkpoint to resume from.
LATEST = "latest"
# The kind of tensor that every parameter has.
WEIGHTS = "weights"
# The dtypes of numbers: those of trained parameters, and of others that are cast to the compute dtype.
FLOATS = ("F64", "F32", "BF16", "F16")
# The dtypes of frozen parameters and buffers that are never converted.
KEPT = (
    *("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "C64"),
    *("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"),
)

# Maximum bytes of a JSON file.
_MAX_JSON_BYTES = 1 << 30
# Counts are below this, so that JSON readers and kernels represent them exactly as doubles.
MOST = 1 << 53
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DEFAULT_TAG = re.compile(r"global_step\d+", re.ASCII)
# A replaced name has 19 more, and file systems allow 255.
_MAX_TAG_BYTES = 200


def file_name(kind: str, rank: int, world_size: int, suffix: str = "safetensors") -> str:
    """The name of the file of ``kind`` of ``rank``, counted from 0."""
    return f"{kind}-{rank + 1:05d}-of-{world_size:05d}.{suffix}"


def metadata_of(save: str, firsts: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file of tensors: the id of its ``save``, and the first element of each partial tensor."""
    return {"save": save} | {f"first:{name}": first for name, first in firsts.items()}


class WrittenFile(NamedTuple):
    """Size in bytes and SHA-256 in hexadecimal of a written file."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class StoredParameter:
    """A parameter: ``dtype`` is that of its stored weight; ``steps`` is the number of updates of its state.

    Of a weight that was stored as ``tiles``, ``steps`` is the largest number of a tile.
    """

    shape: tuple[int, ...]
    dtype: str
    trained: bool
    steps: int
    tiles: tuple[StoredParameter, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def steps_of(self, first: int, end: int) -> int:
        """The number of updates of the elements [first, end); the largest one if tiles differ."""
        steps, begin = self.steps if not self.tiles else 0, 0
        for tile in self.tiles:
            if begin < end and first < begin + tile.numel:
                steps = max(steps, tile.steps)
            begin += tile.numel
        return steps


@dataclass(frozen=True)
class Manifest:
    """The content of checkpoint.json.

    ``run`` is the id of the run, which a resumed run keeps. ``save`` is the id of this save; in a checkpoint of version
    1 it is None and ``digests`` is empty. ``created`` is an ISO 8601 time. ``optimizer`` is the name of the update
    rule. ``kinds`` are the kinds of optimizer state. ``files`` has bytes by file. ``training`` is further state that
    all ranks share. ``excluded`` are frozen parameters that no file has. ``tied`` maps further names to names in
    ``parameters`` or ``tiled``. ``tiled`` has the names of the tiles of a weight by its name. ``digests`` has SHA-256
    by file; see "The root" above. ``swapped``: it is a snapshot, with trained weights and optimizer state in swap
    files.
    """

    run: str
    step: int
    world_size: int
    created: str
    optimizer: str | None
    precision: str
    kinds: tuple[str, ...]
    parameters: Mapping[str, StoredParameter]
    files: Mapping[str, int]
    training: Mapping[str, Any]
    excluded: Mapping[str, StoredParameter] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    tiled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    save: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    swapped: bool = False

    @property
    def files_of_rank(self) -> tuple[str, ...]:
        """The kinds of tensors for which each rank has a file."""
        if not self.swapped:
            return WEIGHTS, *self.kinds, "rank"
        # Trained parameters are in swap files.
        return (WEIGHTS, "rank") if any(not each.trained for each in self.parameters.values()) else ("rank",)

    def joined(self) -> Manifest:
        """The same, with whole weights in place of their tiles in ``parameters`` and ``excluded``."""
        return replace(self, parameters=self._joined(self.parameters), excluded=self._joined(self.excluded))

    def _joined(self, parameters: Mapping[str, StoredParameter]) -> dict[str, StoredParameter]:
        whole_of = {tile: (name, tiles) for name, tiles in self.tiled.items() for tile in tiles}
        joined = dict[str, StoredParameter]()
        for name in parameters:
            whole, tiles = whole_of.get(name, (name, (name,)))
            if name == tiles[0]:
                joined[whole] = _whole([parameters[tile] for tile in tiles])
        return joined

    def first_of(self, name: str) -> str:
        """The key in a file's metadata for the first element of its part of parameter ``name``."""
        return name if self.save is None else f"first:{name}"

    def write(self, directory: Path) -> None:
        """Writes checkpoint.json to ``directory``; returns when it is on disk."""
        content = {
            "format": FORMAT,
            "version": WITHOUT_DIGESTS if self.save is None else SNAPSHOT if self.swapped else VERSION,
            "run": self.run,
            "step": self.step,
            "world_size": self.world_size,
            "created": self.created,
            "optimizer": self.optimizer,
            "precision": self.precision,
            "kinds": list(self.kinds),
            "parameters": _entries(self.parameters),
            "excluded": _entries(self.excluded),
            "tied": dict(self.tied),
            "files": dict(self.files),
            "training": dict(self.training),
        }
        # Without tiles, older versions read the same.
        if self.tiled:
            content["tiled"] = {name: list(tiles) for name, tiles in self.tiled.items()}
        if self.save is not None:
            content |= {"save": self.save, "digests": dict(self.digests)}
        write_sealed(directory / MANIFEST, content)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Reads checkpoint.json in ``directory``. Raises CheckpointError if it is missing or damaged."""
        path = directory / MANIFEST
        content = read_sealed(path)
        if content.get("format") != FORMAT:
            raise damaged(path, f"its format is {short.repr(content.get('format'))}, not {FORMAT!r}")
        if content.get("version") not in (WITHOUT_DIGESTS, VERSION, SNAPSHOT):
            raise CheckpointError(
                f"{path} has format version {short.repr(content.get('version'))}; this version of tiering reads"
                f" {WITHOUT_DIGESTS} to {SNAPSHOT}; load it with the version of tiering that saved it"
            )
        try:
            return _manifest(content)
        except FormatError as wrong:
            raise damaged(path, str(wrong)) from None


def new_run() -> str:
    """A unique id for a new run."""
    return uuid.uuid4().hex


def new_save() -> str:
    """A unique id for a save."""
    return uuid.uuid4().hex


def run_of(directory: Path) -> str | None:
    """The id of the run that saved the checkpoint ``directory``; None if it is not a checkpoint or is damaged."""
    try:
        content = read_sealed(directory / MANIFEST)
    except CheckpointError:
        return None
    run = content.get("run")
    return run if content.get("format") == FORMAT and isinstance(run, str) else None


def write_sealed(path: Path, content: Mapping[str, Any]) -> WrittenFile:
    """Writes ``content`` to the new file ``path``; returns when it is on disk."""
    text = json.dumps({"crc32": _sum(content), "content": content}, indent=1, allow_nan=False).encode()
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(len(text), hashlib.sha256(text).hexdigest())


def read_sealed(path: Path, *, sha256: str | None = None) -> dict[str, Any]:
    """The content of the sealed file ``path``. Raises CheckpointError if the file is damaged.

    With ``sha256``, the digest of the file is checked before the file is parsed.
    """
    try:
        text = _read(path)
    except WeightsError as error:
        raise CheckpointError(f"{error.problem}; {ANOTHER_CHECKPOINT}") from error
    if sha256 is not None and hashlib.sha256(text).hexdigest() != sha256:
        raise damaged(path, "its SHA-256 differs from checkpoint.json")
    try:
        return _unsealed(text)
    except FormatError as error:
        raise damaged(path, str(error)) from None


def _read(path: Path) -> bytes:
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size > _MAX_JSON_BYTES:
            raise damaged(path, f"it has {size} bytes; the maximum is {_MAX_JSON_BYTES}")
        text = b""
        while piece := os.pread(fd, 1 << 24, len(text)):
            text += piece
    return text


def damaged(path: Path, problem: str) -> CheckpointError:
    """The error for a damaged file of a checkpoint."""
    return CheckpointError(f"{path} is damaged: {problem}; {ANOTHER_CHECKPOINT}")


def _unsealed(text: bytes) -> dict[str, Any]:
    sealed = parse(text)
    content = sealed.get("content")
    if not isinstance(content, dict) or sealed.keys() != {"crc32", "content"}:
        raise FormatError("its keys are not 'crc32' and 'content'")
    try:
        crc32 = _sum(content)
    except RecursionError:
        # json.loads accepts deeper nesting than json.dumps.
        raise FormatError("it is nested too deeply") from None
    if sealed["crc32"] != crc32:
        raise FormatError("its content does not match its crc32")
    return content


def _sum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{zlib.crc32(text.encode()):08x}"


def _entries(parameters: Mapping[str, StoredParameter]) -> dict[str, Any]:
    return {
        name: {"shape": list(each.shape), "dtype": each.dtype, "trained": each.trained, "steps": each.steps}
        for name, each in parameters.items()
    }


def _manifest(content: Mapping[str, Any]) -> Manifest:
    parameters = _field(content, "parameters", dict)
    excluded = _field(content, "excluded", dict) if "excluded" in content else {}
    tied = _field(content, "tied", dict) if "tied" in content else {}
    files = _field(content, "files", dict)
    save, digests = _root(content)
    kinds = _field(content, "kinds", list)
    for name in files:
        if not name or any(mark in name for mark in "/\\\0") or name.startswith("."):
            raise FormatError(f"it lists the file {short.repr(name)}, which is not a file name")
    for kind in kinds:
        if not isinstance(kind, str) or not _KIND.fullmatch(kind) or kind in (WEIGHTS, "rank", "checksums"):
            raise FormatError(f"it has an invalid kind of state {short.repr(kind)}")
    if len(set(kinds)) != len(kinds):
        raise FormatError(f"it lists a kind of state twice: {short.repr(kinds)}")
    for name in excluded:
        if name in parameters or _parameter(name, excluded[name]).trained:
            raise FormatError(f"it excludes {short.repr(name)}, which is stored or trained")
    tiled = _tiled(content, parameters, excluded)
    weights = {*parameters, *tiled}.difference(*tiled.values())
    for name, shared in tied.items():
        if name in weights or not isinstance(shared, str) or shared not in weights:
            raise FormatError(f"it has an invalid tie of {short.repr(name)} to {short.repr(shared)}")
    optimizer = content.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, str):
        raise FormatError("its 'optimizer' is not a name")
    world_size = _count(content, "world_size")
    if not 1 <= world_size <= 99999:
        raise FormatError(f"its 'world_size' is {world_size}")
    return Manifest(
        run=_field(content, "run", str),
        step=_count(content, "step"),
        world_size=world_size,
        created=_field(content, "created", str),
        optimizer=optimizer,
        precision=_field(content, "precision", str),
        kinds=tuple(kinds),
        parameters={name: _parameter(name, entry) for name, entry in parameters.items()},
        files={name: _count(files, name) for name in files},
        training=_field(content, "training", dict),
        excluded={name: _parameter(name, entry) for name, entry in excluded.items()},
        tied=tied,
        tiled=tiled,
        save=save,
        digests=digests,
        swapped=content["version"] == SNAPSHOT,
    )


def _tiled(
    content: Mapping[str, Any], parameters: Mapping[str, Any], excluded: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """The names of tiles by the name of their weight. All are stored or all excluded.

    They differ in rows and in numbers of updates only: a run may have frozen a tile for a while.
    """
    entries: dict[str, Any] = _field(content, "tiled", dict) if "tiled" in content else {}
    used = set[str]()
    for name, tiles in entries.items():
        quoted = short.repr(name)
        if not isinstance(tiles, list) or not tiles or not all(isinstance(tile, str) for tile in tiles):
            raise FormatError(f"the tiles of {quoted} are not names")
        kept = next((each for each in (parameters, excluded) if tiles[0] in each), {})
        if name in parameters or name in excluded or not used.isdisjoint(tiles) or len({*tiles}) < len(tiles):
            raise FormatError(f"it lists {quoted}, or a tile of it, twice")
        if not all(tile in kept for tile in tiles):
            raise FormatError(f"it lacks tiles of {quoted}")
        used.update(tiles)
        stored = [_parameter(tile, kept[tile]) for tile in tiles]
        if not stored[0].shape or len({replace(each, shape=each.shape[1:], steps=0) for each in stored}) > 1:
            raise FormatError(f"the tiles of {quoted} differ in more than their rows and steps")
    return {name: tuple(tiles) for name, tiles in entries.items()}


def _whole(tiles: Sequence[StoredParameter]) -> StoredParameter:
    """The weight whose rows are those of ``tiles``, one after the other; a single parameter as it is."""
    first, *others = tiles
    if not others:
        return first
    shape = joined_shape([each.shape for each in tiles])
    return replace(first, shape=shape, steps=max(each.steps for each in tiles), tiles=tuple(tiles))


def _root(content: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The id of the save, and digests by file; a checkpoint of version 1 has neither."""
    if content["version"] == WITHOUT_DIGESTS:
        return None, {}
    digests: dict[str, str] = _field(content, "digests", dict)
    for name, digest in digests.items():
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise FormatError(f"the digest of {short.repr(name)} is {short.repr(digest)}, not a SHA-256")
    save: str = _field(content, "save", str)
    if not save:
        raise FormatError("its 'save' is empty")
    return save, digests


def _parameter(name: str, entry: Any) -> StoredParameter:
    quoted = short.repr(name)
    if not isinstance(entry, dict) or entry.keys() != {"shape", "dtype", "trained", "steps"}:
        raise FormatError(f"the keys of {quoted} are not 'shape', 'dtype', 'trained' and 'steps'")
    shape, dtype, trained = entry["shape"], entry["dtype"], entry["trained"]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise FormatError(f"{quoted} has the invalid shape {short.repr(shape)}")
    if prod(shape) >= 1 << 62:
        raise FormatError(f"{quoted} has too many elements")
    known = FLOATS if trained else (*FLOATS, *KEPT)
    if dtype not in known or not isinstance(trained, bool):
        raise FormatError(f"{quoted} has the invalid dtype {short.repr(dtype)} or an invalid 'trained'")
    return StoredParameter(tuple(shape), dtype, trained, _count(entry, "steps"))


def _field(content: Mapping[str, Any], key: str, kind: type) -> Any:
    value = content.get(key)
    if not isinstance(value, kind):
        raise FormatError(f"its {key!r} is {short.repr(value)}, not a {kind.__name__}")
    return value


def _count(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if type(value) is not int or not 0 <= value < MOST:
        raise FormatError(f"its {short.repr(key)} is {short.repr(value)}, not a count")
    return value


def check_tag(tag: str) -> None:
    """Raises CheckpointError if ``tag`` is not a valid name of a checkpoint."""
    if problem := tag_problem(tag):
        raise CheckpointError(
            f"invalid tag {tag[:80]!r}: it {problem}; a tag is a plain name such as 'global_step100'"
        )


def is_default_tag(tag: str) -> bool:
    """Whether ``tag`` is a default tag, such as "global_step100"."""
    return _DEFAULT_TAG.fullmatch(tag) is not None


def tag_problem(tag: str) -> str | None:
    """Why ``tag`` is invalid, or None."""
    if not tag:
        return "is empty"
    if tag == LATEST:
        return "is the name of the file that names the latest checkpoint"
    if tag.startswith("."):
        return "starts with a dot"
    if "/" in tag:
        return "is a path"
    # U+FFFD stands for bytes that are not UTF-8.
    if not tag.isprintable() or tag != tag.strip() or "\ufffd" in tag:
        return "has characters that are not printable"
    if len(tag.encode()) > _MAX_TAG_BYTES:
        return f"is longer than {_MAX_TAG_BYTES} bytes"
    return None


def numeric_order(name: str) -> list[tuple[int, str]]:
    """A sort key with numbers in numeric order: "step9" before "step10"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
