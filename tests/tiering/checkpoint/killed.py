"""Saves are killed (SIGKILL), and what they leave is read: a program, so that it can fork without torch and threads.

    python killed.py operations DIR          before each operation of a save in turn, of a new tag and of one replaced
    python killed.py renames DIR             where names cannot be exchanged: before each from the one that finds out on
    python killed.py moments DIR N SEED      N times, at any moment of one save after the other
    python killed.py stops DIR N SYNCED      not at all: N saves stop before each operation, for others to look

All but the last print {"kills": how many, "old": after how many the earlier checkpoint was found, "new": the one under
way, "partials": how many left something half done}, and end with a traceback if a checkpoint was lost.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import signal
import stat
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.tiering.checkpoint.operations import intercepted, no_exchange
from tests.tiering.checkpoint.saving import RUN, number_of, write_checkpoint
from tiering.checkpoint.directory import CheckpointDirectory
from tiering.checkpoint.manifest import LATEST
from tiering.config.training import IoConfig
from tiering.weights.tensor_file import Output

KEEP = 2


def tag_of(number: int) -> str:
    """Each tag is saved twice: what is even is new, and has others pruned; what is odd is replaced."""
    return f"global_step{number // 2}"


def save(path: Path, number: int) -> None:
    directory = CheckpointDirectory(path)
    with Output(IoConfig(engine="threads"), windows=3) as output:
        partial = directory.begin(tag_of(number), run=RUN)
        write_checkpoint(partial, number, output)
        directory.commit(partial, tag_of(number), run=RUN, keep=KEEP)
    directory.close()


def check(path: Path, saved: int) -> tuple[int, int]:
    """The save that is found, and how many partial ones are there. Save ``saved`` had returned, perhaps none since."""
    directory = CheckpointDirectory(path)
    latest = directory.find()
    number = -1 if latest is None else number_of(latest)
    assert number in (saved, saved + 1), f"save {number} is found, and {saved} had returned"
    places = {each.tag: directory.find(each.tag) or path for each in directory.tags()}
    for tag, place in places.items():
        assert tag_of(number_of(place)) == tag
    partials = directory.partials()
    rest = {entry.name for entry in path.iterdir()} - {each.name for each in (*places.values(), *partials)}
    assert rest <= {LATEST, ".lock"}
    return number, len(partials)


def forked(work: Callable[[], None]) -> int:
    """A child that does this and nothing else; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def died(pid: int) -> bool:
    """Whether it was killed. It did its work otherwise."""
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


@contextmanager
def killed_before(nth: int, first: str | None = None) -> Iterator[None]:
    """This process is killed before its operation number ``nth``, of those from the one named ``first`` on."""
    numbers = itertools.count()
    counts = first is None

    def around(name: str, operation: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        nonlocal counts
        counts = counts or name == first
        if counts and next(numbers) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return operation()

    with intercepted(around):
        yield


def at_operations(path: Path, first: str | None = None) -> Counter[str]:
    tally: Counter[str] = Counter()
    number = 0
    for nth in itertools.count():
        survived = 0
        for _ in ("new", "replaced"):

            def dies(number: int = number, nth: int = nth) -> None:
                with killed_before(nth, first):
                    save(path, number)

            if died(forked(dies)):
                note(tally, path, number - 1)
                assert not died(forked(lambda number=number: save(path, number)))
            else:
                survived += 1
            assert check(path, number) == (number, 0)
            assert len(CheckpointDirectory(path).tags()) <= KEEP
            number += 1
        if survived == 2:
            return tally
    raise AssertionError


def at_moments(path: Path, times: int, seed: int) -> Counter[str]:
    tally: Counter[str] = Counter()
    choose = random.Random(seed)
    before = time.perf_counter()
    assert not died(forked(lambda: save(path, 0)))
    seconds = time.perf_counter() - before  # on this machine, with all that it does besides
    saved = 0
    for _ in range(times):
        mine, its = os.pipe()

        def work(first: int = saved + 1, its: int = its) -> None:
            for number in itertools.count(first):
                save(path, number)
                os.write(its, b".")

        pid = forked(work)
        os.close(its)
        time.sleep(choose.uniform(0, 1.5 * seconds))
        os.kill(pid, signal.SIGKILL)
        assert died(pid)
        saved += len(os.read(mine, 1 << 16))
        os.close(mine)
        saved = note(tally, path, saved)
    save(path, saved + 1)
    assert check(path, saved + 1) == (saved + 1, 0)
    return tally


def stops(path: Path, saves: int, synced: bool) -> None:
    """Prints the number of the last save that returned, and stops (SIGSTOP): before each operation, and in the end.

    Files are not ``synced`` where this shall do harm; directories are, always.
    """
    saved = -1

    def around(name: str, operation: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        stop()
        is_file = name == "fsync" and stat.S_ISREG(os.fstat(arguments[0]).st_mode)
        return operation() if synced or not is_file else None

    def stop() -> None:
        print(saved, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    with intercepted(around):
        for number in range(saves):
            save(path, number)
            saved = number
    stop()


def note(tally: Counter[str], path: Path, saved: int) -> int:
    """Check, and count what is found; returns it."""
    number, partials = check(path, saved) if path.exists() else (-1, 0)
    tally.update({"kills": 1, "old": number == saved, "new": number != saved, "partials": partials > 0})
    return number


if __name__ == "__main__":
    gc.freeze()  # forks share what is there for longer
    mode, where, *rest = sys.argv[1:]
    if mode == "stops":
        stops(Path(where), int(rest[0]), rest[1] == "True")
    elif mode == "operations":
        print(json.dumps(at_operations(Path(where))))
    elif mode == "renames":
        with no_exchange():
            print(json.dumps(at_operations(Path(where), "exchange")))
    else:
        print(json.dumps(at_moments(Path(where), *map(int, rest))))
