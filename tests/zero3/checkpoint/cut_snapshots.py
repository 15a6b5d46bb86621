"""The power is cut between any two operations of runs with snapshots, on ext4; `python -m` runs it, as root.

Runs follow each other, and go on from the snapshot of the run before: with its plan they adopt its swap files, with
another one they replace them. They stop before each operation that changes names, locks or makes something last, and
between the passes of a step, which writes to the swap files. The image of their file system is copied then, as a power
cut would leave it, and mounted in its place: another run has to begin there with the bits of the last snapshot that was
complete, or with those of the one under way, and its own snapshot leaves no file of others. Prints how often it was
which, and whether the swap files were adopted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import unmount
from tests.tiering.checkpoint.killed import forked
from tests.tiering.checkpoint.operations import intercepted
from tests.zero3.checkpoint.killed_snapshots import digest, engine_of
from tests.zero3.resuming import tokens, train
from tiering.storage.file_system import fsync

OTHER_PLAN = {"sub_group_size": 1}
RUNS: tuple[dict[str, Any], ...] = ({}, {}, OTHER_PLAN, OTHER_PLAN)
"""Settings of the runs, each of which makes one snapshot, a step after that of the run before."""
STOPPING = frozenset({"rename", "unlink", "link", "exchange", "fsync", "mkdir", "flock"})


@contextmanager
def mounted(image: Path, where: Path, *, options: str = "") -> Iterator[None]:
    subprocess.run(["mount", "-o", f"loop{options}", str(image), str(where)], check=True, capture_output=True)
    try:
        yield
    finally:
        unmount(where)


def run(where: Path, reference: Path, synced: bool) -> None:
    """The runs, with stops. Writes the digest of each step before its snapshot, and the settings of the run."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def around(name: str, operation: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if name in STOPPING:
            stop()
        is_file = name == "fsync" and stat.S_ISREG(os.fstat(arguments[0]).st_mode)
        return operation() if synced or not is_file else None

    digests: list[str] = []
    for number, options in enumerate(RUNS):
        reference.write_text(json.dumps([digests, options]))
        engine = engine_of(where / "nvme", "split", **options)
        with intercepted(around):
            engine.load_checkpoint(where / "saved")
        engine.backward(engine(tokens(number)))
        stop()
        engine.step()
        stop()
        digests.append(digest(engine))
        reference.write_text(json.dumps([digests, options]))
        with intercepted(around):
            engine.snapshot_state(where / "saved")
        reference.with_suffix(".returned").write_text(str(number))
        # A step that is in no snapshot.
        train(engine, range(99, 100))
        with intercepted(around):
            engine.close()


def check(where: Path, reference: Path, into: int) -> None:
    """Writes what is found: the "last" snapshot, that which is "under way", or "none"; and how it was loaded."""
    digests, options = json.loads(reference.read_text())
    note = reference.with_suffix(".returned")
    returned = int(note.read_text()) if note.exists() else -1
    engine = engine_of(where / "nvme", "split", **options)
    path, _ = engine.load_checkpoint(where / "saved")
    found = engine.global_steps - 1
    assert found in (returned, returned + 1), f"snapshot {found} is found, and {returned} had returned"
    assert path is None or digest(engine) == digests[found], f"other bits in snapshot {found}"
    # Without its snapshot it would not have the directory.
    adopted = engine._checkpoints.snapshot_directory.current is not None
    engine.snapshot_state(where / "saved")
    files = [file.name for file in (where / "nvme").iterdir()]
    assert len(files) == 1, f"swap files {files} after another snapshot"
    engine.close()
    kind = "none" if path is None else "last" if found == returned else "under way"
    os.write(into, f"{kind}, {'adopted' if adopted else 'copied'}".encode() if path else b"none")


def cut(directory: Path, synced: bool) -> Counter[str]:
    image, cut_image, where = directory / "image", directory / "cut", directory / "mounted"
    where.mkdir()
    image.touch()
    os.truncate(image, 32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-J", "size=4", str(image)], check=True)
    reference, tally = directory / "reference", Counter[str]()
    # Nothing is committed but by an fsync.
    with mounted(image, where, options=",commit=3600"):
        (where / "nvme").mkdir()
        fsync(where)
        runner = forked(lambda: run(where, reference, synced))
        try:
            while os.WIFSTOPPED(os.waitpid(runner, os.WUNTRACED)[1]):
                # A new file: another program may hold the loop device of the one before, with what it has cached.
                cut_image.unlink(missing_ok=True)
                shutil.copyfile(image, cut_image)
                with mounted(cut_image, where):
                    out, into = os.pipe()
                    checker = forked(lambda into=into: check(where, reference, into))
                    os.close(into)
                    with os.fdopen(out) as result:
                        found = result.read().strip()
                    if os.waitpid(checker, 0)[1]:
                        tally["lost"] += 1
                        return tally
                    tally[found] += 1
                os.kill(runner, signal.SIGCONT)
            runner = 0
        finally:
            if runner:
                os.kill(runner, signal.SIGKILL)
                os.waitpid(runner, 0)
    return tally


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--not-synced", action="store_true")
    arguments = parser.parse_args()
    print(json.dumps(cut(arguments.directory, not arguments.not_synced)))
