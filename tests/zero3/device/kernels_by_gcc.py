"""kernels.cu without a GPU: compiled by g++, behind simt.h, and launched as on a GPU but for the launch itself.

A test module that uses the fixture ``by_gcc`` lists the kernels it launches in ``LAUNCHED``. Only they are compiled.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3.device.kernels import cuda_library, fused

STEPS = [
    f"step<{optimizer}, {states}, {state_format}, {split}, {grad}>"
    for optimizer, states in ((0, 2), (1, 1), (2, 1), (3, 0), (3, 1))
    for state_format, split, grad in product(range(3 if states else 1), range(2), range(3))
]
ACCUMULATES = [
    f"accumulate<{t}, {s}, {o}>" for t, s, o in product(range(3), range(3), range(2)) if t != s or not o
]
REDUCES = [f"reduce<{t}, {s}, {o}>" for t, s, o in product(range(3), range(3), range(2))]
SQUARES = [f"block_squares<{dtype}>" for dtype in range(3)]
DECODES = [f"decode<{code}, {dtype}>" for code, dtype in product(range(3), range(3))]
STRUCTURES = {
    "Rule": fused.RuleArgument,
    "Segments": fused.Segments,
    "Flats": fused.Flats,
    "Sources": fused.Sources,
    "Part": fused.Part,
}


class CompiledByGcc:
    """kernels.cu as a library of ordinary functions."""

    def __init__(self, directory: Path, kernels: Sequence[str]) -> None:
        fakes = Path(__file__).parents[2] / "fakes"
        sources = fakes / "simt.h", cuda_library.SOURCE, fakes / "cuda_calls.h"
        lines = [f'#include "{source}"' for source in sources]
        for run, arguments, names in (
            ("run_in_turn", "*(Rule *)a[0], *(Segments *)a[1]", STEPS),
            ("run_in_turn", "*(void **)a[0], *(void **)a[1], *(u64 *)a[2]", ACCUMULATES),
            ("run_in_turn", "*(void **)a[0], *(Sources *)a[1], *(float *)a[2], *(u64 *)a[3]", REDUCES),
            ("run_in_turn", "*(void **)a[0], *(Part *)a[1]", DECODES),
            ("run_by_warps", "*(Flats *)a[0], *(double **)a[1]", SQUARES),
        ):
            for name in set(names).intersection(kernels):
                call = f"{run}(blocks, THREADS, [&] {{ {name}({arguments}); }})"
                lines.append(f'extern "C" void {self._plain(name)}(unsigned blocks, void **a) {{ {call}; }}')
        lines += [f'extern "C" unsigned size_of_{name}() {{ return sizeof({name}); }}' for name in STRUCTURES]
        (directory / "kernels.cc").write_text("\n".join(lines))
        options = "-std=c++20 -O0 -ffp-contract=off -fno-strict-aliasing -shared -fPIC -pthread"
        warnings = "-Wall -Wextra -Werror -Wno-unknown-pragmas -Wno-unused-function"
        command = ["g++", *options.split(), *warnings.split(), "kernels.cc", "-o", "kernels.so"]
        subprocess.run(command, cwd=directory, check=True)
        self.library = ctypes.CDLL(str(directory / "kernels.so"))
        self.launched: list[str] = []

    def _plain(self, name: str) -> str:
        return "".join(c if c.isalnum() else "_" for c in name)

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Any]) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self.library[self._plain(kernel)](blocks, addresses)
        self.launched.append(kernel)


def same_bits(first: Tensor, other: Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), other.view(torch.uint8))
