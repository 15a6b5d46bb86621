"""What runs here: versions, and the GPU's driver. No torch, and no driver is asked that may hang."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from tiering.doctor.finding import Check, Finding, note, problem
from tiering.host.kernel_files import listed, said
from tiering.text import counted

KERNEL = (5, 11)
"""The first with all that io_uring needs here."""


def system(root: Path) -> Finding:
    release = said(root / "proc/sys/kernel/osrelease") or platform.release()
    found = f"Linux {release}, {platform.machine()}"
    version = re.match(r"(\d+)\.(\d+)", release)
    if version is None or (int(version[1]), int(version[2])) >= KERNEL:
        return Finding(found)
    return note(
        f"{found}: io_uring needs {KERNEL[0]}.{KERNEL[1]}", "a newer kernel; until then libaio does the work"
    )


def python(root: Path) -> Finding:
    """``root`` does not matter: this is the Python that runs."""
    return Finding(f"{platform.python_implementation()} {platform.python_version()}")


def packages(root: Path, version: Callable[[str], str] = metadata.version) -> Finding:
    """``root`` does not matter: this is what the Python that runs would import."""
    found, missing = [], []
    for name in ("tiering", "torch", "numpy", "transformers", "safetensors"):
        try:
            found.append(f"{name} {version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if "torch" in missing:
        return problem(f"{', '.join(found)}; no torch", "pip install torch")
    return Finding(", ".join(found))


def gpu(root: Path) -> Finding:
    driver = re.search(r"(\d+(?:\.\d+)+)", said(root / "proc/driver/nvidia/version") or "")
    if driver is None:
        return Finding("no NVIDIA driver: the CPU is the device")
    models = []
    # The file also holds identifiers of the card: only the model is kept.
    for card in listed(root / "proc/driver/nvidia/gpus"):
        model = re.search(r"^Model:\s+(.+)$", said(card / "information") or "", re.MULTILINE)
        models.append(model[1].strip() if model else "unknown model")
    found = f"NVIDIA driver {driver[1]}, {counted(len(models), 'GPU')}" + "".join(
        f", {model}" for model in dict.fromkeys(models)
    )
    if any(re.fullmatch(r"nvidia\d+", node.name) for node in listed(root / "dev")):
        return Finding(found)
    return note(
        f"{found}, but no /dev/nvidia0: this process cannot use them",
        "docker run --gpus all (with the NVIDIA container toolkit); without a container: sudo nvidia-modprobe -u -c=0",
    )


CHECKS: dict[str, Check] = {"kernel": system, "Python": python, "packages": packages, "GPU": gpu}
