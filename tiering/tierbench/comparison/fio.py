"""fio, the usual judge of drives: its command for a load of ours, started anew for each run, and its own account of it.

What is asked for here is what our side does: private files that are there and laid out, memory in huge pages, the same
data in every write, latencies kept. fio never makes a file, and its jobs are threads: none outlives it.
What interrupts us ends it first. Where we are killed (SIGKILL) it goes on until its ``--runtime`` is over, on files
that are gone with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from typing import Any

from tiering.errors import TieringError
from tiering.tierbench.interrupts import Interrupts
from tiering.tierbench.words import ReadWrite, reads, writes

MISSING = "fio is not installed: `apt-get install fio`, `dnf install fio` or https://github.com/axboe/fio"

# glibc then asks for transparent huge pages wherever malloc maps memory, as our arena does for its own.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_HUGE_PAGE = 2 << 20
_HEARD = 0.1  # seconds until an interruption is heard


class FioError(TieringError):
    """fio refused the job, or reported an error."""

    code = "TIER-FIO"


class FioMissingError(FioError):
    """There is no fio that starts."""


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks of ``bs`` bytes, ``iodepth`` of them in flight per file, over the first ``size`` bytes of each.

    ``rwmixread`` percent of the blocks of a mixed job are reads.
    """

    paths: tuple[str, ...]
    size: int
    rw: ReadWrite
    bs: int
    iodepth: int
    direct: bool = True
    rwmixread: int = 50


@dataclass(frozen=True, slots=True)
class Reading:
    """One run of one side: bytes moved, the seconds from the first submission to the last completion, and the
    CPU seconds (user and system) spent meanwhile.

    ``whole_cpu_seconds`` is of the whole process where it was started for this run, start and end included.
    """

    read_bytes: int
    written_bytes: int
    seconds: float
    cpu_seconds: float
    whole_cpu_seconds: float | None = None

    @property
    def nbytes(self) -> int:
        return self.read_bytes + self.written_bytes

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.seconds

    @property
    def cpu_per_gb(self) -> float:
        """CPU seconds per 10^9 bytes."""
        return self.cpu_seconds / (self.nbytes / 1e9)


def version() -> str:
    """Such as "fio-3.36". Raises FioMissingError when there is none that starts."""
    if shutil.which("fio") is None:
        raise FioMissingError(MISSING)
    try:
        told = subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.strerror if isinstance(error, OSError) else error.stderr.strip() or str(error)
        raise FioMissingError(f"fio is installed, but does not start: {why}; install it anew") from None
    return told.stdout.strip()


def command(
    job: Job,
    engine: str,
    flags: tuple[str, ...],
    seconds: float,
    *,
    lean: bool = False,
    most_written: int | None = None,
) -> list[str]:
    """The command for ``job``; ``engine`` and ``flags`` are ours, which fio is given the like of.

    ``lean`` leaves out the clock readings that fio's latencies need. ``most_written`` bytes are never passed: fio is
    held to the rate that comes to them, which costs nothing while it is far below.
    """
    arguments: dict[str, int | str] = {
        "rw": job.rw,
        "bs": job.bs,
        "direct": int(job.direct),
        "time_based": 1,
        "runtime": f"{round(seconds * 1000)}ms",
        "thread": 1,
        "group_reporting": 1,
        "scramble_buffers": 0,
        "invalidate": 0,
        "fadvise_hint": 0,
        "fallocate": "none",
        "allow_file_create": 0,
        "randrepeat": 0,
        "norandommap": 1,
        "iomem_align": _HUGE_PAGE,
        "output-format": "json",
    }
    if reads(job.rw) and writes(job.rw):
        arguments["rwmixread"] = job.rwmixread
    threads = len(job.paths)
    if engine == "threads":
        # Each thread has a part of the file to itself: 16 streams over the same bytes would meet in caches.
        share = job.size // job.iodepth // job.bs * job.bs
        arguments |= {"ioengine": "psync", "numjobs": job.iodepth, "size": share, "offset_increment": share}
        threads *= job.iodepth
    else:
        arguments |= {"ioengine": engine, "iodepth": job.iodepth, "size": job.size}
    if engine == "io_uring":
        arguments["fixedbufs"] = int("registered_buffers" in flags)
        arguments["registerfiles"] = int("registered_files" in flags)
    if lean:
        arguments["gtod_reduce"] = 1
    if most_written is not None and writes(job.rw):
        arguments["rate"] = f",{max(1, int(most_written / seconds / threads))}"
    files = [
        word
        for path in job.paths
        for word in ("--name=peer", "--filename={}".format(path.replace(":", r"\:")))
    ]
    return ["fio", "--name=global", *(f"--{name}={value}" for name, value in arguments.items()), *files]


def run(
    job: Job,
    engine: str,
    flags: tuple[str, ...],
    seconds: float,
    *,
    lean: bool = False,
    most_written: int | None = None,
) -> Reading:
    """Run fio once. Raises FioError with what it said when it failed; when interrupted, it is ended first."""
    output, cpu = _execute(command(job, engine, flags, seconds, lean=lean, most_written=most_written))
    return dataclasses.replace(parse(output), whole_cpu_seconds=cpu)


def idle_cpu(job: Job, engine: str, flags: tuple[str, ...], seconds: float, runs: int) -> float:
    """CPU seconds of a fio that does everything but the I/O: median of ``runs`` at one block per second."""
    idle = command(job, engine, flags, seconds)
    idle.insert(idle.index("--name=peer"), "--rate_iops=1")
    return statistics.median(_execute(idle)[1] for _ in range(runs))


def parse(output: str) -> Reading:
    """What fio's JSON says of its one group of jobs.

    fio counts both directions and every job together here; the group's time is that of its slowest job.
    ``usr_cpu`` and ``sys_cpu`` are percent of ``job_runtime``, the milliseconds of all jobs added up, and are
    taken between the first submission and the last completion. Raises FioError for a job that failed.
    """
    start = output.find("{")  # notes and warnings come before it
    if start < 0:
        raise FioError(f"fio printed no JSON: {output.strip()[:200]!r}")
    report = json.loads(output[start:])
    jobs: list[dict[str, Any]] = report["jobs"]
    if len(jobs) != 1:
        raise FioError(f"fio reported {len(jobs)} groups instead of one")
    job = jobs[0]
    if job["error"]:
        raise FioError(f"fio's job failed: {os.strerror(job['error'])}")
    used = [job[direction] for direction in ("read", "write") if job[direction]["io_bytes"]]
    if not used:
        raise FioError("fio moved no byte")
    return Reading(
        read_bytes=job["read"]["io_bytes"],
        written_bytes=job["write"]["io_bytes"],
        seconds=max(side["runtime"] for side in used) / 1000,
        cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
    )


def _execute(arguments: list[str]) -> tuple[str, float]:
    """fio's output and the CPU seconds of its process, start and end included."""
    before = _children_cpu()
    with Interrupts() as interrupts:
        if interrupts.came:
            raise KeyboardInterrupt
        process = subprocess.Popen(
            arguments,
            env={**os.environ, **_HUGE_PAGES},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is ours to hear: fio would answer it with a report of half a run
        )
        output, errors = _communicate(process, interrupts)
        if interrupts.came:
            raise KeyboardInterrupt
    if process.returncode:
        said = "\n".join(text.strip() for text in (errors, output.partition("{")[0]) if text.strip())
        raise FioError(
            f"fio failed with status {process.returncode}: {said or 'it said nothing'};"
            f" its command was: {' '.join(arguments)}"
        )
    return output, _children_cpu() - before


def _communicate(process: subprocess.Popen[str], interrupts: Interrupts) -> tuple[str, str]:
    """What it says until it ends; an interruption kills it."""
    try:
        while not interrupts.came:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=_HEARD)
    finally:
        if process.poll() is None:
            process.kill()
    return process.communicate()


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)  # of children that have been waited for
    return usage.ru_utime + usage.ru_stime
