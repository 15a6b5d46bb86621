"""Ranks that name different directories for one checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.zero3.plain import differing
from tiering.errors import CheckpointError

from .pool import Pool
from .training import start, tokens

Ranks = Callable[[int], Pool]


class Warnings(logging.Handler):
    """The messages of warnings of a logger."""

    def __init__(self, logger: str) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        logging.getLogger(logger).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.messages.append(record.getMessage())


def save_and_load_apart(
    rank: int, nvme: Path, directory: Path
) -> tuple[list[str], list[str], list[str], str]:
    """Each rank names a directory of its own, as a script does that names it by a clock."""
    warnings = Warnings("zero3.checkpoint")
    paths = []
    with start(nvme) as engine:
        for shares in tokens(2, 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
            saving: Any = engine.save_checkpoint(directory / f"at {rank}")
            paths.append(str(saving.path.relative_to(directory)))
        masters = engine.master_state_dict()
    with start(nvme, other_seeds=True) as engine:
        path, _ = engine.load_checkpoint(directory / f"at {rank}")
        paths.append(str(Path(path).relative_to(directory)))
        wrong = differing(engine.master_state_dict(), masters)
        if rank == 1:
            (directory / "link").symlink_to(directory / "at 0")
        # The same checkpoint by another path, and one that only rank 1 has.
        engine.load_checkpoint(directory / ("at 0", "link")[rank], "global_step1")
        with pytest.raises(CheckpointError, match=r"ranks find different checkpoints") as caught:
            engine.load_checkpoint(directory / ("at 1", "at 0")[rank])
    return paths, warnings.messages, wrong, caught.value.message


def test_ranks_that_name_different_directories_use_that_of_rank_0(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "runs"
    first, second = ranks(2).run(save_and_load_apart, nvme, directory)
    for paths, _, wrong, refusal in (first, second):
        assert paths == ["at 0/global_step1", "at 0/global_step2", "at 0/global_step2"]
        assert wrong == []
        assert f"rank 0 None, rank 1 {directory}/at 0/global_step2; load from a directory that all" in refusal
    saved, loaded, linked = first[1]
    assert saved == (
        f"[rank 0] save_checkpoint was called with {directory}/at 0 on rank 0, and with {directory}/at 1 on rank 1: all"
        " ranks save to the directory of rank 0"
    )
    assert loaded == (
        f"[rank 0] load_checkpoint was called with {directory}/at 0 on rank 0, and with {directory}/at 1 on rank 1: all"
        " ranks load from the directory of rank 0"
    )
    assert f"{directory}/link on rank 1" in linked
    # Only rank 0 logs the warnings, that of a save once.
    assert second[1] == []
    assert {path.name for path in directory.iterdir()} == {"at 0", "link"}
