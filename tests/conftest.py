"""Fixtures of more than one area."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from tiering import logs
from tiering.errors import SwapError
from tiering.storage import swap_file
from tiering.storage.aio import ENGINES, AioContext

# Read when torch is imported, here and in processes that tests start. Threads of OpenMP that wait spin by default: as
# many as there are cores, they would take most of the time of these from the tests of another worker.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# An example takes as long as the machine lets it: no test is about that. Examples differ from run to run.
settings.register_profile("tiering", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=200)  # of `make test-all`
settings.load_profile("tiering")


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell lets what it runs in the background ignore Ctrl-C; whatever is started here would ignore it, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nobody_waits_for_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process that held swap space has just ended, unless a test has ended it."""
    monkeypatch.setattr(swap_file, "PATIENCE_SECONDS", 0.0)


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """What the test sets of our loggers, levels, handlers and record factory, ends with it."""
    factory = logging.getLogRecordFactory()
    loggers = [logging.getLogger(name) for name in (*logs.LOGGERS, logs.PROGRESS)]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    logging.setLogRecordFactory(factory)
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers = handlers


# What is imported stays, and no collection need look through it: a million objects, half a second each time.
gc.disable()


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_stays() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


@functools.cache  # io_destroy waits for an RCU grace period: tens of milliseconds
def cannot_start(engine: str) -> str | None:
    try:
        AioContext(engine=engine).close()
    except SwapError as error:
        return f"engine {engine} cannot start here: {error.args[0]}"
    return None


@pytest.fixture(params=[name for name in ENGINES if name != "auto"])
def engine(request: pytest.FixtureRequest) -> str:
    """Each I/O engine in turn."""
    name: str = request.param
    why = cannot_start(name)
    if why:
        pytest.skip(why)
    return name


def unmount(where: Path) -> None:
    """The kernel may hold a killed process's files for a moment; what stays busy is detached, and an error."""
    for _ in range(50):
        ran = subprocess.run(["umount", str(where)], capture_output=True, text=True)
        if ran.returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "-l", str(where)], check=True)
    raise OSError(f"{where} was busy: {ran.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts ext4 file systems of the given size in bytes, which nobody else fills or empties."""
    with ExitStack() as stack:

        def mount(nbytes: int) -> Path:
            if os.geteuid() != 0:
                pytest.skip("mounting a file system takes root")
            image = tmp_path / "image"
            image.touch()
            os.truncate(image, nbytes)
            where = tmp_path / "disk"
            where.mkdir()
            # Without a journal freed blocks are free at once; no share is held back for root.
            for command in (
                ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)],
                ["mount", "-o", "loop", str(image), str(where)],
            ):
                try:
                    ran = subprocess.run(command, capture_output=True, text=True)
                except FileNotFoundError:
                    pytest.skip(f"there is no {command[0]} here")
                if ran.returncode:
                    pytest.skip(f"{command[0]} is not possible here: {ran.stderr.strip()}")
            stack.callback(unmount, where)
            return where

        yield mount
