"""Ranks send what is planned: ZeRO's volume, to the byte, in every stage with every offload."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .pool import Pool
from .test_stages import OFFLOADS
from .training import start, tokens

Ranks = Callable[[int], Pool]
WARM, STEPS = 2, 2  # orders are learned first, and first values are sent


def sent(rank: int, nvme: Path) -> dict[str, tuple[int, int]]:
    """Bytes of a steady step: what was sent or was still there, and what was planned."""
    found = {}
    for (stage, place), options in OFFLOADS.items():
        with start(nvme, precision="bf16", threshold=100, **options) as engine:
            told = []
            for number, shares in enumerate(tokens(WARM + STEPS, 2), start=1):
                engine.backward(engine(*shares[rank]))
                engine.step()
                if number >= WARM:
                    bulk = [one.sent_bytes for one in engine.snapshot().collectives if one.kind != "control"]
                    told.append(sum(bulk) + engine._collectives.spared)
            found[f"stage {stage}, {place}"] = (told[-1] - told[0], sum(engine.plan.sent_bytes().values()))
    return found


def test_every_stage_sends_what_is_planned(ranks: Ranks, nvme: Path) -> None:
    of_ranks = ranks(2).run(sent, nvme)
    assert of_ranks[0] == of_ranks[1]
    for name, (counted, planned) in of_ranks[0].items():
        assert counted == STEPS * planned > 0, name
