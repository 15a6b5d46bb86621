"""The power of a real file system is cut: its image is copied between any two operations of a save, and mounted.

What test_crash_order.py builds by the rules, ext4 does here as it happens to.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import unmount
from tests.tiering.checkpoint import killed
from tiering.errors import CheckpointError

SCRIPT = Path(killed.__file__)
SAVES = 5


@contextmanager
def mounted(image: Path, *, options: str = "") -> Iterator[Path]:
    where = image.with_suffix(".mounted")
    where.mkdir(exist_ok=True)
    ran = subprocess.run(
        ["mount", "-o", f"loop{options}", str(image), str(where)], capture_output=True, text=True
    )
    if ran.returncode:
        pytest.skip(f"mounting is not possible here: {ran.stderr.strip()}")
    try:
        yield where
    finally:
        unmount(where)


@pytest.fixture
def image(memory: Path) -> Iterator[Path]:
    """ext4 with a journal, in memory, for it is copied hundreds of times."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("root and mkfs.ext4 are needed to mount a file system")
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        image = Path(directory) / "image"
        image.touch()
        os.truncate(image, 24 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-J", "size=4", str(image)], check=True)
        yield image


def power_cuts(image: Path, *, synced: bool = True) -> Iterator[int]:
    """Copies the image as ``cut`` beside it, again and again, and gives the save that had returned before."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[3])}
    # Nothing is committed but by an fsync: so the image does not change while it is copied.
    with mounted(image, options=",commit=3600") as disk:
        command = [sys.executable, str(SCRIPT), "stops", str(disk / "checkpoints"), str(SAVES), str(synced)]
        saver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert saver.stdout
        try:
            for line in saver.stdout:
                _, status = os.waitpid(saver.pid, os.WUNTRACED)
                assert os.WIFSTOPPED(status)
                # A new file: another program may hold the loop device of the one before, with what it has cached.
                image.with_name("cut").unlink(missing_ok=True)
                shutil.copyfile(image, image.with_name("cut"))
                yield int(line)
                saver.send_signal(signal.SIGCONT)
            assert saver.wait() == 0
        finally:
            saver.kill()
            saver.wait()
            saver.stdout.close()


def found_after(cut: Path, saved: int) -> tuple[int, int] | None:
    """Of what a power cut leaves: by how much what is found is later than ``saved``, and how many partials there are.

    None where there is nothing, and need not be. Saving goes on from there.
    """
    with mounted(cut) as disk:
        path = disk / "checkpoints"
        if saved < 0 and not path.exists():
            return None
        number, partials = killed.check(path, saved)
        killed.save(path, number + 1)
        assert killed.check(path, number + 1) == (number + 1, 0)
    return number - saved, partials


def found_after_each(image: Path, *, synced: bool = True) -> set[tuple[int, tuple[int, int] | None]]:
    """What had been saved, and what was found."""
    return {(saved, found_after(image.with_name("cut"), saved)) for saved in power_cuts(image, synced=synced)}


@pytest.mark.slow
def test_what_ext4_leaves_is_whole(image: Path) -> None:
    states = found_after_each(image)
    assert {saved for saved, _ in states} == set(range(-1, SAVES))
    assert {(0, 0), (0, 1), (1, 0), (1, 1)} <= {kind for _, kind in states}


@pytest.mark.slow
def test_without_fsync_a_checkpoint_is_lost(image: Path) -> None:
    """So the test above sees what it is meant to see."""
    with pytest.raises((AssertionError, CheckpointError)):
        found_after_each(image, synced=False)
