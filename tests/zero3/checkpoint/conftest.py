"""The fixture of the tests of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tiering
from tests.zero3.checkpoint.snapshotted import Begin
from tests.zero3.conftest import config
from tests.zero3.resuming import Model
from zero3.engine.engine import Engine


@pytest.fixture
def begin(nvme: Path) -> Iterator[Begin]:
    """``begin(**config)()`` makes an engine with room for snapshots, of the same model every time.

    It has the arguments that are passed to the second call.
    """
    engines: list[Engine] = []

    def beginning(**options: Any) -> Callable[..., Engine]:
        options = {"accumulation": 1, "threshold": 40, "snapshots": True, "precision": "fp32", **options}
        settings = config(nvme, **options)

        def make(**arguments: Any) -> Engine:
            torch.manual_seed(1)
            engine = tiering.initialize(model=Model(), config=settings, **arguments).engine
            engines.append(engine)
            return engine

        return make

    yield beginning
    for engine in engines:
        engine.close()
