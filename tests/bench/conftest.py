"""Fixtures of the benchmarks' tests. The packages of bench/ are found as the commands find them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from frame.side import BENCH, Place

FAKE_DEEPSPEED = {
    "__init__.py": """
import json, os, pathlib, torch
print('a banner on standard output')
__version__ = '0.0.1'
from . import zero

def init_distributed(dist_backend):
    assert os.environ['WORLD_SIZE'] == '1' and os.environ['DS_ACCELERATOR'] == 'cpu'

class Engine:
    def __init__(self, model, config):
        self.module, self.config = model, config
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        zero = config['zero_optimization']
        if folder := zero['offload_param'].get('nvme_path'):
            pathlib.Path(folder, 'config.json').write_text(json.dumps(config))
        assert not zero['offload_optimizer'].get('pipeline_write'), 'cannot pipeline'
        for parameter in model.parameters():
            parameter.ds_numel = parameter.numel()
    def __call__(self, *inputs): return self.module(*inputs)
    def backward(self, loss): loss.backward()
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.config['gradient_clipping'])
        self.optimizer.step()
        self.optimizer.zero_grad()
    def destroy(self): pass

def initialize(model, model_parameters, config):
    return Engine(model, config), None, None, None
""",
    "zero.py": """
import contextlib
@contextlib.contextmanager
def Init(config_dict_or_path):
    assert config_dict_or_path['zero_optimization']['stage'] == 3
    yield
""",
    "ops/__init__.py": "",
    "ops/adam.py": """
import torch
class DeepSpeedCPUAdam(torch.optim.AdamW):
    def __init__(self, parameters, adamw_mode, **options):
        assert adamw_mode
        super().__init__(parameters, fused=True, **options)
""",
    "ops/op_builder.py": "class CPUAdamBuilder:\n    def simd_width(self): return '-D__AVX512__'\n",
}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packages of a peer's environment: a stand-in for deepspeed, which refuses to pipeline, and no tiering."""
    directory = tmp_path / "site"
    for name, text in FAKE_DEEPSPEED.items():
        path = directory / "deepspeed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    return directory


@pytest.fixture
def peers(site: Path) -> Path:
    """The interpreter of a peer's environment."""
    return Path(sys.executable)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    directory = tmp_path / "disk"
    directory.mkdir()
    return Place(directory, threads=2, patience=60)


@pytest.fixture
def interpreter(tmp_path: Path) -> Callable[[str], Path]:
    """Makes something that is run in place of Python, from a few lines of shell."""

    def make(text: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)
        return path

    return make


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., tuple[int, str, Any, str]]:
    """Runs a command of bench/: its exit status, the report, the JSON, and what it wrote to standard error."""

    def run(name: str, *arguments: str, directory: bool = True) -> tuple[int, str, Any, str]:
        disk = tmp_path / "disk-of-the-command"
        disk.mkdir()
        files = ["--json", str(tmp_path / "all.json"), "--markdown", str(tmp_path / "all.md")]
        where = [str(disk)] if directory else []
        done = subprocess.run(
            [sys.executable, str(BENCH / name), *where, *files, *arguments],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode in (0, 1, 2), done.stderr
        assert list(disk.iterdir()) == []
        raw = json.loads((tmp_path / "all.json").read_text())
        return done.returncode, (tmp_path / "all.md").read_text(), raw, done.stderr

    return run
