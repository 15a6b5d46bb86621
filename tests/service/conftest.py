"""What tests of the sidecar share: pages without an engine, a real ``tierd``, a real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tiering.telemetry import Description, Snapshot, StatusWriter

from .processes import Sidecar, Training, tierd, train

if TYPE_CHECKING:
    from .chromium import Open

Publish = Callable[..., StatusWriter]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run directory of the test's own."""
    return tmp_path / "run"


@pytest.fixture
def publishing() -> Iterator[Publish]:
    """``publishing(directory, snapshot, description=None)`` is the page of a rank that lives until the test ends."""
    with ExitStack() as open_pages:

        def publish(
            directory: Path, snapshot: Snapshot, description: Description | None = None
        ) -> StatusWriter:
            name = snapshot.run_id or snapshot.run_name
            writer = StatusWriter(name, snapshot.rank, snapshot.world_size, directory, description)
            open_pages.callback(writer.close)
            writer.publish(snapshot)
            return writer

        yield publish


@pytest.fixture
def sidecar(directory: Path) -> Iterator[Sidecar]:
    """A real ``tierd`` of ``directory``. Of another one, or with arguments: ``processes.tierd``."""
    with tierd(directory) as process:
        yield process


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Here: without playwright the import skips the test, and only tests of the page need it.
    from .chromium import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """``visit(url)`` opens the page in a tab of its own."""
    from .chromium import visits_of

    with visits_of(browser) as visit:
        yield visit


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A real engine that trains, for tests that look and do not touch; to stop or kill one: ``processes.train``."""
    home = tmp_path_factory.mktemp("training")
    with train(home, home / "run") as process:
        yield process
