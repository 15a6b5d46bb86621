"""``tiering doctor``: each check on machines with and without problems, and the report."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest

from tests.fakes.machines import CGROUP, LIMITS, MEMINFO, NODE, STATUS, V1, Files, machine
from tiering.cli import main
from tiering.commands.doctor import examine
from tiering.doctor import cpus, engines, limits, memory, software, status, swap_directory
from tiering.doctor.doctor_report import RULE, DoctorReport, discreet
from tiering.doctor.finding import CheckResult, Finding, Verdict, note, perform, problem
from tiering.host.numa import Node
from tiering.host.topology import Machine
from tiering.telemetry import Snapshot, StatusWriter, status_file_opening

OK, NOTE, PROBLEM = Verdict.OK, Verdict.NOTE, Verdict.PROBLEM
GIB = 1 << 30


UNLIMITED = LIMITS.replace("8388608  ", "unlimited")
PRIVILEGED = STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t0000000000004000")
AIO = "proc/sys/fs/aio-max-nr", "proc/sys/fs/aio-nr"
THP = "sys/kernel/mm/transparent_hugepage/enabled"
NVIDIA = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue",
    "proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t NVIDIA H200\nGPU UUID: \t GPU-8a7c",
}


@pytest.mark.parametrize(
    ("check", "files", "verdict", "text", "remedy"),
    [
        (limits.memlock, {}, NOTE, "8.00 MiB", "memlock=-1"),
        (limits.memlock, {"proc/self/limits": UNLIMITED}, OK, "unlimited", ""),
        (
            limits.memlock,
            {"proc/self/limits": LIMITS.replace("8388608", str(64 * GIB))},
            OK,
            "covers all memory",
            "",
        ),
        (limits.memlock, {"proc/self/status": PRIVILEGED}, OK, "CAP_IPC_LOCK", ""),
        (
            limits.memlock,  # a capability inside a user namespace does not count
            {"proc/self/status": PRIVILEGED, "proc/self/uid_map": "0 1000 1"},
            NOTE,
            "8.00 MiB",
            "ulimit -l",
        ),
        (limits.open_files, {}, OK, "1024", ""),
        (limits.open_files, {"proc/self/limits": LIMITS.replace("1024", "256 ")}, NOTE, "256", "ulimit -n"),
        (limits.file_size, {}, OK, "unlimited", ""),
        (
            limits.file_size,
            {"proc/self/limits": LIMITS.replace("size             unlimited", "size             1048576  ")},
            PROBLEM,
            "1.00 MiB",
            "ulimit -f unlimited",
        ),
        (limits.address_space, {}, OK, "unlimited", ""),
        (
            limits.address_space,
            {"proc/self/limits": LIMITS.replace("space         unlimited", "space         1048576  ")},
            PROBLEM,
            "1.00 MiB",
            "ulimit -v unlimited",
        ),
        (
            limits.aio_contexts,
            {AIO[0]: "65536", AIO[1]: "65000"},
            NOTE,
            "65000 of 65536",
            "fs.aio-max-nr=1048576",
        ),
        (limits.aio_contexts, {AIO[0]: "65536", AIO[1]: "0"}, OK, "0 of 65536", ""),
        (limits.aio_contexts, {}, OK, "unknown", ""),
        (memory.memory, {}, OK, "64.00 GiB, 48.00 GiB", ""),
        (
            memory.memory,
            {"proc/meminfo": MEMINFO.replace(str(48 << 20), "1024")},
            NOTE,
            "1.00 MiB",
            "host_budget",
        ),
        (memory.cgroup_memory, {f"{CGROUP}/memory.max": "max"}, OK, "no limit", ""),
        (
            memory.cgroup_memory,  # the tightest of all levels counts
            {
                "proc/self/cgroup": "0::/a/b",
                f"{CGROUP}/a/b/memory.max": str(16 * GIB),
                f"{CGROUP}/a/memory.max": str(8 * GIB),
                f"{CGROUP}/memory.max": str(32 * GIB),
            },
            OK,
            "at most 8.00 GiB",
            "",
        ),
        (
            memory.cgroup_memory,
            {"proc/self/cgroup": V1, f"{CGROUP}/memory/job/memory.limit_in_bytes": str(GIB)},
            OK,
            "at most 1.00 GiB",
            "",
        ),
        (
            memory.cgroup_memory,
            {f"{CGROUP}/memory.high": str(10 * GIB), f"{CGROUP}/memory.max": str(20 * GIB)},
            NOTE,
            "slowed down beyond 10.00 GiB",
            "below 8.00 GiB",
        ),
        (memory.huge_pages, {THP: "always [madvise] never"}, OK, "madvise", ""),
        (memory.huge_pages, {THP: "always madvise [never]"}, NOTE, "never", f"sudo tee /{THP}"),
        (memory.huge_pages, {}, NOTE, "not supported by this kernel", "TRANSPARENT_HUGEPAGE"),
        (memory.reserved_huge_pages, {}, OK, "none", ""),
        (
            memory.reserved_huge_pages,
            {"proc/meminfo": f"{MEMINFO}\nHugetlb: {32 << 20} kB"},
            NOTE,
            "32.00 GiB",
            "nr_hugepages=0",
        ),
        (memory.swap, {}, OK, "none", ""),
        (
            memory.swap,
            {"proc/meminfo": f"{MEMINFO}\nSwapTotal: {8 << 20} kB\nSwapFree: {2 << 20} kB"},
            NOTE,
            "6.00 GiB of 8.00 GiB",
            "swapoff -a",
        ),
        (memory.overcommit, {"proc/sys/vm/overcommit_memory": "1"}, OK, "mode 1", ""),
        (
            memory.overcommit,
            {
                "proc/sys/vm/overcommit_memory": "2",
                "proc/meminfo": f"{MEMINFO}\nCommitLimit: {4 << 20} kB\nCommitted_AS: {3 << 20} kB",
            },
            NOTE,
            "1.00 GiB are left",
            "overcommit_memory=0",
        ),
        (memory.numa_nodes, {}, OK, "1 node", ""),
        (
            memory.numa_nodes,
            {f"{NODE}{n}/meminfo": f"Node {n} MemTotal: {32 << 20} kB" for n in range(2)},
            OK,
            "node0 32.00 GiB, node1 32.00 GiB",
            "",
        ),
        (
            memory.numa_nodes,
            {f"{NODE}{n}/meminfo": f"Node {n} MemTotal: {n << 20} kB" for n in range(2)},
            NOTE,
            "node0 without memory",
            "modules",
        ),
        (cpus.affinity, {"sys/devices/system/cpu/online": "0-15"}, OK, "8 of 16 CPUs (0-7)", ""),
        (
            cpus.affinity,
            {"sys/devices/system/cpu/online": "0-15", "proc/self/status": STATUS.replace("0-7", "3")},
            NOTE,
            "1 of 16 CPUs (3)",
            "taskset",
        ),
        (cpus.quota, {f"{CGROUP}/cpu.max": "max 100000"}, OK, "none", ""),
        (
            cpus.quota,
            {"proc/self/cgroup": "0::/a", f"{CGROUP}/a/cpu.max": "6 2", f"{CGROUP}/cpu.max": "4 1"},
            NOTE,
            "3 CPUs",
            "taskset -c 0-2 ",
        ),
        (cpus.quota, {f"{CGROUP}/cpu.max": "800000 100000"}, OK, "8 CPUs", ""),
        (
            cpus.quota,
            {f"{CGROUP}/cpu.max": "250000 100000"},
            NOTE,
            "2.5 CPUs, on 8 CPUs: the optimizer has 2 threads",
            "taskset -c 0-1 ",
        ),
        (
            cpus.quota,
            {
                "proc/self/cgroup": V1,
                f"{CGROUP}/cpu/job/cpu.cfs_quota_us": "100000",
                f"{CGROUP}/cpu/job/cpu.cfs_period_us": "100000",
                f"{CGROUP}/cpu/cpu.cfs_quota_us": "-1",
                f"{CGROUP}/cpu/cpu.cfs_period_us": "100000",
            },
            NOTE,
            "the time of 1 CPU, on 8 CPUs: the optimizer has 1 thread, but",
            "--cpus",
        ),
        (
            software.system,
            {"proc/sys/kernel/osrelease": "6.8.0-51-generic"},
            OK,
            "Linux 6.8.0-51-generic",
            "",
        ),
        (
            software.system,
            {"proc/sys/kernel/osrelease": "5.4.0"},
            NOTE,
            "io_uring needs 5.11",
            "newer kernel",
        ),
        (software.gpu, {}, OK, "no NVIDIA driver", ""),
        (software.gpu, NVIDIA, NOTE, "driver 570.86.15, 1 GPU, NVIDIA H200", "--gpus all"),
        (software.gpu, NVIDIA | {"dev/nvidia0": ""}, OK, "driver 570.86.15, 1 GPU, NVIDIA H200", ""),
    ],
)
def test_the_machine(
    tmp_path: Path, check: Callable[[Path], Finding], files: Files, verdict: Verdict, text: str, remedy: str
) -> None:
    finding = check(machine(tmp_path, files))
    assert finding.verdict is verdict, finding
    assert text in finding.found
    assert remedy in finding.remedy
    assert bool(finding.remedy) is (verdict is not OK)


def test_the_nodes_of_an_arenas_pages(tmp_path: Path) -> None:
    cpulists = {f"{NODE}0/cpulist": "0-3", f"{NODE}1/cpulist": "4-7"}
    root = machine(tmp_path, cpulists)

    def placed(nodes: Sequence[Node], on: dict[int, int], refusal: int = 0) -> memory.Placed:
        assert nodes == (Node(0, (0, 1, 2, 3)), Node(1, (4, 5, 6, 7)))
        return memory.Placed(Counter(on), refusal)

    def finding(on: dict[int, int], refusal: int = 0) -> Finding:
        return memory.arena_pages(root, lambda nodes: placed(nodes, on, refusal))

    assert finding({0: 45, 1: 55}) == Finding("pages on NUMA node 0: 45 %, node 1: 55 %")
    denied = finding({0: 50, 1: 50}, errno.EPERM)
    assert (
        denied.verdict is NOTE and "mbind is denied (EPERM)" in denied.found and "SYS_NICE" in denied.remedy
    )
    full = finding({0: 61, 1: 39})
    assert full.verdict is NOTE and "the memory of a node is full" in full.found and "numastat" in full.remedy
    assert finding({}) == Finding("pages on unknown NUMA nodes")


def test_the_nodes_of_an_arenas_pages_are_asked_of_this_kernel() -> None:
    node = Machine.read().node(min(os.sched_getaffinity(0)))
    placed = memory.place_on([Node(node, tuple(os.sched_getaffinity(0)))], 4 << 20)
    assert set(placed.on) <= {node} and sum(placed.on.values()) in (0, 1024)
    assert memory.arena_pages(Path("/")).found.startswith(("on the only NUMA node", "pages on "))


def test_shared_memory() -> None:
    assert memory.judge_shared_memory(64 << 20, 64 << 20).verdict is NOTE
    assert "--shm-size" in memory.judge_shared_memory(64 << 20, 64 << 20).remedy
    assert memory.judge_shared_memory(8 * GIB, 4 * GIB) == Finding("8.00 GiB, 4.00 GiB free")


def test_the_directory_of_status_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, temporary = tmp_path / "run", tmp_path / "tmp"
    temporary.mkdir()
    # Runs of this user that train beside this test publish elsewhere.
    monkeypatch.setattr(status_file_opening, "_temporary_directories", lambda: [temporary])
    monkeypatch.setenv("TIERING_RUN_DIR", str(directory))
    assert status.published(tmp_path) == Finding(f"{directory}, 0 runs there")
    with (
        closing(StatusWriter("gpt", directory=directory)) as here,
        closing(StatusWriter("gpt", directory=temporary / f"tiering-{os.geteuid()}")) as elsewhere,
    ):
        here.publish(Snapshot("gpt", 0, 1, 1, 1.0, run_id="gpt-1"))
        finding = status.published(tmp_path)
        assert finding.verdict is NOTE and finding.remedy.startswith(f"tierd --dir {elsewhere.path.parent};")
        assert finding.found.startswith(
            f"{directory}, 1 run there; runs also publish in {elsewhere.path.parent},"
        )
    assert status.published(tmp_path) == Finding(f"{directory}, 0 runs there"), (
        "a run that ended is not there"
    )
    directory.chmod(0o755)
    open_to_others = status.published(tmp_path)
    assert open_to_others.verdict is NOTE and "is open to others (mode 0755)" in open_to_others.found
    assert "chmod" not in open_to_others.remedy
    monkeypatch.setenv("TIERING_RUN_DIR", str(tmp_path / "missing" / "run"))
    assert "missing is missing or closed" in status.published(tmp_path).found


def test_kernels_and_packages(tmp_path: Path) -> None:
    assert cpus.instruction_set(tmp_path, lambda: "avx512") == Finding("avx512")
    assert cpus.instruction_set(tmp_path, lambda: "portable").verdict is NOTE

    def unknown() -> str:
        raise ValueError("TIERING_ISA is 'avx9': this CPU offers avx2, portable")

    assert cpus.instruction_set(tmp_path, unknown) == problem(
        "TIERING_ISA is 'avx9': this CPU offers avx2, portable", "unset TIERING_ISA"
    )

    def version(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    assert software.packages(tmp_path, version).verdict is PROBLEM
    assert "torch 2.7" in software.packages(tmp_path, lambda name: "2.7").found


@pytest.mark.parametrize(
    ("name", "files", "remedy"),
    [
        (
            "io_uring",
            {"proc/sys/kernel/io_uring_disabled": "2", "proc/sys/kernel/io_uring_group": "994"},
            "sudo sysctl -w kernel.io_uring_disabled=0",
        ),
        (
            "io_uring",
            {"proc/sys/kernel/io_uring_disabled": "1", "proc/sys/kernel/io_uring_group": "994"},
            "add this user to the group 994",
        ),
        (
            "io_uring",
            {"proc/self/status": STATUS.replace("Seccomp:\t0", "Seccomp:\t2")},
            "start the container with",
        ),
        ("io_uring", {}, "Linux 5.11"),
        (
            "libaio",
            {"proc/self/status": STATUS.replace("Seccomp:\t0", "Seccomp:\t2")},
            "start the container with",
        ),
        ("libaio", {}, "sudo sysctl -w fs.aio-max-nr"),
    ],
)
def test_an_engine_that_may_not_start(tmp_path: Path, name: str, files: Files, remedy: str) -> None:
    finding = engines.engine(name, machine(tmp_path, files), ask=lambda engine: f"{engine}: EPERM")
    assert finding.verdict is NOTE
    assert finding.found == f"{name}: EPERM; the next engine is used instead"
    assert finding.remedy.startswith(remedy)
    assert engines.engine(name, tmp_path, ask=lambda _: None) == Finding("starts")


def test_without_threads_nothing_starts(tmp_path: Path, engine: str) -> None:
    assert engines.refusal(engine) is None  # the fixture has the engines that start here
    assert engines.engine("threads", tmp_path, ask=lambda _: "EAGAIN").verdict is PROBLEM


def test_a_check_that_fails_or_hangs_is_reported() -> None:
    hung = threading.Event()

    def broken() -> Finding:
        raise PermissionError("no")

    def hanging() -> Finding:
        hung.wait()
        return Finding("late")

    checks = {"well": lambda: Finding("fine"), "broken": broken, "hanging": hanging, "last": broken}
    first, second, third = perform(checks, "/mnt", seconds=0.2)
    hung.set()
    assert first == CheckResult("well", "/mnt", Finding("fine"))
    assert (second.check, second.finding.found) == ("broken", "check failed: PermissionError: no")
    assert (third.check, third.finding.verdict) == ("hanging", PROBLEM)
    assert "skipped 1 more check" in third.finding.found


def test_the_report_has_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr("getpass.getuser", lambda: "ada")
    entries = [
        CheckResult("directory", "/home/ada/swap", problem("does not exist", "mkdir -p /home/ada/swap")),
        CheckResult(
            "directory", "/scratch/ada/swap", problem("does not exist", "mkdir -p /scratch/ada/swap")
        ),
        CheckResult("packages", None, Finding("check failed: /home/ada/.venv/x")),
    ]
    entries = discreet(entries)
    assert [entry.directory for entry in entries] == ["~/swap", "/scratch/.../swap", None]
    assert [entry.finding.remedy for entry in entries] == [
        "mkdir -p ~/swap",
        "mkdir -p /scratch/.../swap",
        "",
    ]
    assert "ada" not in DoctorReport(entries).block()


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.commands.doctor.examine", lambda _: signal.raise_signal(signal.SIGINT))
    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "tiering: interrupted\n")


def test_names_move_no_cursor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", f"{tmp_path}/a\x1b[2J\nb"]) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "/a\\x1b[2J\\nb\n" in out


def test_problems_come_first() -> None:
    entries = [
        CheckResult("one", None, note("a", "b")),
        CheckResult("two", None, Finding("c")),
        CheckResult("three", None, problem("d", "e")),
    ]
    report = DoctorReport(entries)
    assert [entry.check for entry in report.attention] == ["three", "one"]
    assert (report.problems, report.counts()) == (1, "1 problem, 1 note")


def test_every_check_looks_at_nothing_without_harm(tmp_path: Path) -> None:
    """On a machine without information, no check fails, and none reports a missing feature."""
    entries = examine([tmp_path], root=tmp_path / "nothing")
    assert [entry for entry in entries if "check failed" in entry.finding.found] == []
    assert {entry.directory for entry in entries} == {None, str(tmp_path)}


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code = main(["doctor", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["schema_version"], report["exit_code"]) == (1, code)
    assert code == any(check["verdict"] == "problem" for check in report["checks"])
    assert {"memlock", "engine threads", "swap file", "space"} <= {
        check["check"] for check in report["checks"]
    }
    assert all(check["verdict"] in ("ok", "note", "problem") for check in report["checks"])

    assert main(["doctor", str(tmp_path / "none")]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 + len(str(tmp_path))
    above, block, below = out.split(f"{RULE}\n")
    assert "does not exist" in above
    assert "mkdir -p" in above
    assert re.search(r"^\d+ problems?", above, re.MULTILINE)
    assert "problem directory: does not exist" in block
    assert "mkdir" not in block
    assert below == ""


def test_the_page_has_every_check() -> None:
    """Each check has a row in a table and a line in the sample, in the order of execution."""
    page = (Path(__file__).parents[3] / "docs/tools/doctor.md").read_text(encoding="utf-8")
    machine, directory_part = (part.split("## ")[0] for part in page.split("## ")[1:])
    groups = (software.CHECKS, cpus.CHECKS, memory.CHECKS, limits.CHECKS, engines.CHECKS, status.CHECKS)
    names = [name for group in groups for name in group] + ["files without a name"]
    tables = []
    for text in (machine, directory_part):
        cells = re.findall(r"^\| ([^|]+) \| [^|]+ \| (?:[^|\\]|\\\|)+ \|$", text, re.MULTILINE)
        tables.append([name for cell in cells[1:] for name in cell.split(", ")])
    assert tables == [names, list(swap_directory.checks(Path()))]
    sample = re.findall(r"^  (?:ok|note|problem) +([^:]+): ", page, re.MULTILINE)
    assert sample == [name for table in tables for name in table]


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = "import sys; from tiering.cli import main; main(['doctor', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True).returncode == 0
