"""Fixtures of more than one area."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

from tests.wheels import CPUS, InstalledWheel, build_wheels, install
from tiering import _logs
from tiering.errors import SwapError
from tiering.storage import swap_file
from tiering.storage.aio import ENGINES, AioContext

# Read when torch is imported, in this process and in those that tests start. OpenMP's threads spin while they wait by
# default; with one thread per core they would take most of the CPU time of the other test workers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No test depends on the duration of an example. Examples differ from run to run.
settings.register_profile("tiering", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=200)  # of `make test-all`
settings.load_profile("tiering")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but each nth case of a test with `one_of(n)` as slow."""
    counted: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_of")
        if mark is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            if counted[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            counted[test] += 1


LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard() -> None:
    """A shell makes background processes ignore SIGINT, and their children inherit that: restore the handler."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # nohup ignores it.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def nobody_waits_for_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening swap space does not wait for the space of a process that has just ended, unless a test sets it."""
    monkeypatch.setattr(swap_file, "PATIENCE_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def no_launcher() -> Iterator[None]:
    """Remove the variables of a launcher that a test, or a library in it, sets: accelerate would read them."""
    before = os.environ.keys() & LAUNCHER
    yield
    for name in (os.environ.keys() & LAUNCHER) - before:
        del os.environ[name]


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Restore levels, handlers and record factory of the project's loggers after the test."""
    factory = logging.getLogRecordFactory()
    loggers = [logging.getLogger(name) for name in (*_logs.LOGGERS, _logs.PROGRESS)]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    logging.setLogRecordFactory(factory)
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers = handlers


# Imported objects live until the end. Without gc.freeze() each collection would traverse a million of them, which takes
# half a second.
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
    reason = cannot_start(name)
    if reason:
        pytest.skip(reason)
    return name


def unmount(mount_point: Path) -> None:
    """Unmount, with retries, since the kernel may hold files of a killed process briefly; raises OSError if busy."""
    for _ in range(50):
        ran = subprocess.run(["umount", str(mount_point)], capture_output=True, text=True)
        if ran.returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "-l", str(mount_point)], check=True)
    raise OSError(f"{mount_point} was busy: {ran.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts ext4 file systems of the given size in bytes, used by the test only."""
    with ExitStack() as stack:

        def mount(nbytes: int) -> Path:
            if os.geteuid() != 0:
                pytest.skip("root is needed to mount a file system")
            image = tmp_path / "image"
            image.touch()
            os.truncate(image, nbytes)
            mount_point = tmp_path / "disk"
            mount_point.mkdir()
            # Without a journal, freed blocks are available at once. -m 0 reserves no blocks for root.
            for command in (
                ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)],
                ["mount", "-o", "loop", str(image), str(mount_point)],
            ):
                try:
                    ran = subprocess.run(command, capture_output=True, text=True)
                except FileNotFoundError:
                    pytest.skip(f"{command[0]} is not installed")
                if ran.returncode:
                    pytest.skip(f"{command[0]} failed: {ran.stderr.strip()}")
            stack.callback(unmount, mount_point)
            return mount_point

        yield mount


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel for each CPU."""
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session", params=CPUS)
def installed_wheel(
    request: pytest.FixtureRequest, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> InstalledWheel:
    return install(wheels[request.param], request.param, tmp_path_factory.mktemp("site"))
