from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.tiering.storage.spaces import OpenSpace
from tiering.storage import slabs, striping
from tiering.storage.aio import AioContext, Fault, FaultPlan
from tiering.storage.arena import PAGE, Arena, round_up
from tiering.storage.swap_space import Section, SwapSpace

MIB = 1 << 20
EXT4 = ("mkfs.ext4", "-q", "-F", "-m", "0")


def run_or_skip(*command: str) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if ran.returncode:
        pytest.skip(f"{' '.join(command)} is not possible here: {ran.stderr.strip()}")


def unmount(where: Path) -> None:
    if subprocess.run(["umount", str(where)]).returncode:
        subprocess.run(["umount", "--lazy", str(where)], check=True)
        pytest.fail(f"something on {where} is still open")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """``mounted("-t", "ext2")`` mounts a new 16 MiB image made by ``mkfs.ext4`` with these options."""
    with ExitStack() as stack:

        def mount(*options: str, mkfs: tuple[str, ...] = EXT4, nbytes: int = 16 * MIB) -> Path:
            if os.geteuid() != 0:
                pytest.skip("root is needed to mount a file system")
            image, where = tmp_path / "image.to.mount", tmp_path / "mounted"
            image.touch()
            os.truncate(image, nbytes)
            where.mkdir()
            run_or_skip(*mkfs, *options, str(image))
            run_or_skip("mount", "-o", "loop", str(image), str(where))
            stack.callback(unmount, where)
            return where

        yield mount


@pytest.fixture
def arena() -> Arena:
    return Arena.map(4 * MIB, "host")


@pytest.fixture
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few pages, so that small extents are striped many times."""
    monkeypatch.setattr(striping, "SMALLEST_STRIPED", PAGE)
    monkeypatch.setattr(striping, "SMALLEST_SHARE", PAGE)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    directories = [tmp_path / name for name in "abc"]
    for path in directories:
        path.mkdir()
    return directories


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``rates(3, 1)`` is what measuring says from here on, in GB/s."""

    def say(*rates: int) -> None:
        def measure(aio: AioContext, files: list[tuple[int, int]]) -> list[int]:
            assert len(files) == len(rates)
            return [rate * 10**9 for rate in rates]

        monkeypatch.setattr(slabs, "measure", measure)

    return say


@pytest.fixture
def open_space(request: pytest.FixtureRequest) -> Iterator[OpenSpace]:
    uses_engine = "engine" in request.fixturenames
    name = request.getfixturevalue("engine") if uses_engine else "threads"
    with ExitStack() as stack:

        def open_one(
            sections: dict[str, tuple[int, list[Path]]], *faults: Fault, **options: Any
        ) -> SwapSpace:
            plan = FaultPlan(faults) if faults else None
            aio = AioContext(engine=name, block_size=PAGE, fault=plan, **options)
            stack.callback(aio.close)
            space = SwapSpace({kind: Section(n, tuple(where)) for kind, (n, where) in sections.items()}, aio)
            stack.callback(space.close)
            stack.callback(aio.close)
            return space

        yield open_one


@pytest.fixture
def open_state(open_space: OpenSpace, tmp_path: Path) -> OpenSpace:
    """``open_state(nbytes, *faults)``: a swap space of one section, "state", under ``tmp_path``."""
    return lambda nbytes, *faults, **options: open_space(
        {"state": (round_up(nbytes), [tmp_path])}, *faults, **options
    )
