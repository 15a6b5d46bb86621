"""What the wheels contain, which systems they are for, and that they run there: those for Arm on an emulator."""

from __future__ import annotations

import json
import platform
import re
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.wheels import CPUS, ROOT, InstalledWheel, build_wheels, run


def test_a_wheel_has_no_file_that_only_developers_use() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert not settings["include-package-data"]
    finder = settings["packages"]["find"]
    assert not finder["namespaces"]
    tops = {name.removesuffix(".*") for name in finder["include"]}
    assert tops == {"tiering", "optim_cpu", "zero3", "service"}
    packages = [path.parent for top in tops for path in (ROOT / top).glob("**/__init__.py")]
    modules = [path for package in packages for path in package.glob("*.py")]
    assert ROOT / "optim_cpu" / "kernels.py" in modules
    for_developers = ("build_", "bench_", "test_", "conftest", "generate")
    assert [path for path in modules if path.name.startswith(for_developers)] == []


@pytest.mark.slow
@pytest.mark.parametrize("cpu", CPUS)
def test_auditwheel_finds_nothing_that_the_platform_lacks(wheels: dict[str, Path], cpu: str) -> None:
    pytest.importorskip("auditwheel", reason="auditwheel is not installed: make wheel-tools")
    assert wheels[cpu].name.endswith(f"-cp311-abi3-manylinux_2_28_{cpu}.whl")
    shown = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheels[cpu]))
    # Of the libraries' CPU, and of the versions of all symbols that they import.
    glibc = re.fullmatch(rf"manylinux_2_(\d+)_{cpu}", shown["overall_tag"])
    assert glibc and int(glibc[1]) <= 28
    assert shown["external_libs"] == {} and {"libc.so.6", "libm.so.6"} <= shown["versioned_symbols"].keys()


@pytest.mark.slow
def test_the_same_sources_give_the_same_bytes(wheels: dict[str, Path], tmp_path: Path) -> None:
    again = build_wheels(tmp_path, umask=0o077)
    assert [cpu for cpu in CPUS if again[cpu].read_bytes() != wheels[cpu].read_bytes()] == []


WRITES_AND_READS = """
import ctypes, mmap, os, sys
from types import SimpleNamespace
from optim_cpu import kernels
from tiering.storage.aio import AioContext

NBYTES = 1 << 20
content = os.urandom(NBYTES)
memory = mmap.mmap(-1, NBYTES)
buffer = SimpleNamespace(address=ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes=NBYTES)
with AioContext(verify=True) as context:
    file = context.add_file(os.open(sys.argv[1], os.O_RDWR | os.O_TMPFILE), direct=False, name="swap")
    memory[:] = content
    context.write(file, buffer, 0, NBYTES).wait()
    memory[:] = bytes(NBYTES)
    context.read(file, buffer, 0, NBYTES).wait()
    assert memory[:] == content
print(os.uname().machine, kernels.available_instruction_sets()[-1], sys.modules["tiering._aio"].__file__)
"""


@pytest.mark.slow
def test_a_wheel_reads_what_it_wrote(installed_wheel: InstalledWheel, tmp_path: Path) -> None:
    ran = installed_wheel.run(WRITES_AND_READS, tmp_path).split()
    assert ran == [installed_wheel.cpu, "portable", str(installed_wheel.site / "tiering" / "_aio.abi3.so")]


@pytest.mark.slow
def test_in_a_new_environment_the_demo_keeps_every_bit(wheels: dict[str, Path], tmp_path: Path) -> None:
    """With swap files, steps of the optimizer and the sidecar. torch and so on are those of this environment."""
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    options = ["--python", python, "install", "--disable-pip-version-check", "--no-index", "--no-deps"]
    # A PYTHONPATH with the checkout would make pip find the package there.
    run(sys.executable, "-m", "pip", *options, wheels[platform.machine()], PYTHONPATH="")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    # A line is a directory that is searched; .pth files in it, such as that of the checkout, are not read.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    where = "import tiering._aio, zero3; print(tiering._aio.__file__, zero3.__file__)"
    assert run(python, "-c", where, cwd=tmp_path, PYTHONPATH="").split() == [
        str(site / "tiering" / "_aio.abi3.so"),
        str(site / "zero3" / "__init__.py"),
    ]
    demo = [environment / "bin" / "tiering", "demo", "--port", "0", "--steps", "4"]
    shown = run(*demo, cwd=tmp_path, PYTHONPATH="")
    assert "placement changed nothing" in shown
