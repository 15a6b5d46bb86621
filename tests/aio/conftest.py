from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tiering.errors import SwapError
from tiering.storage.aio import AioContext, FaultPlan

Open = Callable[..., AioContext]
SwapFile = Callable[..., int]


class Memory:
    """Page-aligned anonymous memory; ``shift`` bytes at its start stay unused, to unalign it."""

    def __init__(self, content: int | bytes, shift: int = 0) -> None:
        self.nbytes = content if isinstance(content, int) else len(content)
        self._map = mmap.mmap(-1, self.nbytes + shift + 1)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + shift
        self._shift = shift
        if isinstance(content, bytes):
            self.fill(content)

    def fill(self, content: bytes) -> None:
        self._map[self._shift : self._shift + len(content)] = content

    def bytes(self) -> bytes:
        return self._map[self._shift : self._shift + self.nbytes]


@pytest.fixture
def failure() -> Callable[[Callable[[], object]], tuple[int, str]]:
    """Runs what must raise SwapError; returns its errno and message."""

    def run(action: Callable[[], object]) -> tuple[int, str]:
        with pytest.raises(SwapError) as caught:
            action()
        assert caught.value.errno is not None
        return caught.value.errno, caught.value.args[0]

    return run


@pytest.fixture
def memory() -> type[Memory]:
    return Memory


@pytest.fixture
def open_context(engine: str, swap_file: SwapFile) -> Iterator[Open]:
    """Contexts on the engine under test, with small blocks so that requests have many; closed at the end.

    Before the files are: transfers may still be under way.
    """
    with ExitStack() as stack:

        def open_one(*faults: Any, alignment: int = 0, **options: Any) -> AioContext:
            options = {"engine": engine, "block_size": 65536, **options}
            plan = FaultPlan(faults, alignment) if faults or alignment else None
            return stack.enter_context(AioContext(fault=plan, **options))

        yield open_one


@pytest.fixture
def swap_file(tmp_path: Path) -> Iterator[SwapFile]:
    """Anonymous files on the disk under ``tmp_path``, O_DIRECT unless told otherwise."""
    fds: list[int] = []

    def open_one(nbytes: int = 0, *, direct: bool = True) -> int:
        flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            fds.append(os.open(tmp_path, flags, 0o600))
        except OSError as error:
            pytest.skip(f"{tmp_path} has no anonymous O_DIRECT files: {error}")
        os.ftruncate(fds[-1], nbytes)
        return fds[-1]

    yield open_one
    for fd in fds:
        os.close(fd)


@pytest.fixture
def run_child() -> Callable[..., str]:
    """Runs code in an interpreter of its own, which may import ``child``; returns what it printed."""

    def run(code: str, *arguments: object) -> str:
        here = str(Path(__file__).parent)
        path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        ran = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": path},
        )
        if ran.returncode == 77:
            pytest.skip(ran.stdout.strip())
        assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
        return ran.stdout

    return run
