"""``tiering convert``: converts a checkpoint to safetensors, or safetensors to a checkpoint."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from tiering._strict_json import FormatError, parse
from tiering._text import counted
from tiering.checkpoint.conversion import FIRST_TAG, Converted, OnRead, to_checkpoint, to_weights
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import MANIFEST
from tiering.checkpoint.reader import Checkpoint, open_checkpoint
from tiering.config.training import format_size, parse_size
from tiering.errors import CheckpointError, ConfigError, WeightsError
from tiering.weights.files import WeightFiles, open_weights

DONE, FAILED, USAGE_ERROR = 0, 1, 2


def run(options: argparse.Namespace) -> int:
    """Convert, print a summary of the output, and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="tiering convert: %(message)s")
    try:
        converted = _run(options)
    except ConfigError as error:
        print(f"tiering convert: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (CheckpointError, WeightsError) as error:
        print(f"tiering convert: {error}", file=sys.stderr)
        return FAILED
    for name, count in converted.overflowed.items():
        verb = "is" if count == 1 else "are"
        print(
            f"tiering convert: {counted(count, 'element')} of {name!r} {verb} too large for {options.dtype} and {verb}"
            " infinite in the output; bf16 has the range of fp32",
            file=sys.stderr,
        )
    if converted.excluded:
        print(
            f"tiering convert: frozen parameters are excluded from the checkpoint, and so from {options.into}:"
            f" {len(converted.excluded)}, the first {converted.excluded[0]!r}; the model that loads it must have them",
            file=sys.stderr,
        )
    for caveat in converted.caveats:
        print(f"tiering convert: {caveat}", file=sys.stderr)
    print(
        f"{options.into}: {counted(converted.tensors, 'tensor')} of {counted(converted.numel, 'element')},"
        f" {format_size(converted.nbytes)}, from {options.source}"
    )
    return DONE


def _run(options: argparse.Namespace) -> Converted:
    source = _open_source(options.source, options.tag)
    if isinstance(source, Checkpoint):
        return _to_weights(source, options)
    for value, name in ((options.max_shard_size, "--max-shard-size"), (options.config, "--config")):
        if value is not None:
            raise ConfigError(f"{name} is for a checkpoint, but {options.source} holds weights; leave it out")
    tensors = source.tensors.values()
    with _progress(sum(tensor.nbytes for tensor in tensors)) as on_read:
        return to_checkpoint(source, options.into, options.tag or FIRST_TAG, options.dtype, on_read=on_read)


def _to_weights(checkpoint: Checkpoint, options: argparse.Namespace) -> Converted:
    into: Path = options.into
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise ConfigError(f"{into} exists and is not an empty directory; name a new one")
    try:
        max_bytes = parse_size(options.max_shard_size or "5GB")
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}") from None
    config = None if options.config is None else _read_config(options.config)
    tensors = checkpoint.weights.tensors.values()
    with _progress(sum(tensor.nbytes for tensor in tensors)) as on_read:
        return to_weights(
            checkpoint,
            into,
            options.dtype or "fp32",
            max_shard_bytes=max_bytes,
            config=config,
            on_read=on_read,
        )


def _open_source(source: Path, tag: str | None) -> Checkpoint | WeightFiles:
    """The checkpoint or the weights at ``source``. Raises ConfigError, CheckpointError or WeightsError."""
    if not source.exists():
        raise ConfigError(f"{source} does not exist; name a checkpoint or weights")
    if (source / MANIFEST).is_file():
        if tag is not None:
            raise ConfigError(f"{source} is a checkpoint, not a directory of checkpoints; remove --tag")
        return open_checkpoint(source)
    directory = CheckpointDirectory(source)
    if source.is_dir() and (directory.latest() or directory.tags()):
        checkpoint = directory.find(tag)
        assert checkpoint is not None
        return open_checkpoint(checkpoint)
    return open_weights(source)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        # transformers writes Infinity.
        return parse(file.read_bytes(), constant=float)
    except (OSError, FormatError) as error:
        raise ConfigError(
            f"--config: {file} cannot be read: {error}; name the config.json of a model"
        ) from None


@contextmanager
def _progress(nbytes: int) -> Iterator[OnRead]:
    """Show on stderr how many of ``nbytes`` have been read."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=nbytes)
        yield lambda read: progress.advance(task, read)
