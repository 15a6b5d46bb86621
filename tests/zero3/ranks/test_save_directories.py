"""Ranks that name different directories for one checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.zero3.plain import differing

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


def save_apart(rank: int, nvme: Path, directory: Path) -> tuple[list[str], list[str], list[str]]:
    """Each rank names a directory of its own, as a script does that names it by a clock."""
    warnings = Warnings("zero3.checkpoint.save_handle")
    paths = []
    with start(nvme) as engine:
        for shares in tokens(2, 2):
            engine.backward(engine(*shares[rank]))
            engine.step()
            saving: Any = engine.save_checkpoint(directory / f"at {rank}")
            paths.append(str(saving.path.relative_to(directory)))
        masters = engine.master_state_dict()
    with start(nvme, other_seeds=True) as engine:
        engine.load_checkpoint(directory / "at 0")
        return paths, warnings.messages, differing(engine.master_state_dict(), masters)


def test_ranks_that_name_different_directories_save_to_that_of_rank_0(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "runs"
    first, second = ranks(2).run(save_apart, nvme, directory)
    for paths, _, wrong in (first, second):
        assert paths == ["at 0/global_step1", "at 0/global_step2"]
        assert wrong == []
    (warning,) = first[1]
    assert warning == (
        f"[rank 0] save_checkpoint was called with {directory}/at 0 on rank 0, and with {directory}/at 1 on rank 1: all"
        " ranks save to the directory of rank 0"
    )
    # The warning is logged once, by rank 0.
    assert second[1] == []
    assert {path.name for path in directory.iterdir()} == {"at 0"}
