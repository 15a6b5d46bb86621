"""Prefetch: groups are fetched ahead in the recorded order, and ranks agree where one of them may leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.zero3.conftest import batches
from zero3.engine.engine import Engine
from zero3.params.param_group import Residency
from zero3.passes.prefetch import Prefetcher

NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False, "threshold": 0}


def step(engine: Engine) -> None:
    for tokens, targets in batches(engine.settings.gradient_accumulation_steps):
        engine.backward(engine(tokens, targets))
        engine.step()


def evaluate(engine: Engine) -> None:
    with torch.no_grad():
        for tokens, targets in batches(2):
            engine(tokens, targets)


def fail(engine: Engine) -> None:
    """A forward ends with an exception in its second block."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = engine.module.blocks[1].register_forward_pre_hook(interrupt)
    ((tokens, targets),) = batches(1)
    with pytest.raises(KeyboardInterrupt):
        engine(tokens, targets)
    handle.remove()


@pytest.mark.parametrize("between", [evaluate, fail])
def test_one_process_goes_on_to_fetch_ahead(
    start: Callable[..., Engine], between: Callable[[Engine], None]
) -> None:
    engine = start(**NVME)
    first, second = engine.module.blocks[:2]
    (following,) = [group for group in engine._groups if second in group.entries]
    ahead: list[bool] = []

    def look(*_: object) -> None:
        ahead.append(following.residency is not Residency.SHARDED)

    first.register_forward_pre_hook(look)
    step(engine)
    ahead.clear()
    step(engine)
    assert ahead == [True] * len(ahead) != []
    between(engine)
    ahead.clear()
    step(engine)
    assert ahead == [True] * len(ahead) != []


class Sharded:
    """A group whose gathers are noted, with whether all ranks have foreseen them."""

    sharded = stays = moves = True
    through_window = reads_first = gathered = False
    routing = None

    def __init__(self, name: str, gathers: list[tuple[str, bool]]) -> None:
        self.name = name
        self.gathers = gathers
        self.residency = Residency.SHARDED

    def unshard(self, *, wait: bool = False) -> bool:
        self.residency, self.gathered = Residency.FETCHING, False
        return True

    def gather(self, *, foreseen: bool) -> None:
        self.gathered = True
        self.gathers.append((self.name, foreseen))

    def wait_for_unshard(self) -> None:
        self.residency = Residency.UNSHARDED

    def reshard(self) -> None:
        self.residency = Residency.SHARDED

    def hide(self) -> None:
        pass

    def spare(self) -> None:
        self.gathers.append((f"{self.name} again", True))


class Passes:
    """Two groups, and the agreements of their prefetcher."""

    def __init__(self) -> None:
        self.gathers: list[tuple[str, bool]] = []
        self.agreements: list[str] = []
        self.groups: list[Any] = [Sharded(name, self.gathers) for name in "ab"]
        self.prefetcher = Prefetcher(self.agreements.append)

    def use(self, names: str) -> None:
        for name in names:
            group = self.groups["ab".index(name)]
            self.prefetcher.acquire(group)
            self.prefetcher.release(group)

    def events(self) -> tuple[list[tuple[str, bool]], list[str]]:
        """The gathers and agreements since the last call."""
        gathers, agreements = self.gathers[:], self.agreements[:]
        self.gathers.clear()
        self.agreements.clear()
        return gathers, agreements

    def train(self) -> None:
        self.prefetcher.begin_pass(True)
        self.use("abba")
        self.prefetcher.end_pass()


ALL_FORESEEN = [("a", True), ("b", True), ("b again", True), ("a again", True)]


def test_a_whole_pass_is_foreseen_by_the_other_ranks() -> None:
    passes = Passes()
    passes.train()
    passes.events()
    for _ in range(2):
        passes.train()
        assert passes.events() == (ALL_FORESEEN, [])


def test_a_forward_that_no_backward_has_followed_asks_the_other_ranks() -> None:
    """They may be in the backward that this rank has left out, and expect its groups."""
    passes = Passes()
    passes.train()
    passes.events()
    passes.prefetcher.begin_pass(True)
    passes.use("ab")
    assert passes.events() == (ALL_FORESEEN[:2], [])
    passes.prefetcher.begin_pass(True)
    passes.use("a")
    assert passes.events() == ([("a again", True)], ["use 'a'"])
    passes.use("b")
    assert passes.events() == ([("b again", True)], [])
