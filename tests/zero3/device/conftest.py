"""Both ways in which a device computes, without a GPU."""

from __future__ import annotations

import shutil

import pytest

from zero3.device.kernels import cuda_library

from .kernels_by_gcc import CompiledByGcc


@pytest.fixture(scope="module")
def by_gcc(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CompiledByGcc:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed: kernels.cu cannot be run without a GPU")
    return CompiledByGcc(tmp_path_factory.mktemp("kernels"), request.module.LAUNCHED)


@pytest.fixture(params=["torch operations", "kernels.cu"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tests that ask for it run both ways."""
    if request.param == "kernels.cu":
        by_gcc = request.getfixturevalue("by_gcc")
        monkeypatch.setattr(cuda_library, "kernels_of", lambda tensor: by_gcc)
    return str(request.param)
