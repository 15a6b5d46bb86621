"""Checks of versions and of the GPU's driver. Imports no torch and calls no driver, because a driver may hang."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from tiering._text import counted
from tiering.doctor.finding import Check, Finding, note, problem
from tiering.host.kernel_files import listed, text_of

MIN_KERNEL = (5, 11)
"""The first version with all io_uring features that the I/O engine uses."""


def system(root: Path) -> Finding:
    release = text_of(root / "proc/sys/kernel/osrelease") or platform.release()
    text = f"Linux {release}, {platform.machine()}"
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is None or (int(version[1]), int(version[2])) >= MIN_KERNEL:
        return Finding(text)
    return note(
        f"{text}: io_uring needs {MIN_KERNEL[0]}.{MIN_KERNEL[1]}",
        "install a newer kernel; until then the engine uses libaio",
    )


def python(root: Path) -> Finding:
    """``root`` is not used: the result is about the running Python."""
    return Finding(f"{platform.python_implementation()} {platform.python_version()}")


def packages(root: Path, version: Callable[[str], str] = metadata.version) -> Finding:
    """``root`` is not used: the result is about the packages of the running Python."""
    installed, missing = [], []
    for name in ("tiering", "torch", "numpy", "transformers", "safetensors"):
        try:
            installed.append(f"{name} {version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if "torch" in missing:
        return problem(f"{', '.join(installed)}; no torch", "pip install torch")
    return Finding(", ".join(installed))


def gpu(root: Path) -> Finding:
    driver = re.search(r"(\d+(?:\.\d+)+)", text_of(root / "proc/driver/nvidia/version") or "")
    if driver is None:
        return Finding("no NVIDIA driver: the CPU is the device")
    models = []
    # Read only the model: the file also holds identifiers of the card.
    for card in listed(root / "proc/driver/nvidia/gpus"):
        model = re.search(r"^Model:\s+(.+)$", text_of(card / "information") or "", re.MULTILINE)
        models.append(model[1].strip() if model else "unknown model")
    text = f"NVIDIA driver {driver[1]}, {counted(len(models), 'GPU')}" + "".join(
        f", {model}" for model in dict.fromkeys(models)
    )
    if any(re.fullmatch(r"nvidia\d+", node.name) for node in listed(root / "dev")):
        return Finding(text)
    return note(
        f"{text}, but no /dev/nvidia0: this process cannot use them",
        "docker run --gpus all (with the NVIDIA container toolkit); without a container: sudo nvidia-modprobe -u -c=0",
    )


CHECKS: dict[str, Check] = {"kernel": system, "Python": python, "packages": packages, "GPU": gpu}
