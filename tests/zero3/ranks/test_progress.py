"""What a user asked to see of a run with several ranks: the first one tells it, with what it sent to the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiering
from tests.zero3.conftest import config
from tiering import _logs

from .models import Blocks, vectors
from .pool import Pool
from .training import usual

Ranks = Callable[..., Pool]
STEPS = 2


def read_progress(rank: int, nvme: Path, output: Path) -> dict[str, Any]:
    """The lines that this rank says, and what its record has."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger(_logs.PROGRESS)
    logger.addHandler(handler)
    sections = {
        "steps_per_print": 1,
        "csv_monitor": {"enabled": True, "output_path": str(output), "job_name": f"seen-by-{rank}"},
    }
    try:
        settings = config(nvme, **usual()) | sections
        with tiering.initialize(model=Blocks(), config=settings).engine as engine:
            losses = []
            for shares in vectors(STEPS, 2):
                loss = engine(*shares[rank])
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            sent = [step.sent_bytes for step in engine.snapshot().steps]
    finally:
        logger.removeHandler(handler)
    return {"lines": [line for line in lines if " step " in line], "losses": losses, "sent": sent}


def test_the_first_rank_tells_of_the_mean_loss_and_of_its_own_bytes(
    ranks: Ranks, nvme: Path, tmp_path: Path
) -> None:
    first, other = ranks(2).run(read_progress, nvme, tmp_path)
    assert other["lines"] == []
    means = [sum(losses) / 2 for losses in zip(first["losses"], other["losses"], strict=True)]
    for number, (line, mean) in enumerate(zip(first["lines"], means, strict=True), start=1):
        assert line.startswith(f"INFO [rank 0] step {number}: loss {mean:.5g}, gradient norm ")
    assert [path.name for path in tmp_path.glob("seen-by-*")] == ["seen-by-0"]
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "seen-by-0").iterdir()}
    samples = [4, 8]  # of both ranks
    assert files["Tiering_sent_bytes.csv"][1:] == [
        f"{count},{float(nbytes)}" for count, nbytes in zip(samples, first["sent"], strict=True)
    ]
    losses = [float(row.partition(",")[2]) for row in files["Train_Samples_train_loss.csv"][1:]]
    assert losses == pytest.approx(means)
