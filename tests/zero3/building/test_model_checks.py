"""Models that the engine refuses, each by name and before anything has moved; what it casts, it says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from tiering.errors import ConfigError
from zero3.device.tiers import Tiers

Start = Callable[..., Any]
PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"offload_param": "cpu", "offload_optimizer": "cpu"},
    {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False},
]
WIDTH = 16


class Packed(nn.Parameter):
    """Looks like the parameter of a quantised layer: bytes whose dtype is only their storage, and how to read them."""

    quant_state: Any
    bnb_quantized: bool


class QuantisedLinear(nn.Module):
    """A frozen weight of 8 bits in a parameter of another dtype, with a trained offset, as an adapter would be."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.codes = torch.randint(256, (WIDTH * WIDTH,), dtype=torch.uint8)
        self.weight = Packed(self.codes.view(storage), requires_grad=False)
        self.weight.quant_state = SimpleNamespace(scale=1 / 256)
        self.weight.bnb_quantized = True
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight.view(torch.uint8).view(WIDTH, WIDTH)
        scale: float = self.weight.quant_state.scale
        return x @ (codes.to(x.dtype) * scale) + self.offset


def quantised(storage: torch.dtype) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(QuantisedLinear(storage), QuantisedLinear(storage))


@pytest.fixture
def no_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tiers were built")

    monkeypatch.setattr(Tiers, "__init__", refuse)


@pytest.mark.parametrize(
    ("storage", "precision"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.bfloat16, "fp16"),
        (torch.float32, "bf16"),
        (torch.bfloat16, "fp32"),
        (torch.uint8, "bf16"),
    ],
    ids=str,
)
def test_packed_bytes_are_kept_in_any_storage(start: Start, storage: torch.dtype, precision: str) -> None:
    """All 256 bit patterns, those of NaN among them, are there after training in each placement."""
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    results = []
    for placement in PLACEMENTS:
        model = quantised(storage)
        fixed = {"loss_scale": 8.0}
        engine = start(model, precision=precision, fp16=fixed, accumulation=1, threshold=0, **placement)
        x = torch.ones(2, WIDTH, dtype=compute)
        losses = []
        for _ in range(3):
            loss = engine(x).float().pow(2).mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        weight = engine.state_dict()["1.weight"]
        assert weight.dtype is storage and torch.equal(weight.view(torch.uint8), model[1].codes)
        results.append((losses, engine.state_dict()["1.offset"].tolist()))
    assert results[0] == results[1] == results[2]
    assert results[0][1] != [0.0] * WIDTH


def test_an_export_does_not_cast_packed_bytes(start: Start, tmp_path: Path) -> None:
    model = quantised(torch.float32)
    engine = start(model, precision="fp32", threshold=0, **PLACEMENTS[2])
    stored = load_file(engine.save_16bit_model(tmp_path / "export"))
    assert torch.equal(stored["1.weight"].view(torch.uint8), model[1].codes)
    assert stored["1.offset"].dtype is torch.bfloat16


def test_packed_bytes_that_would_be_trained(start: Start, no_tiers: None) -> None:
    model = quantised(torch.bfloat16)
    model[0].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"0\.weight.*requires_grad_\(False\)"):
        start(model)


class Int8Params(nn.Parameter):
    """Has the name of the parameter of bitsandbytes' 8-bit layers."""


def frozen(values: Tensor, kind: type[nn.Parameter] = nn.Parameter) -> nn.Module:
    model = nn.Linear(4, 4)
    model.codes = kind(values, requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: frozen(torch.ones(2, dtype=torch.complex128)),
            r"'codes' is torch\.complex128.*no checkpoint",
        ),
        (
            lambda: frozen(torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
            r"'codes' is torch\.float4_e2m1fn_x2.*\.view\(torch\.uint8\)",
        ),
        (
            lambda: frozen(torch.ones(2, dtype=torch.int8), Int8Params),
            r"'codes' is an Int8Params of bitsandbytes in a Linear;.*llm_int8_skip_modules",
        ),
        (
            lambda: frozen(torch.ones(2, dtype=torch.complex64)).requires_grad_(True),
            r"'codes' is torch\.complex64 and requires a gradient.*requires_grad_\(False\)",
        ),
    ],
    ids=["complex128", "float4", "8 bits of bitsandbytes", "trained complex"],
)
def test_frozen_bytes_that_cannot_be_kept(
    start: Start, no_tiers: None, make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(make())


@pytest.mark.parametrize(
    ("dtype", "precision", "words"),
    [
        (torch.float8_e4m3fn, "bf16", ["torch.float8_e4m3fn", "torch.bfloat16", "2 times the memory"]),
        (torch.float8_e5m2, "fp32", ["torch.float32", "4 times the memory"]),
        (torch.float64, "fp32", ["torch.float64", "rounds"]),
        (torch.float64, "bf16", ["torch.float64", "rounds"]),
        (torch.float16, "bf16", ["torch.float16", "range"]),
    ],
    ids=str,
)
def test_a_cast_that_was_not_asked_for_is_logged(
    start: Start, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, precision: str, words: list[str]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    # A frozen float8 parameter is not cast.
    model[0].requires_grad_(dtype.itemsize == 1).to(dtype)
    with caplog.at_level(logging.WARNING):
        start(model, precision=precision)
    (message,) = [r.getMessage() for r in caplog.records if r.name == "zero3.building.model_checks"]
    assert "'0.weight' and 1 other parameters are" in message
    assert all(word in message for word in words), message


def test_a_cast_that_was_asked_for_is_not_logged(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        start(nn.Linear(4, 4), precision="bf16")
        start(nn.Linear(4, 4).to(torch.bfloat16), precision="bf16")
        start(nn.Linear(4, 4), precision="fp32")
    assert [r for r in caplog.records if r.name == "zero3.building.model_checks"] == []


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def scripted_block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))


def sharded_by_fsdp() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=_mesh())
    return model


def sharded_by_first_fsdp() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))


def parallel() -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), _mesh(), {"1": ColwiseParallel()}
    )


def _mesh() -> Any:
    return dist.init_device_mesh("cpu", (1,))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.DataParallel(nn.Linear(4, 4)), r"the model is wrapped in DataParallel.*\.module"),
        (
            lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 4)),
            r"the model is wrapped in DistributedDataParallel.*\.module",
        ),
        (
            lambda: nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 4))),
            r"module '0' is wrapped in DistributedDataParallel",
        ),
        (sharded_by_fsdp, "the model is sharded by FSDP.*without fully_shard"),
        (sharded_by_first_fsdp, "module '0' is sharded by FSDP.*FullyShardedDataParallel"),
        (parallel, r"'1\.weight' is a DTensor.*parallelize_module"),
        (lambda: torch.jit.script(nn.Linear(4, 4)), r"the model was made by torch\.jit\.script"),
        (scripted_block, r"module '1' was made by torch\.jit\.script"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(2)),
            r"'1\.weight' of a lazy module.*one batch",
        ),
    ],
    ids=["dp", "ddp", "ddp inside", "fsdp", "fsdp1 inside", "dtensor", "script", "script inside", "lazy"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_wrapped_and_foreign_models(
    start: Start, no_tiers: None, group: None, make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        start(make())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_block_trains(start: Start) -> None:
    """What torch.jit.trace makes takes hooks, unlike what torch.jit.script makes."""
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    results = []
    for trace in (False, True):
        torch.manual_seed(1)
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        if trace:
            blocks[1] = torch.jit.trace(blocks[1], torch.ones(2, 8))
        model = nn.Sequential(*blocks)
        engine = start(model, accumulation=1, threshold=0, **PLACEMENTS[2])
        for _ in range(2):
            engine.backward(engine(x).float().pow(2).mean())
            engine.step()
        results.append([value.tolist() for value in engine.master_state_dict().values()])
    assert results[0] == results[1]
