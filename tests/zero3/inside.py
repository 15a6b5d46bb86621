"""What tests of the engine can only see inside it: here alone, so that a renamed attribute concerns one file."""

from __future__ import annotations

from typing import Any

from zero3.checkpoint.saving import Saver


def saver_of(engine: Any) -> Saver:
    """The saver of the running save. On several ranks it ends before the save does, which all of them commit."""
    under_way = engine._checkpoints._under_way
    assert under_way is not None, "no save is running"
    saver: Saver = under_way.saver
    return saver


def wait_for_transfers(engine: Any) -> None:
    """Wait until nothing is on its way to or from NVMe, so that counters stand still."""
    engine._updates.settle_step()
    engine._prefetcher.look_ahead()
    engine._tiers.staging.drain()
    for group in engine._groups:
        if group.home.extent is not None:
            group.home.extent.order.settle()


def staging_is_empty(engine: Any) -> bool:
    """Whether no staging memory is leased once the writes that use it have ended."""
    engine._tiers.staging.drain()
    return not engine._tiers.staging.by_kind
