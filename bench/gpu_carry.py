"""What a machine with a GPU but without a network needs: wheels for its Python, in dist/gpu, for bench/gpu_check.sh.

    make gpu-carry [GPU_PYTHON=3.12] [ARGS="--without-deepspeed numpy ..."]

That is this project's wheel, what it and its tests import, and DeepSpeed, the peer of bench_gpu_step.py. torch is the
machine's own, and so is numpy: further names on the command line are carried, too. Platforms are those of x86-64 with
glibc 2.28 or newer.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
CARRIED = REPOSITORY / "dist" / "gpu"
MOST = 60 << 20  # bytes, with the repository: what can still be sent by hand
THEIRS = {"torch", "numpy"}  # gigabytes, and made for the machine's CUDA
TESTS = ["pytest", "hypothesis"]
DEEPSPEED = "deepspeed==0.19.8"
# What DeepSpeed imports beside what we carry anyway; resolving its requirements would fetch torch.
OF_DEEPSPEED = ["einops", "hjson", "msgpack", "ninja", "psutil", "py-cpuinfo", "tqdm"]
# pip matches a platform by its exact name.
PLATFORMS = ["manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux2010", "linux"]


def required() -> list[str]:
    """What pyproject.toml says the project needs, but for what is the machine's own."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [
        requirement
        for requirement in project["dependencies"]
        if re.split(r"[^\w-]", requirement)[0] not in THEIRS
    ]


def pip(command: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "-q", "--disable-pip-version-check", *arguments], check=True
    )


def fetch(python: str, *arguments: str) -> None:
    """Wheels that run on ``python`` there; none is built."""
    platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    pip("download", *options, "-d", str(CARRIED), *arguments)


def size(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="version of the machine's Python")
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("more", nargs="*", help="further distributions that the machine lacks")
    options = parser.parse_args()
    wheels = list((REPOSITORY / "dist").glob("tiering-*_x86_64.whl"))
    if len(wheels) != 1:
        print(
            f"gpu_carry: dist/ must have one wheel for x86_64, it has {len(wheels)}: make wheels",
            file=sys.stderr,
        )
        return 2
    shutil.rmtree(CARRIED, ignore_errors=True)
    CARRIED.mkdir()
    fetch(options.python, *required(), *TESTS, *options.more)
    if not options.without_deepspeed:
        fetch(options.python, "--no-deps", *OF_DEEPSPEED)
        pip("wheel", "--no-deps", "-w", str(CARRIED), DEEPSPEED)  # it has no wheel, and compiles nothing yet
    shutil.copy(wheels[0], CARRIED)
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    tree = size([REPOSITORY / name for name in listed.stdout.split("\0") if name])
    carried = sorted(CARRIED.iterdir())
    total = tree + size(carried)
    print(f"{len(carried)} wheels for Python {options.python} in {CARRIED.relative_to(REPOSITORY)}:", end=" ")
    print(f"{size(carried) / 2**20:.1f} MiB, {total / 2**20:.1f} MiB with the repository's files.")
    print("Copy both to the machine, and there run: bench/gpu_check.sh dist/gpu REPORT")
    if total > MOST:
        print(f"gpu_carry: more than {MOST >> 20} MiB; leave DeepSpeed out, or carry less", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
