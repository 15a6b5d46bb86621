"""Builds ``tiering._aio`` from the C files in this directory, for setuptools (``cffi_modules``) or as a command.

``python aio_csrc/build_aio.py``, run in the root of the repository, builds ``tiering/_aio.abi3.so`` in place.
Generated files are not left in the tree. ``TIERING_WERROR=1`` turns warnings into errors.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
MODULE = "tiering._aio"
SOURCES = [
    "aio.c",
    "buffers.c",
    "counters.c",
    "driver.c",
    "judge.c",
    "requests.c",
    "submit.c",
    "system.c",
    "tasks.c",
    "verify.c",
    "waits.c",
    "withheld.c",
    "backend_uring.c",
    "backend_libaio.c",
    "backend_threads.c",
    "backend_fault.c",
]
HEADERS = ["aio.h", "backend.h", "context.h", "system.h", "uring_abi.h", "uring_abi_check.h", "verify.h"]


def read_cdef(header: Path) -> str:
    """The declarations between the CDEF markers of a header, for cffi."""
    match = re.search(
        r"/\* CDEF begin \*/\n(.*?)/\* CDEF end \*/", header.read_text(encoding="utf-8"), re.DOTALL
    )
    if match is None:
        raise ValueError(f"{header} has no CDEF markers: put the public declarations between them")
    return match.group(1)


def compile_flags() -> list[str]:
    flags = ["-O3", "-std=gnu11", "-Wall", "-Wextra", "-pthread", "-fvisibility=hidden"]
    return [*flags, "-Werror"] if os.environ.get("TIERING_WERROR") == "1" else flags


ffibuilder = FFI()
ffibuilder.cdef(read_cdef(HERE / "aio.h"))
ffibuilder.set_source(
    MODULE,
    '#include "aio.h"',
    # setuptools needs paths relative to setup.py; both kinds of build run in its directory.
    sources=[f"{HERE.name}/{name}" for name in SOURCES],
    depends=[f"{HERE.name}/{name}" for name in HEADERS],
    include_dirs=[HERE.name],
    extra_compile_args=compile_flags(),
    extra_link_args=["-pthread"],
    py_limited_api=True,
)


def build_in_place() -> Path:
    """Compile in a temporary directory, move the shared object into the package, and return its path."""
    from setuptools import Distribution

    root = HERE.parent
    os.chdir(root)
    with tempfile.TemporaryDirectory() as scratch:
        extension = ffibuilder.distutils_extension(scratch, verbose=False)
        command = Distribution({"name": "tiering", "ext_modules": [extension]}).get_command_obj("build_ext")
        command.build_temp = command.build_lib = scratch
        command.ensure_finalized()
        command.run()
        built = Path(command.get_ext_fullpath(MODULE))
        target = root / "tiering" / built.name
        # Replace the file instead of overwriting it: running processes have the old inode mapped.
        temporary = target.with_suffix(".new")
        shutil.copyfile(built, temporary)
        temporary.replace(target)
    return target


if __name__ == "__main__":
    print(build_in_place())
