"""What a checkpoint says of itself: checkpoint.json, the commit record, and a JSON file of each rank.

Each is sealed: ``{"crc32": "<8 hex digits>", "content": {...}}``, the sum over the compact dump of the content with
sorted keys. A checkpoint is a directory with

    checkpoint.json                        written last: what there is, and the state that all ranks share
    rank-00001-of-00002.json               a rank's own: random states, position in the data, client_state
    rank-00001-of-00002.safetensors        the tensors of that, and the model's buffers as this rank has them
    weights-00001-of-00002.safetensors     fp32 masters of trained parameters; others in the compute dtype
    exp_avg-00001-of-00002.safetensors     ... a file for each kind of optimizer state
    checksums-00001-of-00002.safetensors   CRC32C of every page of the rank's other safetensors files (U32, by file)

Tensors have the parameters' names. With several ranks each has parts of parameters: flat, and the ``__metadata__`` of
the file maps "first:NAME" to the first element, as "4096". Frozen parameters that a save was told to exclude are in no
file, and in checkpoint.json under "excluded", not under "parameters". A parameter that several modules share is there
by its first name; "tied" maps the others to it.

**The root.** checkpoint.json vouches for every other file, so files of two saves cannot pass for one checkpoint. Its
"digests" hold, for each rank, the SHA-256 of the rank's JSON file and that of the last tensor in the rank's checksums
file. That tensor has the CRC32C of each page of the checksums file before it; those pages have the CRC32C of each page
of the rank's other files. To check all of it when a checkpoint is opened takes one number for each 4 MiB of the rank's
files. The name of the save is in every file ("save"), for a message that says which file is of another one.

Version 1 had neither "save" nor "digests", nor the last tensor of checksums, and "NAME" in place of "first:NAME". It is
read; nothing can tell whether all of its files are of one save.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from tiering.errors import CheckpointError, WeightsError
from tiering.strict_json import FormatError, parse, short
from tiering.weights.files import opened

FORMAT = "tiering-checkpoint"
VERSION = 2
WITHOUT_DIGESTS = 1  # the version before
MANIFEST = "checkpoint.json"
WEIGHTS = "weights"  # the kind that every parameter has
FLOATS = ("F64", "F32", "BF16", "F16")

_MOST_BYTES = 1 << 30  # of a JSON file
MOST = 1 << 53  # counts are below this: every reader of JSON has them exactly, and kernels as floats
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def file_name(kind: str, rank: int, world_size: int, suffix: str = "safetensors") -> str:
    """The file of ``kind`` of ``rank``, counted from 0."""
    return f"{kind}-{rank + 1:05d}-of-{world_size:05d}.{suffix}"


def metadata_of(save: str, firsts: Mapping[str, str]) -> dict[str, str]:
    """What a file of tensors says of itself: its ``save``, and the first element of each tensor that is a part."""
    return {"save": save} | {f"first:{name}": first for name, first in firsts.items()}


class Written(NamedTuple):
    """A file that was written: its bytes, and its SHA-256 as hex digits."""

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class StoredParameter:
    """A parameter: ``dtype`` is that of its stored weight; ``steps`` counts the updates that used its state."""

    shape: tuple[int, ...]
    dtype: str
    trained: bool
    steps: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Manifest:
    """What checkpoint.json says. ``kinds`` are the optimizer's state tensors, ``training`` what else ranks share.

    ``run`` is the same in all checkpoints of a run, also after it has gone on from one of them; ``save`` is this one's
    own, and None in a checkpoint of version 1, which has no ``digests`` either.
    """

    run: str
    step: int
    world_size: int
    created: str  # ISO 8601
    optimizer: str | None  # the update rule's name
    precision: str
    kinds: tuple[str, ...]
    parameters: Mapping[str, StoredParameter]
    files: Mapping[str, int]  # bytes
    training: Mapping[str, Any]
    excluded: Mapping[str, StoredParameter] = field(default_factory=dict)  # frozen ones, which no file has
    tied: Mapping[str, str] = field(default_factory=dict)  # further names, to that in ``parameters``
    save: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict)  # SHA-256, by file: see "The root" above

    def first_of(self, name: str) -> str:
        """Under which key the metadata of a file has the first element of its part of parameter ``name``."""
        return name if self.save is None else f"first:{name}"

    def write(self, directory: Path) -> None:
        """Write it into ``directory``, and wait until it is on the disk."""
        content = {
            "format": FORMAT,
            "version": WITHOUT_DIGESTS if self.save is None else VERSION,
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
        if self.save is not None:
            content |= {"save": self.save, "digests": dict(self.digests)}
        write_sealed(directory / MANIFEST, content)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """That of the checkpoint in ``directory``. Raises CheckpointError if there is none, or it is damaged."""
        path = directory / MANIFEST
        content = read_sealed(path)
        if content.get("format") != FORMAT:
            raise damaged(path, f"its format is {short.repr(content.get('format'))}, not {FORMAT!r}")
        if content.get("version") not in (WITHOUT_DIGESTS, VERSION):
            raise CheckpointError(
                f"{path}: it is of version {short.repr(content.get('version'))}, and this program reads versions"
                f" {WITHOUT_DIGESTS} and {VERSION}; load it with the version of tiering that saved it"
            )
        try:
            return _manifest(content)
        except FormatError as wrong:
            raise damaged(path, str(wrong)) from None


def new_run() -> str:
    """A name for a run that nothing is known of yet."""
    return uuid.uuid4().hex


def new_save() -> str:
    """A name for a save, which no other one has."""
    return uuid.uuid4().hex


def run_of(directory: Path) -> str | None:
    """The run whose checkpoint ``directory`` is. None where it is none, or its record is damaged."""
    try:
        content = read_sealed(directory / MANIFEST)
    except CheckpointError:
        return None
    run = content.get("run")
    return run if content.get("format") == FORMAT and isinstance(run, str) else None


def write_sealed(path: Path, content: Mapping[str, Any]) -> Written:
    """Write ``content`` to the new file ``path`` and wait until it is on the disk."""
    text = json.dumps({"crc32": _sum(content), "content": content}, indent=1, allow_nan=False).encode()
    with path.open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(text), hashlib.sha256(text).hexdigest())


def read_sealed(path: Path, *, sha256: str | None = None) -> dict[str, Any]:
    """The content of ``path``. Raises CheckpointError unless it is what was written.

    With ``sha256``, nothing is parsed unless the file has that digest.
    """
    try:
        text = _read(path)
    except WeightsError as error:
        raise CheckpointError(f"{error.problem}; load another checkpoint (tag=)") from error
    if sha256 is not None and hashlib.sha256(text).hexdigest() != sha256:
        raise damaged(path, "its SHA-256 is not the one that checkpoint.json has")
    try:
        return _unsealed(text)
    except FormatError as error:
        raise damaged(path, str(error)) from None


def _read(path: Path) -> bytes:
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size > _MOST_BYTES:
            raise damaged(path, f"it is {size} bytes long")
        text = b""
        while piece := os.pread(fd, 1 << 24, len(text)):
            text += piece
    return text


def damaged(path: Path, what: str) -> CheckpointError:
    """A file of a checkpoint is not what was saved."""
    return CheckpointError(f"{path}: it is damaged: {what}; load another checkpoint (tag=)")


def _unsealed(text: bytes) -> dict[str, Any]:
    sealed = parse(text)
    content = sealed.get("content")
    if not isinstance(content, dict) or sealed.keys() != {"crc32", "content"}:
        raise FormatError("it does not have a crc32 and a content, and nothing else")
    try:
        found = _sum(content)
    except RecursionError:  # what is nested as deep as can be read may be too deep to be written
        raise FormatError("it is nested too deep") from None
    if sealed["crc32"] != found:
        raise FormatError("its content is not what its crc32 says")
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
            raise FormatError(f"it names the file {short.repr(name)}, which is none beside it")
    for kind in kinds:
        if not isinstance(kind, str) or not _KIND.fullmatch(kind) or kind in (WEIGHTS, "rank", "checksums"):
            raise FormatError(f"it has a kind of state {short.repr(kind)}")
    if len(set(kinds)) != len(kinds):
        raise FormatError(f"it names a kind of state twice: {short.repr(kinds)}")
    for name in excluded:
        if name in parameters or _parameter(name, excluded[name]).trained:
            raise FormatError(f"it excludes {short.repr(name)}, which it has or has trained")
    for name, shared in tied.items():
        if name in parameters or not isinstance(shared, str) or shared not in parameters:
            raise FormatError(f"it ties {short.repr(name)} to {short.repr(shared)}, which is not so")
    optimizer = content.get("optimizer")
    if optimizer is not None and not isinstance(optimizer, str):
        raise FormatError("its 'optimizer' is no name")
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
        save=save,
        digests=digests,
    )


def _root(content: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    """The name of the save, and digests by file; a checkpoint of version 1 has neither."""
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
    called = short.repr(name)
    if not isinstance(entry, dict) or entry.keys() != {"shape", "dtype", "trained", "steps"}:
        raise FormatError(f"{called} does not have a shape, dtype, trained and steps, and nothing else")
    shape, dtype, trained = entry["shape"], entry["dtype"], entry["trained"]
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise FormatError(f"{called} has the shape {short.repr(shape)}")
    if prod(shape) >= 1 << 62:
        raise FormatError(f"{called} has more elements than there can be")
    if dtype not in FLOATS or not isinstance(trained, bool):
        raise FormatError(f"{called} has the dtype {short.repr(dtype)} or a wrong 'trained'")
    return StoredParameter(tuple(shape), dtype, trained, _count(entry, "steps"))


def _field(content: Mapping[str, Any], key: str, kind: type) -> Any:
    value = content.get(key)
    if not isinstance(value, kind):
        raise FormatError(f"its {key!r} is {short.repr(value)}, no {kind.__name__}")
    return value


def _count(content: Mapping[str, Any], key: str) -> int:
    value = content.get(key)
    if type(value) is not int or not 0 <= value < MOST:
        raise FormatError(f"its {short.repr(key)} is {short.repr(value)}, no count")
    return value
