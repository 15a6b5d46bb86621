"""Ranks send what is planned: ZeRO's volume, to the byte, in every stage with every offload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .pool import Pool
from .test_stages import OFFLOADS
from .training import start, tokens

Ranks = Callable[[int], Pool]
WARM, STEPS = 2, 2  # orders are learned first, and first values are sent


def sent(rank: int, nvme: Path) -> dict[str, tuple[int, int]]:
    """Bytes of a steady step: what was sent or was still there, and what was planned."""
    bytes_by_case = {}
    for (stage, place), options in OFFLOADS.items():
        with start(nvme, precision="bf16", threshold=100, **options) as engine:
            counts = []
            for number, shares in enumerate(tokens(WARM + STEPS, 2), start=1):
                engine.backward(engine(*shares[rank]))
                engine.step()
                if number >= WARM:
                    collectives = engine.snapshot().collectives
                    bulk = [each.sent_bytes for each in collectives if each.kind != "control"]
                    counts.append(sum(bulk) + engine._collectives.spared)
            bytes_by_case[f"stage {stage}, {place}"] = (
                counts[-1] - counts[0],
                sum(engine.plan.sent_bytes().values()),
            )
    return bytes_by_case


@pytest.mark.slow
def test_every_stage_sends_what_is_planned(ranks: Ranks, nvme: Path) -> None:
    of_ranks = ranks(2).run(sent, nvme)
    assert of_ranks[0] == of_ranks[1]
    for name, (counted, planned) in of_ranks[0].items():
        assert counted == STEPS * planned > 0, name
