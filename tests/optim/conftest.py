from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from optim_cpu import kernels


@pytest.fixture(autouse=True)
def restored_kernel_settings() -> Iterator[None]:
    """Each test starts from the defaults, whatever the one before chose."""
    isa = kernels.instruction_set()
    yield
    kernels.set_instruction_set(isa)
    kernels.set_thread_count(None)


VECTORS = ["neon"] if platform.machine() == "aarch64" else ["avx2", "avx512", "avx512_bf16"]


@pytest.fixture(params=["portable", *VECTORS])
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in kernels.available_instruction_sets():
        pytest.skip(f"this CPU lacks {name}")
    kernels.set_instruction_set(name)
    return name
