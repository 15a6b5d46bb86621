"""Tokens and floating-point operations: what is counted, and for which models they are known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiering.host.gpus import peak_flops
from tiering.telemetry import Description, GpuStatus
from zero3.observe import gpu_sensors, throughput
from zero3.observe.gpu_sensors import GpuSensors
from zero3.observe.monitors import Monitor
from zero3.observe.throughput import ModelFlops, Throughput, active_fraction


class Decoder(nn.Module):
    """A model with the configuration of a transformer: 2 layers of width 4."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=2, num_hidden_layers=2, hidden_size=4)
        self.embedding = nn.Embedding(8, 4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.head = nn.Linear(4, 8, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        loss: Tensor = self.head(self.frozen(self.embedding(input_ids))).square().mean()
        return loss


def test_steps_have_their_tokens_and_operations(start: Callable[..., Any]) -> None:
    engine = start(Decoder(), accumulation=2, offload_param="nvme", offload_optimizer="nvme")
    ids = torch.ones(2, 3, dtype=torch.int64)
    for _ in range(2):
        with torch.no_grad():
            engine(ids)
        for inputs in ((ids,), ({"input_ids": ids},)):
            loss = engine(*inputs) if isinstance(inputs[0], Tensor) else engine(**inputs[0])
            engine.backward(loss)
            engine.step()
    snapshot = engine.snapshot()
    # The embedding multiplies nothing. Attention: 3 passes of 2 operations, 2 layers, width 4, half of 2 sums.
    per_token = 6 * 32 + 4 * 16 + 3 * (2 * 2 * 4) * 3
    assert [(step.tokens, step.flops) for step in snapshot.steps] == [(12, 12 * per_token)] * 2
    assert (snapshot.tokens, snapshot.flops, snapshot.peak_flops) == (24, 24 * per_token, None)
    assert snapshot.curve.step == [1, 2]
    assert snapshot.curve.loss[-1] == pytest.approx(snapshot.loss, rel=1e-5)
    assert snapshot.curve.gradient_norm[-1] == pytest.approx(snapshot.gradient_norm, rel=1e-5)
    assert snapshot.curve.tokens == [12, 12]


def test_the_configuration_may_state_the_operations(start: Callable[..., Any]) -> None:
    engine = start(telemetry={"enabled": False, "flops_per_token": 50})
    engine._observation.throughput.count((torch.ones(2, 3, dtype=torch.int32),), {})
    assert (engine.snapshot().tokens, engine.snapshot().flops) == (6, 300)


@pytest.mark.parametrize(
    ("args", "kwargs", "tokens"),
    [
        ((torch.zeros(2, 3),), {}, 0),
        ((torch.zeros(5, dtype=torch.int64),), {}, 0),
        ((), {}, 0),
        ((), {"input_ids": torch.tensor(7)}, 0),
        (({"input_ids": torch.zeros(2, 5, dtype=torch.int64)},), {}, 10),
        ((torch.zeros(9, 9),), {"input_ids": torch.zeros(1, 7, dtype=torch.int64)}, 7),
    ],
)
def test_only_token_ids_are_tokens(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> None:
    counts = Throughput(ModelFlops(2.0))
    counts.count(args, kwargs)
    assert (counts.tokens, counts.flops) == (tokens, 2.0 * tokens)


def test_models_whose_operations_are_unknown_have_none(start: Callable[..., Any]) -> None:
    engine = start()
    counts = engine._observation.throughput
    counts.count((torch.ones(2, 3, dtype=torch.int64),), {})
    assert (counts.tokens, counts.flops) == (6, 0)


def test_a_token_uses_some_experts() -> None:
    config = SimpleNamespace(num_experts=8, num_experts_per_tok=2)
    assert active_fraction(config, [("a.experts.0.w", 60), ("b.w", 40)]) == pytest.approx(0.4 + 0.6 / 4)
    assert active_fraction(None, [("b.w", 40)]) == 1.0


def test_tied_embeddings_multiply() -> None:
    model = Decoder()
    assert throughput._lookups(model) == {id(model.embedding.weight)}
    model.head.weight = model.embedding.weight
    assert throughput._lookups(model) == set()


def test_peaks_are_those_of_whole_gpus_in_16_bits() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("Tesla V100-SXM3-32GB", "fp16") == 125e12
    assert peak_flops("Tesla V100-SXM3-32GB", "bf16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") is None
    assert peak_flops("Another", "bf16") is None


class FakeNvml(ModuleType):
    """NVML of a machine with one GPU. ``missing`` are calls that this GPU does not have."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *missing: str) -> None:
        super().__init__("pynvml")
        self.missing = missing

    def nvmlInit(self) -> None:  # noqa: N802
        self.has("nvmlInit")

    def has(self, call: str) -> None:
        if call in self.missing:
            raise self.NVMLError(call)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-abc":
            raise self.NVMLError("not found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        self.has("utilization")
        return SimpleNamespace(gpu=75)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        self.has("power")
        return 350_500

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        return 61


@pytest.mark.parametrize(
    ("nvml", "uuid", "expected"),
    [
        (FakeNvml(), "abc", GpuStatus(0.75, 350.5, 61.0)),
        (FakeNvml("utilization"), "abc", GpuStatus(None, 350.5, 61.0)),
        (FakeNvml("nvmlInit"), "abc", None),
        (FakeNvml(), "another", None),
        (None, "abc", None),
    ],
)
def test_the_sensors_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None, uuid: str, expected: GpuStatus | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        gpu_sensors.torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid)
    )
    assert GpuSensors(torch.device("cuda:0")).read() == expected
    assert GpuSensors(torch.device("cpu")).read() is None


def test_a_description_has_the_links_of_monitors_and_of_the_configuration(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Monitor, "links", {"TensorBoard": "/runs/\udcff", "Traces": "/traces"})
    telemetry = {"enabled": False, "links": {"Traces": "http://traces/\ud800"}}
    written = start(telemetry=telemetry)._observation.description.to_json()
    links = {"TensorBoard": "/runs/?", "Traces": "http://traces/?"}
    assert Description.from_json(written).links == links
