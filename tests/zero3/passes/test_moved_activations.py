"""Activations that leave the device: the same bits, bytes as counted by hand, any order of graphs, every failure."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import tiering
from tests.zero3.conftest import SmallModel, batches, config, same_bits
from tiering.placement.workload import Tier
from tiering.storage.aio import AioContext, Fault, FaultPlan
from zero3.deepspeed import checkpointing
from zero3.device import heap, tiers
from zero3.engine.engine import Engine
from zero3.passes import moved_activations
from zero3.passes.moved_activations import MovedActivations

MIB = 1 << 20
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


class Chain(nn.Module):
    """``links`` tensors of ``nbytes``, each of which autograd saves once, and a weight of the same size."""

    def __init__(self, links: int, nbytes: int = MIB) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, nbytes // 4))
        self.links = links

    def forward(self, scale: float) -> Tensor:
        stream = self.weight * scale
        for _ in range(self.links):
            stream = stream.tanh()
        return stream.square().mean()


@pytest.fixture
def start(tmp_path: Path) -> Any:
    engines: list[Engine] = []

    def initialize(model: nn.Module, **settings: Any) -> Engine:
        settings = {"precision": "fp32", "accumulation": 1, "host_budget": "1GiB"} | settings
        settings = {"device_budget": "1GiB", "nvme_budget": "1GiB"} | settings
        engine, *_ = tiering.initialize(model=model, config=config(tmp_path, **settings))
        engines.append(engine)
        return engine

    yield initialize
    for engine in engines:
        engine.close()


def moved_by(engine: Engine) -> MovedActivations:
    moved = engine._schedule._moved
    assert moved is not None
    return moved


def update(engine: Engine, *inputs: Any) -> float:
    loss = engine(*inputs)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def test_bytes_are_those_of_the_formula_and_the_result_has_the_same_bits(
    start: Callable[..., Engine],
) -> None:
    """24 saved tensors, of which the last ones stay in half of the memory; the others are written and read once."""
    plain, engine = (
        start(Chain(24), activation_budget=8 * MIB, activations=place, **NVME) for place in ("device", "nvme")
    )
    for scale in (1.0, 1.5, 2.0):
        assert update(engine, scale) == update(plain, scale)
    assert not same_bits(engine.state_dict(), plain.state_dict())
    moved = moved_by(engine)
    # 24 results of tanh. The weight, and what is smaller than a MiB, stay.
    assert moved.copied_bytes == 3 * 24 * MIB
    assert moved.written_bytes == moved.read_bytes == 3 * (24 - 4) * MIB
    gc.collect()
    assert moved.used == {"host": 0, "nvme": 0}
    assert engine.plan.contents(Tier.HOST)["activations"] == 8 * MIB


def test_what_backward_needs_next_is_read_ahead(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 tensors on NVMe, all but the first one are on their way before backward asks for them."""
    fetch, waits = MovedActivations._fetch, []

    def watched(moved: MovedActivations, copy: Any) -> Any:
        waits.append(copy.extent is not None and copy.lease is None)
        return fetch(moved, copy)

    monkeypatch.setattr(MovedActivations, "_fetch", watched)
    engine = start(Chain(24), activation_budget=8 * MIB, activations="nvme", **NVME)
    update(engine, 1.0)
    # The square and the last tanh have saved one tensor.
    assert len(waits) == 25 and sum(waits) <= 1


@pytest.mark.slow
def test_a_late_write_does_not_hold_back_the_room_of_the_others(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = FaultPlan((Fault("write", delay=2.0),))
    monkeypatch.setattr(tiers, "AioContext", partial(AioContext, fault=plan))
    # The optimizer state is in memory: the swap space has activations alone.
    engine = start(Chain(24), activations="nvme", activation_budget=8 * MIB, offload_optimizer="nvme")
    loss = engine(1.0)
    moved = moved_by(engine)
    assert moved.written_bytes == 20 * MIB and not moved._writes[0].done()
    engine.backward(loss)


def test_the_process_is_looked_at_when_moving_frees_memory(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward that of the tensors, in backward that of gradients as large."""
    looks: list[heap.FreedMemory] = []
    monkeypatch.setattr(heap.FreedMemory, "look", lambda self: looks.append(self))
    engine = start(Chain(4), activations="host", activation_budget=64 * MIB)
    loss = engine(1.0)
    assert len(looks) == 4
    engine.backward(loss)
    # The last tensor is given back for two operations.
    assert len(looks) == 9


def test_what_moves_is_seen(start: Callable[..., Engine], tmp_path: Path) -> None:
    """In the snapshot by tier, in each step record, as a cause of stalls, and in a trace."""
    # The optimizer state is in memory: the swap space has activations alone.
    engine = start(Chain(24), activations="nvme", activation_budget=8 * MIB, offload_optimizer="nvme")
    for number in (1, 2, 3):
        if number == 2:
            engine.trace(tmp_path / "trace.json")
        loss = engine(float(number))
        during = {tier.name: tier.by_kind.get("activations", 0) for tier in engine.snapshot().tiers}
        # 24 results of tanh, of which 4 are in memory: besides what is being written, and room for reads of a piece.
        assert (during["device"], during["nvme"]) == (0, 20 * MIB)
        assert 5 * MIB <= during["host"] <= 8 * MIB
        engine.backward(loss)
        nvme = engine.snapshot().tiers[2]
        assert (nvme.by_kind, nvme.used, nvme.peak) == ({}, 0, 20 * MIB)
        engine.step()
    snapshot = engine.snapshot()
    assert [
        (s.activation_bytes, s.activation_written_bytes, s.activation_read_bytes) for s in snapshot.steps
    ] == 3 * [(24 * MIB, 20 * MIB, 20 * MIB)]
    status = snapshot.activations
    assert status is not None
    assert (status.moved, status.written, status.read) == (72 * MIB, 60 * MIB, 60 * MIB)
    assert snapshot.stalls["activations"] > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for kind in ("read", "write"):
        spans = [event for event in events if event.get("cat") == kind]
        assert {span["name"] for span in spans} == {"activations"}
        assert sum(span["args"]["bytes"] for span in spans) == 20 * MIB


def test_parameters_and_buffers_stay(start: Callable[..., Engine]) -> None:
    class Scaled(Chain):
        def __init__(self) -> None:
            super().__init__(2)
            self.scale: Tensor
            self.register_buffer("scale", torch.linspace(0, 2, MIB // 4))

        def forward(self, scale: float) -> Tensor:
            # Autograd saves the weight, and the buffer.
            return super().forward(scale) + (self.weight * self.weight * self.scale).mean()

    engine = start(Scaled(), activation_budget=16 * MIB, activations="host")
    update(engine, 1.0)
    assert moved_by(engine).copied_bytes == 2 * MIB


def test_in_host_memory_what_fits_is_moved_and_the_rest_stays(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    plain, engine = (
        start(Chain(12), activations=place, activation_budget=8 * MIB) for place in ("device", "host")
    )
    for scale in (1.0, 2.0):
        assert update(engine, scale) == update(plain, scale)
    assert not same_bits(engine.state_dict(), plain.state_dict())
    assert moved_by(engine).copied_bytes == 2 * 8 * MIB
    assert caplog.text.count("a saved tensor of 1.00 MiB stays on the device") == 1
    assert "raise tiering.activation_budget, or set tiering.activations to nvme" in caplog.text


@pytest.mark.slow
def test_a_tensor_larger_than_the_memory_streams_through_it(start: Callable[..., Engine]) -> None:
    plain, engine = (
        start(Chain(3, 8 * MIB + 4096), activations=place, activation_budget=2 * MIB, **NVME)
        for place in ("device", "nvme")
    )
    for scale in (1.0, 2.0):
        assert update(engine, scale) == update(plain, scale)
    assert not same_bits(engine.state_dict(), plain.state_dict())
    moved = moved_by(engine)
    assert moved.written_bytes == 2 * 3 * (8 * MIB + 4096)
    # The square and the last tanh have saved one tensor. It is read for each of them.
    assert moved.read_bytes == 2 * 4 * (8 * MIB + 4096)


@pytest.mark.slow
def test_graphs_go_backward_in_any_order(start: Callable[..., Engine]) -> None:
    """First in, first out, as in a pipeline schedule; swap space that one graph has left serves the next one."""
    scales = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)
    results = []
    for place in ("device", "nvme"):
        engine = start(Chain(12), activations=place, activation_budget=8 * MIB, accumulation=8, **NVME)
        waiting: list[Tensor] = []
        for scale in scales:
            waiting.append(engine(scale))
            if len(waiting) == 4:
                engine.backward(waiting.pop(0))
                engine.step()
        while waiting:
            engine.backward(waiting.pop(0))
            engine.step()
        results.append(engine.state_dict())
    assert not same_bits(*results)
    swap = engine._tiers.swap
    assert swap is not None
    # Of four graphs of twelve: no more than one graph is lost to fragmentation.
    activations = swap.capacity - engine.plan.total(Tier.NVME) + 8 * MIB
    assert activations <= 5 * 12 * MIB


def test_a_graph_that_is_kept_is_used_again(start: Callable[..., Engine]) -> None:
    gradients = []
    for place in ("device", "nvme"):
        engine = start(Chain(12), activations=place, activation_budget=8 * MIB, **NVME)
        loss = engine(1.0)
        loss.backward(retain_graph=True)
        loss.backward()
        engine.step()
        gradients.append(engine.state_dict())
    assert not same_bits(*gradients)


def in_turn(engine: Engine, number: int) -> None:
    for batch in batches(number):
        engine.backward(engine(*batch))
        engine.step()


def under_autocast(engine: Engine, number: int) -> None:
    for batch in batches(number):
        with torch.autocast("cpu", torch.bfloat16):
            loss = engine(*batch)
        engine.backward(loss)
        engine.step()


def twice_through_each_graph(engine: Engine, number: int) -> None:
    for batch in batches(number):
        loss = engine(*batch)
        loss.backward(retain_graph=True)
        loss.backward()
        engine.step()


def first_in_first_out(engine: Engine, number: int) -> None:
    """As a stage of a pipeline with one forward, one backward: four graphs in flight."""
    waiting: list[Tensor] = []
    for batch in batches(number):
        waiting.append(engine(*batch))
        if len(waiting) == 4:
            engine.backward(waiting.pop(0))
            engine.step()
    for loss in waiting:
        engine.backward(loss)
        engine.step()


@pytest.mark.one_of(3)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("place", ["host", "nvme"])
@pytest.mark.parametrize(
    ("train", "options"),
    [
        (in_turn, {"accumulation": 4}),
        (in_turn, {"compiled": True}),
        (under_autocast, {}),
        (twice_through_each_graph, {}),
        (first_in_first_out, {"accumulation": 8}),
        (first_in_first_out, {"accumulation": 8, "compiled": True}),
    ],
    ids=["accumulation", "compiled", "autocast", "retained", "1F1B", "1F1B, compiled"],
)
def test_no_way_to_train_changes_a_bit(
    start: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    train: Callable[[Engine, int], None],
    options: dict[str, Any],
    place: str,
) -> None:
    monkeypatch.setattr(moved_activations, "SMALLEST", 2048)
    options = dict(options)
    compiled = options.pop("compiled", False)
    states = []
    for activations in ("device", place):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = SmallModel()
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        engine = start(model, activations=activations, activation_budget="256KiB", **NVME, **options)
        train(engine, 8)
        states.append(engine.state_dict())
    assert not same_bits(*states)
    moved = moved_by(engine)
    assert moved.copied_bytes > 0 and (moved.written_bytes > 0) == (place == "nvme")
    if place == "nvme":
        # What the blocks save is moved, compiled or not, and not only what is saved around them.
        assert moved.copied_bytes > 8 * 3 * 2 * 16 * 4 * 48 * (2 if train is under_autocast else 4)
    gc.collect()
    assert moved.used == {"host": 0, "nvme": 0}


def test_a_saved_tensor_that_was_changed_is_refused_as_torch_does(start: Callable[..., Engine]) -> None:
    class Edited(Chain):
        def forward(self, scale: float) -> Tensor:
            stream = (self.weight * scale).tanh()
            result = stream.square().mean()
            stream.add_(1.0)
            return result

    engine = start(Edited(1), activations="host", activation_budget=8 * MIB)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine(1.0).backward()
    # Not changed between its uses, but after an earlier copy: each use has its own bytes.

    class Reused(Chain):
        def forward(self, scale: float) -> Tensor:
            stream = self.weight * scale
            buffer = torch.empty_like(stream)
            with torch.no_grad():
                torch.sin(stream, out=buffer)
            first = (stream * buffer).mean()
            return first + (stream * buffer.clone().mul_(2.0)).mean()

    plain, engine = (
        start(Reused(1), activations=place, activation_budget=16 * MIB) for place in ("device", "host")
    )
    assert update(engine, 1.0) == update(plain, 1.0)
    assert not same_bits(engine.state_dict(), plain.state_dict())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_under_checkpointing_the_inputs_of_blocks_are_moved(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, place: str, reentrant: bool
) -> None:
    monkeypatch.setattr(moved_activations, "SMALLEST", 2048)

    class Checkpointed(SmallModel):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            stream = self.embedding(tokens) + self.position.weight
            for block in self.blocks:
                stream = checkpoint(block, stream, use_reentrant=reentrant)
            return nn.functional.cross_entropy(self.head(self.norm(stream)).flatten(0, 1), targets.flatten())

    states = []
    for where in ("device", place):
        torch.manual_seed(0)
        engine = start(Checkpointed(), activations=where, activation_budget="32KiB", **NVME)
        for batch in batches(3):
            update(engine, *batch)
        states.append(engine.state_dict())
    assert not same_bits(*states)
    # The inputs of three blocks, and none of the insides of a block: of the head, and of the loss.
    moved = moved_by(engine)
    inputs = 3 * 2 * 16 * 48 * 4
    assert moved.copied_bytes // 3 >= inputs
    insides = 2 * 16 * 4 * 48 * 4
    assert moved.copied_bytes // 3 < inputs + 3 * insides + 2 * 2 * 16 * 600 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_recomputation_saves_stays(start: Callable[..., Engine], reentrant: bool) -> None:
    class Link(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(512))

        def forward(self, stream: Tensor) -> Tensor:
            return (stream.view(-1, 512) * self.weight).tanh().tanh().view(-1)

    class Checkpointed(Chain):
        def __init__(self) -> None:
            super().__init__(1)
            self.blocks = nn.ModuleList(Link() for _ in range(3))

        def forward(self, scale: float) -> Tensor:
            stream = self.weight * scale
            for block in self.blocks:
                stream = checkpoint(block, stream, use_reentrant=reentrant)
            return stream.square().mean()

    plain, engine = (
        start(Checkpointed(), activations=place, activation_budget=16 * MIB, threshold=0)
        for place in ("device", "host")
    )
    assert update(engine, 1.0) == update(plain, 1.0)
    assert not same_bits(engine.state_dict(), plain.state_dict())
    # The inputs of three checkpoints, and that of the square.
    assert moved_by(engine).copied_bytes == 4 * MIB


def test_tensors_of_one_storage_that_change_one_after_the_other(start: Callable[..., Engine]) -> None:
    """As the gates of an LSTM: no version is shared, and autograd has saved the first when the second changes."""

    class Gated(Chain):
        def forward(self, scale: float) -> Tensor:
            first, second = (self.weight * scale).unsafe_chunk(2)
            return (first.sigmoid_() * second.tanh_()).mean()

    plain, engine = (
        start(Gated(1), activations=place, activation_budget=16 * MIB) for place in ("device", "host")
    )
    assert update(engine, 1.0) == update(plain, 1.0)
    assert not same_bits(engine.state_dict(), plain.state_dict())
    assert moved_by(engine).copied_bytes > 0


def test_what_save_on_cpu_moves_is_not_moved_twice(
    start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(Chain(12), activations="host", activation_budget=16 * MIB)
    for _ in range(2):
        with save_on_cpu():
            loss = engine(1.0)
        engine.backward(loss)
        engine.step()
    assert moved_by(engine).copied_bytes == 0
    (warning,) = [record.message for record in caplog.records if "save_on_cpu" in record.message]
    assert warning == (
        "tiering.activations moves no activation of this model: torch's save_on_cpu is active around it, and keeps"
        " copies of them in host memory. Remove it, or set tiering.activations to 'device'"
    )


def test_deepspeeds_call_for_checkpoints_in_host_memory_is_followed(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero3.deepspeed.checkpointing._options", None)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    engine = start(Chain(4), activation_budget=8 * MIB)
    assert engine.settings.tiering.activations == "host"
    update(engine, 1.0)
    assert moved_by(engine).copied_bytes == 4 * MIB
