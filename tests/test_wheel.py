"""The modules that a wheel contains: those that a user runs."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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
