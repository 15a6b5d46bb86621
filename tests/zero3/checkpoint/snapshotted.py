"""Runs with snapshots, for the tests of these."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.zero3.resuming import train
from tiering.checkpoint.reader import open_checkpoint
from tiering.checkpoint.run_lock import LOCK
from tiering.weights.files import same_bytes
from zero3.engine.engine import Engine

STEPS, SAVE_AT = 6, 3
FORMATS = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "split": {"precision": "bf16", "state": "split"},
    "split+bf16": {"precision": "bf16", "state": "split+bf16"},
    "ahead": {"precision": "bf16", "state": "split", "step": "in_backward", "swap_versions": 2},
}

Begin = Callable[..., Callable[..., Engine]]


def snapshotted(make: Callable[[], Engine], saved: Path) -> tuple[Engine, list[float]]:
    """An engine that has trained ``SAVE_AT`` steps, and has saved a snapshot; and its losses."""
    torch.manual_seed(1)
    engine = make()
    torch.manual_seed(2)
    losses = train(engine, range(SAVE_AT))
    engine.snapshot_state(saved)
    return engine, losses


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """The lock of ``directory`` is that of another run in the block."""
    fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def flip_bit(saved: Path, kind: str, name: str) -> None:
    """Damage a tensor of the snapshot in its swap file."""
    swap = json.loads((saved / "snapshot" / "rank-00001-of-00001.json").read_text())["content"]["swap"]
    number, offset, _ = swap["tensors"][kind][name]["ranges"][0]
    with Path(swap["files"][number]["path"]).open("r+b") as file:
        file.seek(offset + 5)
        (byte,) = file.read(1)
        file.seek(offset + 5)
        file.write(bytes([byte ^ 16]))


def assert_same_checkpoints(first: Path, second: Path) -> None:
    """Both have the same parameters, optimizer state, counters and state of each rank, to the bit."""
    opened = [open_checkpoint(path) for path in (first, second)]
    tensors = [
        {
            (kind, name): tensor
            for kind, files in {"weights": each.weights, **each.states}.items()
            for name, tensor in files.tensors.items()
        }
        for each in opened
    ]
    contents: list[dict[int, dict[str, Any]]] = [{}, {}]
    for checkpoint, content, named in zip(opened, contents, tensors, strict=True):
        for number in range(checkpoint.manifest.world_size):
            rank = checkpoint.rank(number)
            content[number] = dict(rank.content)
            assert content[number].pop("save") == checkpoint.manifest.save
            named |= {(f"rank {number}", name): tensor for name, tensor in rank.tensors.tensors.items()}
    assert contents[0] == contents[1]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert same_bytes(tensor, tensors[1][name]), name
    differing = {"created": "", "save": "", "files": {}, "digests": {}}
    manifests = [vars(each.manifest) | differing for each in opened]
    assert manifests[0] == manifests[1]
