"""Builds the wheels, and installs each for a Python of its CPU."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CPUS = ["x86_64", "aarch64"]
ARM_ROOT = ROOT / "build" / "arm64"  # of `make emulator`


def run(*command: str | Path, cwd: Path = ROOT, umask: int = -1, **environment: str | Path) -> str:
    """The output of a command that succeeds."""
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | {name: str(value) for name, value in environment.items()},
        cwd=cwd,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheels(directory: Path, umask: int = -1) -> dict[str, Path]:
    """The wheel for each CPU."""
    pytest.importorskip("ziglang", reason="ziglang is not installed: make wheel-tools")
    run(ROOT / ".ci" / "wheels", sys.executable, directory, umask=umask)
    return {cpu: next(directory.glob(f"*_{cpu}.whl")) for cpu in CPUS}


def compiler_for(cpu: str) -> list[str]:
    """The compiler that builds the wheel."""
    cache = f"ZIG_GLOBAL_CACHE_DIR={ROOT / 'build' / 'zig'}"
    return ["env", cache, sys.executable, "-m", "ziglang", "cc", "-target", f"{cpu}-linux-gnu.2.28"]


def python_for(cpu: str) -> list[str]:
    """A Python that runs code for the CPU, on this machine or emulated. Skips the test if there is none."""
    if cpu == platform.machine():
        return [sys.executable]
    python = ARM_ROOT / "usr" / "bin" / "python3"
    if cpu != "aarch64" or not shutil.which("qemu-aarch64") or not python.exists():
        pytest.skip(f"an emulated Python for {cpu} is missing: make emulator")
    return ["qemu-aarch64", "-L", str(ARM_ROOT), str(python)]


@dataclass(frozen=True)
class InstalledWheel:
    cpu: str
    python: list[str]
    site: Path

    def run(self, program: str, *arguments: Path) -> str:
        """The output of a program that imports from the wheel, not from the checkout."""
        return run(*self.python, "-P", "-c", program, *arguments, PYTHONPATH=self.site)


def install(wheel: Path, cpu: str, site: Path) -> InstalledWheel:
    """Install a wheel as pip does on the oldest system that it is for."""
    python = python_for(cpu)
    options = ["-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--only-binary=:all:"]
    system = ["--platform", f"manylinux_2_28_{cpu}", "--python-version", "3.11", "--target", str(site)]
    run(sys.executable, "-m", "pip", "install", *options, *system, wheel)
    return InstalledWheel(cpu, python, site)
