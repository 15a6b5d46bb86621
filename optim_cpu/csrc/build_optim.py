"""Builds optim_cpu._kernels. cffi reads the C signatures from kernels.h, so that each is written once.

setup.py names ``ffibuilder``; ``python optim_cpu/csrc/build_optim.py`` from the repository root builds in place.
TIERING_WERROR=1 in the environment turns compiler warnings into errors. No wheel contains this file, because csrc/ is
not a package.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
CSRC = "optim_cpu/csrc"
UNITS = (
    "kernels.c",
    "quantized.c",
    "refuse.c",
    "rules.c",
    "dispatch.c",
    "pool.c",
    "cpus.c",
    "isa_portable.c",
    "isa_avx2.c",
    "isa_avx512.c",
    "isa_avx512_bf16.c",
    "isa_neon.c",
)

# -ffp-contract=off: GCC fuses multiplies with adds otherwise, intrinsics included, and results would depend
# on the instruction set. -fno-math-errno and -fno-trapping-math change no value, they let sqrt and selects be
# vectorised. -Wno-unused-parameter is for the code that cffi generates.
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unused-parameter"]


def read_cdef(header: Path) -> str:
    """The text between the header's two marker comments."""
    text = header.read_text()
    body = text.split("/* CDEF BEGIN", 1)[1].split("*/", 1)[1]
    return body.split("/* CDEF END", 1)[0]


def make_builder(base: Path) -> FFI:
    """A cffi builder with source paths below ``base``. setuptools needs paths relative to the root."""
    csrc = base / CSRC
    builder = FFI()
    builder.cdef(read_cdef(ROOT / CSRC / "kernels.h"))
    builder.set_source(
        "optim_cpu._kernels",
        '#include "kernels.h"',
        sources=[str(csrc / unit) for unit in UNITS],
        depends=[str(csrc / p.name) for p in sorted((ROOT / CSRC).iterdir()) if p.suffix in (".h", ".inc")],
        include_dirs=[str(csrc)],
        extra_compile_args=FLAGS + WARNINGS + ["-Werror"] * (os.environ.get("TIERING_WERROR") == "1"),
        extra_link_args=["-pthread"],
        libraries=["m"],
        py_limited_api=True,
    )
    return builder


ffibuilder = make_builder(Path())

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        built = make_builder(ROOT).compile(tmpdir=directory, target="_kernels.abi3.so")
        target = ROOT / "optim_cpu" / "_kernels.abi3.so"
        # Replace the file instead of overwriting it: running processes have the old inode mapped.
        temporary = target.with_suffix(".new")
        temporary.write_bytes(Path(built).read_bytes())
        temporary.chmod(0o755)
        temporary.replace(target)
        print(target)
