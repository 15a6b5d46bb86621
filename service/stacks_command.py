"""``tierd stacks RUN``: prints the Python stacks of the ranks of a run."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from service.formatting import joined, plain
from tiering.telemetry import (
    Snapshot,
    StatusFile,
    TelemetryError,
    find_status_files,
    request_stacks,
    run_directories_of_all_users,
    withdraw_request,
)

WAIT_SECONDS = 5.0  # ranks answer four times a second; a busy machine delays them


def main(run: str, directory: Path, *, all_users: bool = False) -> int:
    """Print the stacks of the ranks of ``run`` in ``directory``, or of those of all users. Returns the exit status.

    It is 0, 1 if a rank has not answered, 2 if no rank publishes for a run of this id or name, or the request cannot be
    written.
    """
    ranks, present = _live_ranks(run, directory)
    theirs: dict[Path, int] = {}
    if all_users:
        for other, owner in run_directories_of_all_users():
            # A directory that cannot be read must not hide those of other users.
            with suppress(TelemetryError):
                found, there = _live_ranks(run, other, owner)
                present |= there
                if found and other != directory.resolve():
                    theirs[other] = owner
    if not ranks and not theirs:
        names = ", ".join(map(plain, sorted(present))) or "none"
        place = "for any user" if all_users else f"in {directory}"
        print(f"tierd: no rank of a run {run!r} publishes {place}; runs there: {names}", file=sys.stderr)
        return 2
    statuses = [_as_user(owner, run, other) for other, owner in theirs.items()]
    return max([*statuses, _print_stacks(ranks, directory)] if ranks else statuses)


def _live_ranks(
    run: str, directory: Path, owner: int | None = None
) -> tuple[dict[StatusFile, Snapshot], set[str]]:
    """The live ranks of ``run`` in the directory, and the ids of all runs there."""
    ranks, present = {}, set()
    for file in find_status_files(directory, owner):
        reading = file.read()
        if reading.state == "live" and (snapshot := reading.snapshot) is not None:
            present.add(snapshot.run_id)
            if run in (snapshot.run_id, snapshot.run_name):
                ranks[file] = snapshot
    return ranks, present


def _as_user(owner: int, run: str, directory: Path) -> int:
    """``main()`` in a child process with the rights of the owner of ``directory``: it writes the requests there.

    Root could be led to another file by a link that the owner creates at that moment.
    """
    sys.stdout.flush()
    group = directory.stat().st_gid
    child = os.fork()
    if child == 0:
        status = 2
        try:
            os.setgroups([])
            os.setresgid(group, group, group)
            os.setresuid(owner, owner, owner)
            status = main(run, directory)
            sys.stdout.flush()
        except (OSError, TelemetryError) as error:
            print(f"tierd: the stacks of user {owner} cannot be requested: {error}", file=sys.stderr)
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended) if os.WIFEXITED(ended) else 2


def _print_stacks(ranks: dict[StatusFile, Snapshot], directory: Path) -> int:
    try:
        with _locked(directory):
            answers = _answers(ranks)
    except OSError as error:
        print(f"tierd: the stacks cannot be requested: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    by_text: dict[str, list[str]] = {}
    for file, snapshot in sorted(ranks.items(), key=lambda item: (item[1].run_id, item[1].rank)):
        if file in answers:
            by_text.setdefault(answers[file], []).append(_name(snapshot, ranks))
    for text, names in by_text.items():
        print(f"{joined(names)}\n{plain_lines(text)}")
    for file, snapshot in ranks.items():
        if file not in answers:
            print(
                f"tierd: {_name(snapshot, ranks)} has not answered for {WAIT_SECONDS:g} s: tiering.telemetry.stacks is"
                f" false, or native code blocks its interpreter; `py-spy dump --pid {snapshot.pid}` reads its stacks",
                file=sys.stderr,
            )
    return 0 if len(answers) == len(ranks) else 1


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a lock on the directory: of two who ask at once, the first would remove the answer to the second."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _answers(ranks: dict[StatusFile, Snapshot]) -> dict[StatusFile, str]:
    """The stacks of the ranks that answer in time."""
    answers: dict[StatusFile, str] = {}
    try:
        requested = {file: request_stacks(file.path) for file in ranks}
        end = time.monotonic() + WAIT_SECONDS
        while len(answers) < len(ranks) and time.monotonic() < end:
            time.sleep(0.05)
            for file, path in requested.items():
                if file not in answers and path.exists():
                    answers[file] = path.read_text(encoding="utf-8", errors="replace")
    finally:
        for file in ranks:
            withdraw_request(file.path)
    return answers


def _name(snapshot: Snapshot, ranks: dict[StatusFile, Snapshot]) -> str:
    several = len({other.run_id for other in ranks.values()}) > 1
    run = f" of run {plain(snapshot.run_id)}" if several else ""
    return f"rank {snapshot.rank}{run} (process {snapshot.pid})"


def plain_lines(text: str) -> str:
    """``text`` without control characters, except for the ends of lines."""
    return "\n".join(map(plain, text.split("\n")))
