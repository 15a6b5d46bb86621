"""Fixtures of the tests of checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiering.checkpoint.directory import CheckpointDirectory


@pytest.fixture(scope="session")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in memory, where there is one: what is not about disks need not wait for them."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        dir=shared if shared.is_dir() else tmp_path_factory.getbasetemp()
    ) as path:
        yield Path(path)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[CheckpointDirectory]:
    directory = CheckpointDirectory(tmp_path / "checkpoints")
    yield directory
    directory.close()
