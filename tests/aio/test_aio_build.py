"""The sources build on machines whose kernel headers are older than the kernels they will meet."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "aio_csrc"


@pytest.fixture(autouse=True)
def what_is_needed() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    if not SOURCES.exists():
        pytest.skip("the sources of the C library are missing: the tests run beside an installed package")


def compile_all(scratch: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    names = sorted(str(source) for source in SOURCES.glob("*.c"))
    command = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-c", *flags, f"-I{SOURCES}", *names]
    return subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "header",
    [
        "",  # before io_uring
        "#define IORING_SETUP_IOPOLL 1\nstruct io_uring_sqe { int opcode; };\n",  # its first days
    ],
)
def test_old_kernel_headers_will_do(tmp_path: Path, header: str) -> None:
    (tmp_path / "linux").mkdir()
    (tmp_path / "linux/io_uring.h").write_text(header)
    done = compile_all(tmp_path, f"-I{tmp_path}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_layout_that_differs_from_the_kernels_does_not_build(tmp_path: Path) -> None:
    real = Path("/usr/include/linux/io_uring.h")
    if not real.exists() or "IORING_RSRC_REGISTER_SPARSE" not in real.read_text():
        pytest.skip("the kernel headers here are older than Linux 5.19: there is nothing to compare with")
    ours = (SOURCES / "uring_abi.h").read_text()
    (tmp_path / "uring_abi.h").write_text(ours.replace("uint64_t user_data;\n    uint16_t", "uint16_t", 1))
    # Found before ours, since the file that includes it comes from here, too.
    shutil.copy(SOURCES / "backend_uring.c", tmp_path)
    shutil.copy(SOURCES / "uring_abi_check.h", tmp_path)
    command = ["gcc", "-std=gnu11", "-c", f"-I{SOURCES}", "backend_uring.c"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr
