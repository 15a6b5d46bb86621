"""torch's compiler is loaded by those who compile, and by nothing that the engine does."""

from __future__ import annotations

import importlib
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

import tiering
from tests.zero3.ranks.pool import Pools
from zero3.params.compilation import eager

COMPILER = ("torch._dynamo", "torch._inductor", "triton")


def train(rank: int, nvme: Path) -> tuple[list[str], list[str]]:
    """What of the compiler was loaded by imports, and after some steps with a schedule of torch's."""
    by_imports = [name for name in COMPILER if name in sys.modules]
    section = {"device": "nvme", "nvme_path": str(nvme)}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": section,
            "offload_optimizer": section,
            "stage3_param_persistence_threshold": 0,
        },
        "tiering": {
            "device_budget": "4MiB",
            "host_budget": "4MiB",
            "cache_in_host": False,
            "telemetry": {"enabled": False},
        },
    }
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    with tiering.initialize(model=model, config=settings).engine as engine:
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
        for _ in range(2):
            loss = engine(torch.ones(2, 64)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
            schedule.step()
            engine.optimizer.zero_grad()
        assert engine.global_steps == 2
        engine.master_state_dict()
        engine.snapshot()
    return by_imports, [name for name in COMPILER if name in sys.modules]


def test_training_loads_no_compiler(nvme: Path, tmp_path: Path) -> None:
    """In a process that nobody else has used: a fork of the server that has imported torch and the engine."""
    with closing(Pools(tmp_path / "ranks")) as pools:
        assert pools.of(1).run(train, nvme) == [([], [])]


def test_what_is_marked_is_disabled_once_the_compiler_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and called then: each time it would cost a new wrapper."""
    disabled: list[object] = []

    def disable(function: object) -> object:
        disabled.append(function)
        return lambda *args, **kwargs: ("disabled", args, kwargs)

    def plain(*args: int, **kwargs: int) -> object:
        return "plain", args, kwargs

    compiler = importlib.import_module("torch._dynamo")
    monkeypatch.setattr(torch.compiler, "disable", disable)
    marked = eager(plain)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, compiler.__name__)
        assert marked(1, b=2) == ("plain", (1,), {"b": 2})
    assert marked(1, b=2) == marked(1, b=2) == ("disabled", (1,), {"b": 2})
    assert disabled == [plain]
    assert (marked.__name__, marked.__wrapped__) == ("plain", plain)


def test_a_compiled_function_leaves_what_is_marked_alone() -> None:
    """Without a trace into it: its graph breaks there, and the rest is compiled on both sides."""
    graphs: list[torch.fx.GraphModule] = []
    compiling: list[bool] = []

    @eager
    def marked(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x + 1

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: marked(x * 2) * 3, backend=backend)
    assert compiled(torch.ones(2)).tolist() == [9.0, 9.0]
    assert compiling == [False]
    operations = [
        node.target.__name__ for graph in graphs for node in graph.graph.nodes if node.op == "call_function"
    ]
    assert operations == ["mul", "mul"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_is_marked_is_not_compiled_by_itself() -> None:
    """torch's own modules are not compiled: the compiler would look at what they call, to compile that instead."""
    packed: list[torch.Size] = []

    @eager
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    counters = importlib.import_module("torch._dynamo.utils").counters
    linear = nn.Linear(4, 4)
    linear.compile(backend="eager")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        linear(torch.ones(2, 4))  # from here on the compiler knows the mark
        counters.clear()
        linear(torch.ones(3, 4))
    assert packed == [(2, 4), (3, 4)]
    assert not counters["frames"] and not counters["graph_break"]
