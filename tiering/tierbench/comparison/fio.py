"""Runs fio with the load of tierbench, one process per run, and parses its report.

The options give fio the conditions of tierbench: private files that exist and are laid out, memory in huge pages, the
same data in every write, and latencies. fio never creates a file. Its jobs are threads, so none outlives it. An
interruption of tierbench first ends fio. If tierbench is killed (SIGKILL), fio runs until the end of its ``--runtime``,
on files that are freed when it ends.
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

# With it, glibc requests transparent huge pages wherever malloc maps memory, as tierbench's arena does.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_HUGE_PAGE = 2 << 20
_POLL_SECONDS = 0.1  # interval of checks for an interruption


class FioError(TieringError):
    """fio refused the job, or reported an error."""

    code = "TIER-FIO"


class FioMissingError(FioError):
    """fio is not installed, or does not start."""


@dataclass(frozen=True, slots=True)
class FioJob:
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
class RunReading:
    """One run of one side: its bytes, the seconds from the first submission to the last completion, and the CPU
    seconds (user and system) in this time.

    ``whole_cpu_seconds`` covers the whole process, start and end included, if the process was started for this run.
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
    """The version of fio, such as "fio-3.36". Raises FioMissingError if fio is missing or does not start."""
    if shutil.which("fio") is None:
        raise FioMissingError(MISSING)
    try:
        process = subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.stderr.strip() or str(error)
        raise FioMissingError(f"fio is installed, but does not start: {reason}; reinstall it") from None
    return process.stdout.strip()


def command(
    job: FioJob,
    engine: str,
    flags: tuple[str, ...],
    seconds: float,
    *,
    lean: bool = False,
    write_limit: int | None = None,
) -> list[str]:
    """The fio command for ``job``, with the equivalents of tierbench's ``engine`` and ``flags``.

    ``lean`` omits the clock readings that fio's latencies need. fio never writes more than ``write_limit`` bytes: the
    command limits its rate accordingly, which costs nothing while the actual rate is far below.
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
        # Each thread has its own part of the file: 16 streams over the same bytes would share caches.
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
    if write_limit is not None and writes(job.rw):
        arguments["rate"] = f",{max(1, int(write_limit / seconds / threads))}"
    files = [
        argument
        for path in job.paths
        for argument in ("--name=peer", "--filename={}".format(path.replace(":", r"\:")))
    ]
    return ["fio", "--name=global", *(f"--{name}={value}" for name, value in arguments.items()), *files]


def run(
    job: FioJob,
    engine: str,
    flags: tuple[str, ...],
    seconds: float,
    *,
    lean: bool = False,
    write_limit: int | None = None,
) -> RunReading:
    """Run fio once. Raises FioError with fio's messages if it fails. An interruption first ends fio."""
    output, cpu = _execute(command(job, engine, flags, seconds, lean=lean, write_limit=write_limit))
    return dataclasses.replace(parse(output), whole_cpu_seconds=cpu)


def idle_cpu(job: FioJob, engine: str, flags: tuple[str, ...], seconds: float, runs: int) -> float:
    """CPU seconds of fio without I/O: the median of ``runs`` runs at one block per second."""
    idle = command(job, engine, flags, seconds)
    idle.insert(idle.index("--name=peer"), "--rate_iops=1")
    return statistics.median(_execute(idle)[1] for _ in range(runs))


def parse(output: str) -> RunReading:
    """The figures of the one group of jobs in fio's JSON report.

    The group sums all jobs and has both directions; its time is that of its slowest job. ``usr_cpu`` and ``sys_cpu``
    are percentages of ``job_runtime``, the sum of the milliseconds of all jobs, between the first submission and the
    last completion. Raises FioError for a failed job.
    """
    start = output.find("{")  # fio prints notes and warnings before it
    if start < 0:
        raise FioError(f"fio's output is not valid JSON: {output.strip()[:200]!r}")
    report = json.loads(output[start:])
    jobs: list[dict[str, Any]] = report["jobs"]
    if len(jobs) != 1:
        raise FioError(f"fio reported {len(jobs)} groups instead of one")
    job = jobs[0]
    if job["error"]:
        raise FioError(f"fio's job failed: {os.strerror(job['error'])}")
    used = [job[direction] for direction in ("read", "write") if job[direction]["io_bytes"]]
    if not used:
        raise FioError("fio transferred no bytes")
    return RunReading(
        read_bytes=job["read"]["io_bytes"],
        written_bytes=job["write"]["io_bytes"],
        seconds=max(side["runtime"] for side in used) / 1000,
        cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
    )


def _execute(arguments: list[str]) -> tuple[str, float]:
    """fio's output and the CPU seconds of its process, start and end included."""
    before = _children_cpu()
    with Interrupts() as interrupts:
        if interrupts.received:
            raise KeyboardInterrupt
        process = subprocess.Popen(
            arguments,
            env={**os.environ, **_HUGE_PAGES},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C must not reach fio, which would report half a run
        )
        output, errors = _communicate(process, interrupts)
        if interrupts.received:
            raise KeyboardInterrupt
    if process.returncode:
        report = "\n".join(text.strip() for text in (errors, output.partition("{")[0]) if text.strip())
        raise FioError(
            f"fio failed with status {process.returncode}: {report or 'no message'};"
            f" command: {' '.join(arguments)}"
        )
    return output, _children_cpu() - before


def _communicate(process: subprocess.Popen[str], interrupts: Interrupts) -> tuple[str, str]:
    """Wait for fio and return its stdout and stderr; an interruption kills it."""
    try:
        while not interrupts.received:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=_POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
    return process.communicate()


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)  # only of children that were waited for
    return usage.ru_utime + usage.ru_stime
