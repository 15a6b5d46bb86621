"""Fixtures of more than one area."""

from __future__ import annotations

import functools

import pytest

from tiering.aio import AioContext
from tiering.errors import SwapError


@functools.cache  # io_destroy waits for an RCU grace period: tens of milliseconds
def cannot_start(engine: str) -> str | None:
    try:
        AioContext(engine=engine).close()
    except SwapError as error:
        return f"engine {engine} cannot start here: {error.args[0]}"
    return None


@pytest.fixture(params=["libaio", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each I/O engine in turn."""
    name: str = request.param
    why = cannot_start(name)
    if why:
        pytest.skip(why)
    return name
