"""The other side: fio, started anew for each run, and its own account of what it did."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import statistics
import subprocess
from typing import Any

from .load import Load, Reading

MISSING = "fio is not installed: `apt-get install fio`, `dnf install fio` or https://github.com/axboe/fio"

_RW = {
    ("read", "sequential"): "read",
    ("write", "sequential"): "write",
    ("mixed", "sequential"): "rw",
    ("read", "random"): "randread",
    ("write", "random"): "randwrite",
    ("mixed", "random"): "randrw",
}

# glibc then asks for transparent huge pages wherever malloc maps memory, as our arena does for its own.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_HUGE_PAGE = 2 << 20


class FioError(RuntimeError):
    """fio is missing, refused the job, or reported an error."""


def version() -> str:
    """Such as "fio-3.36". Raises FioError when there is none."""
    if shutil.which("fio") is None:
        raise FioError(MISSING)
    return subprocess.run(["fio", "--version"], check=True, capture_output=True, text=True).stdout.strip()


def command(
    load: Load, engine: str, flags: tuple[str, ...], seconds: float, *, lean: bool = False
) -> list[str]:
    """The command for ``load``; ``engine`` and ``flags`` are ours, which fio is given the like of.

    ``lean`` leaves out the clock readings that fio's latencies need.
    """
    arguments = {
        "name": "peer",
        "filename": load.path.replace(":", r"\:"),
        "rw": _RW[load.kind, load.pattern],
        "bs": load.block,
        "direct": int(load.direct),
        "time_based": 1,
        "runtime": f"{round(seconds * 1000)}ms",
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
    if load.kind == "mixed":
        arguments["rwmixread"] = load.read_percent
    if engine == "threads":
        # Each thread has a part of the file to itself: 16 streams over the same bytes would meet in caches.
        share = load.size // load.depth // load.block * load.block
        arguments |= {"ioengine": "psync", "numjobs": load.depth, "size": share, "offset_increment": share}
    else:
        arguments |= {"ioengine": engine, "iodepth": load.depth, "size": load.size}
    if engine == "io_uring":
        arguments["fixedbufs"] = int("registered_buffers" in flags)
        arguments["registerfiles"] = int("registered_files" in flags)
    if lean:
        arguments["gtod_reduce"] = 1
    return ["fio", *(f"--{name}={value}" for name, value in arguments.items())]


def run(load: Load, engine: str, flags: tuple[str, ...], seconds: float, *, lean: bool = False) -> Reading:
    """Run fio once. Raises FioError with what it said when it failed."""
    output, cpu = _execute(command(load, engine, flags, seconds, lean=lean))
    return dataclasses.replace(parse(output, load.block), whole_cpu_seconds=cpu)


def idle_cpu(load: Load, engine: str, flags: tuple[str, ...], seconds: float, runs: int) -> float:
    """CPU seconds of a fio that does everything but the I/O: median of ``runs`` at one block per second."""
    return statistics.median(
        _execute([*command(load, engine, flags, seconds), "--rate_iops=1"])[1] for _ in range(runs)
    )


def parse(output: str, block: int) -> Reading:
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
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Reading(
        nbytes=sum(side["io_bytes"] for side in used),
        seconds=max(side["runtime"] for side in used) / 1000,
        cpu_seconds=cpu,
        block=block,
    )


def _execute(arguments: list[str]) -> tuple[str, float]:
    """fio's output and the CPU seconds of its processes, start and end included."""
    before = _children_cpu()
    done = subprocess.run(
        arguments, env={**os.environ, **_HUGE_PAGES}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise FioError(
            f"fio failed with status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout, _children_cpu() - before


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)  # of children that have been waited for
    return usage.ru_utime + usage.ru_stime
