"""Processes of the tests that run under the name of DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.zero3.ranks.pool import Pools


@pytest.fixture(scope="module")
def shimmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """Processes for the tests of a module that shimmed.under_shim decorates."""
    pools = Pools(tmp_path_factory.mktemp("shimmed"))
    yield pools
    pools.close()
