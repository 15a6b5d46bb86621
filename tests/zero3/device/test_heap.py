"""Memory of freed tensors is returned to the system when the process has too much of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.zero3.plain import STREAMED, Tower, inputs, update
from zero3.device import heap

MIB = 1 << 20


def test_memory_is_returned_once_the_process_has_more_than_it_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, trims = [100 * MIB], list[int]()

    def trim() -> None:
        trims.append(resident[0] // MIB)
        resident[0] = left[0]

    left = [60 * MIB]
    monkeypatch.setattr(heap, "trim", trim)
    monkeypatch.setattr(heap, "_resident", lambda: resident[0])
    freed = heap.FreedMemory(32 * MIB)
    freed.look()
    assert trims == [100]
    resident[0] = 92 * MIB
    freed.look()
    assert trims == [100]
    # It needs more at this place than before, so it may have more at every place.
    resident[0], left[0] = 93 * MIB, 80 * MIB
    freed.look()
    assert trims == [100, 93]
    for resident[0], left[0] in ((112 * MIB, 0), (113 * MIB, 50 * MIB), (112 * MIB, 0)):
        freed.look()
    assert trims == [100, 93, 113]


def test_the_process_is_looked_at_when_a_group_is_released(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[heap.FreedMemory] = []
    monkeypatch.setattr(heap.FreedMemory, "look", lambda self: looks.append(self))
    engine = start(Tower(), accumulation=1, threshold=0, **STREAMED)
    update(engine, next(inputs(1)))
    moving = sum(group.moves for group in engine._groups)
    assert len(looks) >= 2 * moving > 0  # in forward and in backward


def test_the_process_has_the_bytes_that_it_touched() -> None:
    before = heap._resident()
    touched = bytearray(b"x") * (64 * MIB)
    assert 60 * MIB < heap._resident() - before < 90 * MIB
    del touched
