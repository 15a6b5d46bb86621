"""Blocks over chunks of rows on each of two ranks: the bits of any placement, and the gradients of all rows at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .pool import Pool
from .training import train

Ranks = Callable[[int], Pool]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}
PLACES: list[tuple[int, dict[str, Any]]] = [
    (3, STREAMED),
    (2, {"offload_optimizer": "nvme", "cache_in_host": False}),
    (1, {"offload_optimizer": "cpu"}),
    (0, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "place"), PLACES)
def test_chunks_add_up_before_they_are_sent(
    ranks: Ranks, nvme: Path, stage: int, place: dict[str, Any], precision: str
) -> None:
    options = {"precision": precision, "stage": stage, "accumulation": 1}
    on_device = ranks(2).run(train, nvme, block_rows=1, **options)
    placed = ranks(2).run(train, nvme, block_rows=1, **options, **place)
    assert placed[0].differing(on_device[0]) == [] and placed[1].differing(on_device[1]) == []
    whole = ranks(2).run(train, nvme, **options)
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[precision]
    for each, reference in zip(placed, whole, strict=True):
        assert each.losses == pytest.approx(reference.losses, rel=tolerance)
        for name, value in reference.masters.items():
            # AdamW moves an element with a gradient of rounding noise either way.
            difference = (each.masters[name] - value).abs()
            assert float(difference.max()) <= 2 * 3 * 1e-3, name
            assert float(difference.mean()) <= 0.05 * 3 * 1e-3, name
