"""Threads, forks, the floating-point environment, and the choice of instruction set."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from optim_cpu import _kernels, kernels
from optim_cpu.kernels import DType

from . import reference
from .cases import functions_with
from .test_adamw import HYPER, make_state, same_bits, step

# The child runs nothing but the kernels, so what Python says about threads and fork does not apply.
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


def norm_of(x: torch.Tensor) -> float:
    return kernels.sum_of_squares(x.data_ptr(), DType.FP32, x.numel())


def threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_workers_start_at_first_use_and_only_as_many_as_needed() -> None:
    code = (
        "from optim_cpu import kernels as k; import os; n = lambda: len(os.listdir('/proc/self/task'))\n"
        "import array; a = array.array('f', [1.0]) * 10**6; p = a.buffer_info()[0]\n"
        "assert n() == 1; k.set_thread_count(5); assert n() == 1 and k.thread_count() == 5\n"
        "assert float(k.sum_of_squares(p, 0, 100)) == 100.0 and n() == 1\n"
        "assert float(k.sum_of_squares(p, 0, 1 << 15)) == 1 << 15 and n() == 1\n"
        "assert float(k.sum_of_squares(p, 0, 40000)) == 40000.0 and n() == 3\n"
        "assert float(k.sum_of_squares(p, 0, 10**6)) == 1e6 and n() == 5\n"
        "k.set_thread_count(2); assert float(k.sum_of_squares(p, 0, 10**6)) == 1e6 and n() == 5\n"
    )
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_more_threads_than_slices_on_the_stack() -> None:
    """64 slices lie there; those of more threads are allocated."""
    x = torch.randn(80 << 15)
    kernels.set_thread_count(1)
    expected = norm_of(x)
    code = (
        "from optim_cpu import kernels as k; import array, os\n"
        "a = array.array('f', [2.0]) * (80 << 15); p = a.buffer_info()[0]; k.set_thread_count(70)\n"
        "assert float(k.sum_of_squares(p, 0, len(a))) == 4.0 * len(a)\n"
        "tasks = ['/proc/self/task/' + task + '/comm' for task in os.listdir('/proc/self/task')]\n"
        "print([open(task).read() for task in tasks].count('tiering-optim\\n'))"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("69\n", "")
    kernels.set_thread_count(70)
    assert [norm_of(x) for _ in range(20)] == [expected] * 20


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("RLIMIT_AS", "int(open('/proc/self/statm').read().split()[0]) * 4096 + (1 << 20)"),
        ("RLIMIT_NPROC", "1"),
    ],
)
def test_without_new_threads_the_caller_does_it_all(limit: str, value: str) -> None:
    """No memory for a stack, no process left for the user: a run is slower, not wrong; a later one has threads."""
    code = (
        "from optim_cpu import kernels as k; import array, os, resource as r\n"
        "a = array.array('f', [2.0]) * 10**6; p = a.buffer_info()[0]; k.set_thread_count(3)\n"
        "def run(): assert float(k.sum_of_squares(p, 0, 10**6)) == 4e6; print(len(os.listdir('/proc/self/task')))\n"
        "os.getuid() or os.setuid(65534)\n"  # root may have any number of processes
        f"soft, hard = r.getrlimit(r.{limit}); r.setrlimit(r.{limit}, ({value}, hard)); run(); run()\n"
        f"r.setrlimit(r.{limit}, (soft, hard)); run()"
    )
    done = run_python(code)
    assert (done.stdout, done.stderr) == ("1\n1\n3\n", "")


def test_a_fault_in_a_worker_is_told_by_faulthandler() -> None:
    """The worker begins at the second half, which cannot be read, while the caller is busy with the first."""
    code = (
        "from optim_cpu import kernels as k; import ctypes, faulthandler, mmap\n"
        "faulthandler.enable(); k.set_thread_count(2); half = 1 << 26; m = mmap.mmap(-1, 2 * half)\n"
        "p = ctypes.addressof(ctypes.c_char.from_buffer(m)); libc = ctypes.CDLL(None)\n"
        "assert libc.mprotect(ctypes.c_void_p(p + half), ctypes.c_size_t(half), 0) == 0\n"
        "k.sum_of_squares(p, 0, half // 2)"
    )
    done = run_python(code)
    assert done.returncode == -signal.SIGSEGV
    # The rest of the text is lost if the caller faults meanwhile.
    assert done.stderr.startswith("Fatal Python error: ")


def threads_of_cpus(cpus: int) -> int:
    return min(cpus, max(1, int(kernels.cpu_quota() or cpus)))


def test_default_thread_count_is_the_affinity_mask_within_the_cpu_quota() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{cpu}])\n"
        "from optim_cpu import kernels as k; print(k.thread_count())"
    )
    assert run_python(code).stdout == "1\n"
    code = "from optim_cpu import kernels as k; print(k.thread_count())"
    assert run_python(code).stdout == f"{threads_of_cpus(len(os.sched_getaffinity(0)))}\n"


def test_a_later_change_of_the_affinity_mask_leaves_the_thread_count() -> None:
    code = (
        "import os; from optim_cpu import kernels as k; cpus, n = os.sched_getaffinity(0), k.thread_count()\n"
        "os.sched_setaffinity(0, [min(cpus)]); print(n, k.thread_count())"
    )
    n = threads_of_cpus(len(os.sched_getaffinity(0)))
    assert run_python(code).stdout == f"{n} {n}\n"


def test_the_default_thread_count_in_a_control_group() -> None:
    """In a real group where this user may create one; which files count is told by the tests of the doctor."""
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup" if version_2 else "/sys/fs/cgroup/cpu") / f"tiering-test-{os.getpid()}"
    quota = {"cpu.max": "150000 100000"} if version_2 else {"cpu.cfs_quota_us": "150000"}
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be created: {error}")
    try:
        for name, text in quota.items():
            (group / name).write_text(text)
        code = (
            f"open('{group}/cgroup.procs', 'w').write('0')\n"
            "from optim_cpu import kernels as k; print(k.cpu_quota(), k.thread_count())"
        )
        assert run_python(code).stdout == "1.5 1\n"
    except OSError as error:
        pytest.skip(f"no quota can be set: {error}")
    finally:
        group.rmdir()


def test_workers_that_leave_the_cpu_of_their_caller_may_return() -> None:
    code = (
        "import array, os, time; from optim_cpu import kernels as k; k.set_thread_count(4)\n"
        "a = array.array('f', [1.0]) * 10**7; p = a.buffer_info()[0]\n"
        "assert all(float(k.sum_of_squares(p, 0, 10**7)) == 1e7 for _ in range(60))\n"
        "workers = [int(t) for t in os.listdir('/proc/self/task') if int(t) != os.getpid()]\n"
        # A worker that was woken restores its mask when it runs, which may be later on a busy machine.
        "end = time.monotonic() + 30\n"
        "while not (same := all(os.sched_getaffinity(t) == os.sched_getaffinity(0) for t in workers)):\n"
        "    assert time.monotonic() < end; time.sleep(0.01)\n"
        "print(len(workers), same)\n"
        # A mask that somebody else has set is not undone.
        "cpus = [max(os.sched_getaffinity(0))]\n"
        "for t in workers: os.sched_setaffinity(t, cpus)\n"
        "assert all(float(k.sum_of_squares(p, 0, 10**7)) == 1e7 for _ in range(60)); time.sleep(0.01)\n"
        "print(all([*os.sched_getaffinity(t)] == cpus for t in workers))"
    )
    assert run_python(code).stdout == "3 True\nTrue\n"


@pytest.mark.parametrize("n", [0, -1, 4097, 1 << 40])
def test_a_thread_count_out_of_range_is_refused(n: int) -> None:
    before = kernels.thread_count()
    with pytest.raises(ValueError, match=f"n must be 1 to 4096, got {n}"):
        kernels.set_thread_count(n)
    assert kernels.thread_count() == before


@FORKS
def test_a_forked_child_steps_with_threads_of_its_own() -> None:
    """The parent has used its pool, and uses it again while the child works."""
    kernels.set_thread_count(3)
    x = torch.randn(1_000_003)
    expected = norm_of(x)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        before = threads_of_this_process()
        right = norm_of(x) == expected
        os.write(writing, b"%d %d %d" % (right, before, threads_of_this_process()))
        os._exit(0)
    assert norm_of(x) == expected
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"1 1 3"
    assert os.waitpid(child, 0)[1] == 0


@FORKS
def test_forking_while_other_threads_are_inside_the_pool() -> None:
    """A child must not inherit a held mutex, nor another thread's job."""
    kernels.set_thread_count(2)
    x = torch.randn(300_000)
    expected, stop = norm_of(x), threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            norm_of(x)

    busy = [threading.Thread(target=keep_busy) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(8):  # each time both threads are inside, nearly always
            child = os.fork()
            if child == 0:
                os._exit(0 if norm_of(x) == expected else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def test_several_python_threads_at_once() -> None:
    kernels.set_thread_count(3)
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(10):
            p, m, v, g = make_state(rng, 150_001)
            expected = reference.adamw(p, m, v, g, grad_scale=1.0, decoupled=True, **HYPER)
            step(p, m, v, g, DType.FP32)
            if not all(same_bits(a, b) for a, b in zip((p, m, v), expected, strict=True)):
                wrong.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_beside_threads_of_torch() -> None:
    """torch's own pool is at work in two threads while two others step; both sides get what they get alone."""
    kernels.set_thread_count(3)
    # Whole numbers, so that torch may add in any order.
    a, b = torch.randint(-8, 8, (300, 300)).float(), torch.arange(2_000_000.0, dtype=torch.float64)
    product, total = a @ a, b.sum()
    rng = np.random.default_rng(1)
    start = make_state(rng, 150_001)
    expected = reference.adamw(*start, grad_scale=1.0, decoupled=True, **HYPER)
    stop, wrong = threading.Event(), list[str]()
    torchs_steps, our_steps = [0], [0, 0]

    def use_torch() -> None:
        while not stop.is_set():
            if not torch.equal(a @ a, product) or b.sum() != total:
                wrong.append("torch")
            torchs_steps[0] += 1

    def use_kernels(i: int) -> None:
        while not stop.is_set():
            p, m, v, g = (x.copy() for x in start)
            step(p, m, v, g, DType.FP32)
            if not all(same_bits(x, y) for x, y in zip((p, m, v), expected, strict=True)):
                wrong.append("kernels")
            our_steps[i] += 1

    threads = [threading.Thread(target=use_torch) for _ in range(2)]
    threads += [threading.Thread(target=use_kernels, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    while not wrong and min(torchs_steps + our_steps) < 20:
        stop.wait(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def flushed_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormals on this CPU")
    yield
    torch.set_flush_denormal(False)


def test_flush_to_zero_neither_leaks_in_nor_is_lost(isa: str, flushed_subnormals: None) -> None:
    n = 100_000
    rng = np.random.default_rng(9)
    tiny = [(rng.integers(0, 1 << 25, n, dtype=np.uint32)).view(np.float32) for _ in range(4)]
    torch.set_flush_denormal(False)
    total = tiny[0] + tiny[3]
    expected = reference.adamw(*tiny, grad_scale=1.0, decoupled=True, **HYPER)
    squares = reference.sum_of_squares(tiny[3])
    torch.set_flush_denormal(True)
    p, m, v, g = (x.copy() for x in tiny)
    for threads in (1, 3):
        kernels.set_thread_count(threads)
        arrays = [p.copy(), m.copy(), v.copy()]
        step(*arrays, g, DType.FP32)
        assert all(same_bits(a, b) for a, b in zip(arrays, expected, strict=True))
        # A step has no subnormals, in whatever environment; these have.
        assert kernels.sum_of_squares(g.ctypes.data, DType.FP32, n) == squares
        sums = p.copy()
        kernels.accumulate(sums.ctypes.data, DType.FP32, g.ctypes.data, DType.FP32, n, overwrite=False)
        assert same_bits(sums, total)
    flushed = torch.tensor([1e-40]) * torch.tensor([1.0])
    assert flushed.view(torch.int32).item() == 0, "the caller's own mode must be back"


def test_the_instruction_sets_are_those_that_linux_says_the_cpu_has() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("no choice of instruction sets on this CPU: 64-bit Arm always has NEON")
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text().split("\nflags")[1].split("\n")[0]))
    needs = {"avx2": {"avx2", "f16c", "fma"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    needs["avx512_bf16"] = needs["avx512"] | {"avx512_bf16"}
    widest_first = [name for name in reversed(needs) if needs[name] <= flags]
    assert list(kernels.available_instruction_sets()) == [*widest_first, "portable"]


@pytest.mark.parametrize("name", ["portable", "avx2", "avx512", "avx512_bf16", "neon"])
def test_the_environment_forces_an_instruction_set(name: str) -> None:
    done = run_python("from optim_cpu import kernels as k; print(k.instruction_set())", TIERING_ISA=name)
    if name in kernels.available_instruction_sets():
        assert done.stdout == f"{name}\n"
    else:
        assert f"TIERING_ISA is '{name}': this CPU offers" in done.stderr


@pytest.mark.parametrize(
    "call",
    [
        "k.instruction_set()",
        "k.sum_of_squares(p, 0, 1)",
        "k.cast(p, 0, p + 4, 0, 1)",
        "k.StepBatch().run(1)",
    ],
)
def test_an_instruction_set_that_is_not_here_is_an_error_not_a_crash(call: str) -> None:
    code = (
        "import array; from optim_cpu import kernels as k\n"
        f"a = array.array('f', [1.0, 2.0]); p = a.buffer_info()[0]\n{call}"
    )
    done = run_python(code, TIERING_ISA="sse9")
    assert done.returncode == 1
    assert "ValueError: TIERING_ISA is 'sse9': this CPU offers" in done.stderr
    with pytest.raises(ValueError, match="name is 'sse9': this CPU offers"):
        kernels.set_instruction_set("sse9")


def test_the_binary_holds_no_fused_multiply_add_but_in_the_products_that_have_it() -> None:
    """Intrinsics too are contracted, if a flag is forgotten: read what the compiler really made."""
    if not shutil.which("objdump"):
        pytest.skip("objdump (binutils) is not installed")
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", _kernels.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"\bvsqrtps .*%ymm", listing) or os.uname().machine != "x86_64"
    assert functions_with(r"\bv?fn?m(?:add|sub|la|ls)\w*", listing) <= {"product_bf16", "transposed_bf16"}


def test_kernels_load_without_torch() -> None:
    done = run_python("import sys, optim_cpu.formats; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert done.stdout == "False False\n"
