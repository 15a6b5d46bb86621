"""Every kernel must give the same bytes on x86-64 and, compiled with the extension's flags, on an emulated 64-bit Arm.

``vectors.c`` runs them all: under each instruction set, in a clean and in a hostile floating-point environment. Here it
calls the extension as it is installed. Bytes may not depend on the level of optimization: for Arm, fast tests compile
at one that takes a third of the time.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from optim_cpu import kernels
from optim_cpu._kernels import lib
from optim_cpu.csrc import build_optim
from tests.wheels import InstalledWheel, compiler_for

from .cases import functions_with

CSRC = build_optim.ROOT / build_optim.CSRC
VECTORS = Path(__file__).with_name("vectors.c")
ARM = "aarch64-linux-gnu-"
TOOLS = [ARM + "gcc", ARM + "objdump", "qemu-aarch64"]
PACKAGES = "gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
QUICK = ["-O1", "-fexpensive-optimizations"]  # it would fuse multiplies with adds, as -O3 would
OWN = ["-O3"]  # the extension's


def need(tools: Iterable[str], packages: str) -> None:
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: {packages})")


def run(*command: str | Path, timeout: float = 300, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(directory: Path, compiler: str, *more: str) -> Path:
    """A program from ``vectors.c`` and the extension's sources and flags; objects stay beside it."""
    flags = [*build_optim.FLAGS, *build_optim.WARNINGS, "-Werror", f"-I{CSRC}", *more]

    def compile_one(source: Path) -> Path:
        target = directory / f"{source.stem}.o"
        run(compiler, *flags, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [*(CSRC / unit for unit in build_optim.UNITS), VECTORS]))
    program = directory / "vectors"
    run(compiler, *flags, *objects, "-lm", "-o", program)
    return program


# ``vectors.c`` with pointers in the place of the kernels, as the extension exports none.
POINTERS = [f"-D{name}=(*{name})" for name in dir(lib) if name.startswith("opt_")]
RUN_INSTALLED = """
import ctypes, sys
from optim_cpu._kernels import ffi, lib

program = ctypes.CDLL(sys.argv[1])
for name in dir(lib):
    if name.startswith("opt_"):
        pointer = ctypes.c_void_p.in_dll(program, name)
        pointer.value = int(ffi.cast("intptr_t", ffi.addressof(lib, name)))
sys.exit(program.main(1, None))
"""


@pytest.fixture(scope="module", params=[QUICK, pytest.param(OWN, marks=pytest.mark.slow)], ids=" ".join)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need(TOOLS, PACKAGES)
    return build(tmp_path_factory.mktemp("build"), ARM + "gcc", *request.param, "-static")


def library(directory: Path, *compiler: str) -> Path:
    """``vectors.c`` for RUN_INSTALLED."""
    program = directory / "vectors.so"
    flags = [*build_optim.FLAGS, *build_optim.WARNINGS, "-Werror", f"-I{CSRC}", "-O1", *POINTERS]
    run(*compiler, *flags, "-fvisibility=default", "-shared", "-fPIC", VECTORS, "-lm", "-o", program)
    return program


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A line for each kernel. That there are any shows that all instruction sets of this CPU agree."""
    need(["gcc"], "gcc libc6-dev")
    program = library(tmp_path_factory.mktemp("vectors"), "gcc")
    return run(sys.executable, "-c", RUN_INSTALLED, program).splitlines()[1:]


def test_every_instruction_set_gives_the_same_bytes_in_any_floating_point_environment(
    expected: list[str],
) -> None:
    lines = dict(line.rsplit(" ", 1) for line in expected)
    assert len(lines) == 58 and {"adam", "lion", "adagrad", "sgd", "split", "join"} < set(lines)
    # But for those that copy any two bytes as they are, no two kernels do the same.
    assert lines.pop("every bf16 to bf16") == lines.pop("every fp16 to fp16")
    assert len(set(lines.values())) == 56


@pytest.mark.slow
def test_neon_gives_the_same_bytes(arm: Path, expected: list[str]) -> None:
    first, *lines = run("qemu-aarch64", arm).splitlines()
    assert first == "neon: neon portable"
    assert lines == expected


@pytest.mark.slow
def test_arm_runs_the_portable_unit_if_told_to(arm: Path) -> None:
    assert run("qemu-aarch64", arm, "0", TIERING_ISA="portable") == "portable: neon portable\n"


@pytest.mark.slow
def test_arm_objects_hold_no_fused_multiply_add_but_in_the_products_that_have_it(arm: Path) -> None:
    """Contraction is on by default there, too; the program itself has libm's."""
    listing = run(ARM + "objdump", "-d", "--no-show-raw-insn", *sorted(arm.parent.glob("*.o")))
    assert re.search(r"\bfsqrt\s+v\d+\.4s", listing) and re.search(r"\bfmul\s+v\d+\.4s", listing)
    assert functions_with(r"\bf(?:n?m(?:add|sub)|ml[as]l?2?)\b", listing) == {
        "product_bf16",
        "transposed_bf16",
    }


@pytest.mark.parametrize("flag", ["-mfpmath=387", "-ffast-math"])
def test_arithmetic_that_is_not_float32_is_refused_by_the_compiler(tmp_path: Path, flag: str) -> None:
    need(["gcc"], "gcc libc6-dev")
    if flag.startswith("-m") and os.uname().machine != "x86_64":
        pytest.skip("only a compiler for x86 has -mfpmath")
    command = ["gcc", *build_optim.FLAGS, flag, "-c", str(CSRC / "isa_portable.c"), "-o", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(r"#error .*(float32 must round|-ffast-math makes)", done.stderr)


def test_the_extension_is_compiled_at_the_level_that_slow_tests_use() -> None:
    assert [flag for flag in build_optim.FLAGS if flag.startswith("-O")] == OWN


# Frames without optimization are large: hence the 8 MiB of stack.


@pytest.mark.slow
@pytest.mark.parametrize("level", ["-O0", *OWN, "-O2", "-Os"])
def test_undefined_behaviour_would_show_at_another_level(
    tmp_path: Path, level: str, expected: list[str]
) -> None:
    assert run(build(tmp_path, "gcc", level), "1", "8192").splitlines()[1:] == expected


@pytest.mark.slow
def test_a_wheel_gives_the_same_bytes(
    installed_wheel: InstalledWheel, tmp_path: Path, expected: list[str]
) -> None:
    """Clang compiles the wheels, and the Arm is emulated."""
    first, *lines = installed_wheel.run(
        RUN_INSTALLED, library(tmp_path, *compiler_for(installed_wheel.cpu))
    ).splitlines()
    here = " ".join(kernels.available_instruction_sets())
    assert first.split(": ")[1] == (here if installed_wheel.cpu == platform.machine() else "neon portable")
    assert lines == expected
