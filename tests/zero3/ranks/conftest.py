"""Fixtures of tests with several ranks; what runs on them is in training.py, what they are in pool.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import zero3.ranks.peers

from .pool import Pool, Pools
from .together import Together


@pytest.fixture(scope="session")
def _pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    pools = Pools(tmp_path_factory.mktemp("ranks"))
    yield pools
    pools.close()


@pytest.fixture
def ranks(_pools: Pools) -> Callable[[int], Pool]:
    """``ranks(2)`` are two processes that other tests use, too: every task has to return on every rank."""
    return _pools.of


@pytest.fixture
def doomed(_pools: Pools) -> Iterator[Callable[..., Pool]]:
    """``doomed(2)`` are two processes for a test that will not leave them as they were."""
    pools: list[Pool] = []

    def fresh(world_size: int, **environment: str) -> Pool:
        pools.append(_pools.fresh(world_size, environment))
        return pools[-1]

    yield fresh
    for pool in pools:
        pool.broken = True  # they may be anything now: no farewell
        pool.close()


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    path = tmp_path / "nvme"
    path.mkdir()
    return path


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Together]]:
    monkeypatch.setattr(zero3.ranks.peers, "FIRST_SLICE", 0.02)
    monkeypatch.setattr(zero3.ranks.peers, "SLICE", 0.05)
    groups: list[Together] = []

    def start(world_size: int = 2, **settings: Any) -> Together:
        groups.append(Together(world_size, **settings))
        return groups[-1]

    yield start
    for them in groups:
        them.close()


SAMPLE = 6  # one case in so many of a cross product is a fast test


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test's cases the first, the seventh, ... are fast, the others slow: `make test-all` runs them all.

    Ranks are processes, and a case of theirs takes half a second.
    """
    counts: Counter[str] = Counter()
    for item in items:
        if not item.path.is_relative_to(Path(__file__).parent) or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        if "[" in item.nodeid and counts[test] % SAMPLE:
            item.add_marker(pytest.mark.slow)
        counts[test] += 1
