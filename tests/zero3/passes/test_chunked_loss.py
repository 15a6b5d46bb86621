"""The chunked head and loss: the bits of a loop over rows, no logits of all rows, one fetch and one gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import tiering
from tests.zero3.conftest import SEQUENCE, VOCABULARY, Block, batches, config, same_bits
from tests.zero3.plain import least_budgets, starved_soon
from tiering.errors import ConfigError, EngineStateError
from tiering.telemetry import Snapshot
from zero3.engine.engine import Engine
from zero3.loop.backward_events import BackwardEvents
from zero3.passes import moved_activations
from zero3.passes.schedule import PassSchedule

WIDTH, CLASSES = 64, 500
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


def of_a_loop(
    hidden: Tensor,
    head: nn.Module,
    labels: Tensor,
    rows: int,
    transform: Callable[[Tensor], Tensor] | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Tensor:
    """What the docstring of chunked_cross_entropy promises."""
    total: Any = 0
    for part, part_labels in zip(
        hidden.flatten(0, -2).split(rows), labels.flatten().split(rows), strict=True
    ):
        logits = head(part) if transform is None else transform(head(part))
        total = total + functional.cross_entropy(logits.float(), part_labels, reduction="sum", **options)
    return total if reduction == "sum" else total / (labels != -100).sum()


def examples(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(3, 50, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, CLASSES, (3, 50))
    labels[0, 10:45] = -100
    return hidden, labels


def outcome(
    loss: Callable[..., Tensor], hidden: Tensor, head: nn.Module, labels: Tensor, *args: Any, **options: Any
) -> dict[str, Tensor]:
    """The loss, and all gradients of 3 times the loss."""
    torch.manual_seed(1)
    result = loss(hidden, head, labels, *args, **options)
    inputs = {"hidden": hidden} | {
        name: param for name, param in head.named_parameters() if param.requires_grad
    }
    gradients = torch.autograd.grad(3 * result, list(inputs.values()))
    return {"loss": result.detach()} | dict(zip(inputs, gradients, strict=True))


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not one[name].equal(other[name])]


class Dropping(nn.Module):
    """A head with random masks, as an adapter has them."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.linear = nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(self.dropout(hidden))
        return result


class Scaled(nn.Module):
    """A head with a parameter whose gradient autograd expands from one element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.linspace(0.1, 0.5, 3))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(hidden) * self.scales.sum()
        return result


def capped(logits: Tensor) -> Tensor:
    return 5.0 * torch.tanh(logits / 5.0)


@pytest.mark.parametrize("rows", [1, 32, 150, 1000])
@pytest.mark.parametrize(
    ("head", "options"),
    [
        (nn.Linear, {}),
        (nn.Linear, {"reduction": "sum", "label_smoothing": 0.1}),
        (nn.Linear, {"transform": capped}),
        (Dropping, {}),
        (Scaled, {}),
    ],
    ids=["mean", "sum", "capped", "dropout", "scaled"],
)
def test_bits_are_those_of_a_loop(rows: int, head: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = head(WIDTH, CLASSES) if head is nn.Linear else head()
    hidden, labels = examples()
    expected = outcome(of_a_loop, hidden, module, labels, rows, **options)
    chunked = outcome(tiering.chunked_cross_entropy, hidden, module, labels, rows=rows, **options)
    assert differing(chunked, expected) == []


def test_backward_leaves_the_random_state_as_it_was() -> None:
    hidden, labels = examples()
    loss = tiering.chunked_cross_entropy(hidden, Dropping(), labels, rows=32)
    torch.rand(1)
    before = torch.get_rng_state()
    loss.backward()
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_a_head_are_summed_in_fp32(autocast: bool) -> None:
    """In bf16 they are nearer to those of one product than a loop's, and all else has the bits of the loop."""
    torch.manual_seed(0)
    hidden, labels = examples(torch.float32 if autocast else torch.bfloat16)
    head = nn.Linear(WIDTH, CLASSES, bias=False, dtype=hidden.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loop = outcome(of_a_loop, hidden, head, labels, 8)
        whole = outcome(of_a_loop, hidden, head, labels, 1000)
        chunked = outcome(tiering.chunked_cross_entropy, hidden, head, labels, rows=8)
    assert [chunked[name].dtype for name in chunked] == [loop[name].dtype for name in loop]
    assert differing(chunked, loop) == ["weight"]

    def distance(gradients: dict[str, Tensor]) -> float:
        return float((gradients["weight"].double() - whole["weight"].double()).norm())

    assert 0 < distance(chunked) < distance(loop)


def test_backward_runs_with_the_autocast_of_forward() -> None:
    torch.manual_seed(0)
    hidden, labels = examples()
    head = nn.Linear(WIDTH, CLASSES)
    states = []
    for inside in (True, False):
        hidden.grad = None
        head.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = tiering.chunked_cross_entropy(hidden, head, labels, rows=32)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        assert hidden.grad is not None
        states.append({"hidden": hidden.grad, "weight": head.weight.grad, "loss": loss.detach()})
    assert differing(*states) == []
    exact = outcome(of_a_loop, hidden, head, labels, 32)
    assert not exact["loss"].equal(states[0]["loss"])


def test_each_position_predicts_the_next_label() -> None:
    torch.manual_seed(0)
    hidden, labels = examples()
    head = nn.Linear(WIDTH, CLASSES)
    loss = tiering.chunked_cross_entropy(hidden, head, labels, rows=32, shift=True)
    expected = functional.cross_entropy(head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (torch.autograd.grad(loss, hidden)[0][:, -1] == 0).all()


def test_a_frozen_head_gets_no_gradient_and_frozen_rows_neither() -> None:
    torch.manual_seed(0)
    hidden, labels = examples()
    head = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
    frozen = outcome(tiering.chunked_cross_entropy, hidden, head, labels, rows=32)
    head.requires_grad_(True)
    trained = outcome(tiering.chunked_cross_entropy, hidden, head, labels, rows=32)
    assert frozen.keys() == {"loss", "hidden"}
    assert frozen["hidden"].equal(trained["hidden"])
    tiering.chunked_cross_entropy(hidden.detach(), head, labels, rows=32).backward()
    assert head.weight.grad is not None
    assert (3 * head.weight.grad).allclose(trained["weight"])
    with torch.no_grad():
        assert tiering.chunked_cross_entropy(hidden, head, labels, rows=32).equal(trained["loss"])


def test_labels_that_are_all_ignored_give_nan_as_in_torch() -> None:
    hidden, labels = examples()
    head = nn.Linear(WIDTH, CLASSES)
    assert tiering.chunked_cross_entropy(hidden, head, torch.full_like(labels, -100)).isnan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"labels": torch.zeros(3, 49, dtype=torch.int64)},
            r"rows of shape \(3, 50\), but labels .*\(3, 49\)",
        ),
        ({"rows": 0}, "whole number of rows, at least 1, .* not 0 and 'mean'"),
        ({"rows": 2.5}, "not 2.5 and 'mean'"),
        ({"head": nn.Linear(WIDTH, CLASSES).weight}, "needs the module of the head, .* not a Parameter"),
        ({"reduction": "none"}, "not 1024 and 'none'"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    hidden, labels = examples()
    usual = {"head": nn.Linear(WIDTH, CLASSES), "labels": labels}
    with pytest.raises(ConfigError, match=message):
        tiering.chunked_cross_entropy(hidden, **(usual | options))


def test_gradients_of_gradients_are_refused() -> None:
    """Those of the loss would be lost in silence: the gradient would be a constant."""
    hidden, labels = examples()
    loss = tiering.chunked_cross_entropy(hidden, nn.Linear(WIDTH, CLASSES), labels)
    with pytest.raises(EngineStateError, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_a_trained_tensor_outside_of_the_head_is_refused() -> None:
    """It would get no gradient, in silence."""
    hidden, labels = examples()
    head, scale = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.ones(2))
    for factor in (scale, scale.exp()):
        loss = tiering.chunked_cross_entropy(
            hidden, head, labels, transform=lambda logits, factor=factor: logits * factor[0]
        )
        with pytest.raises(ConfigError, match=r"tensor of shape \(2,\) .* Pass a module as head"):
            loss.backward()


class Largest(TorchDispatchMode):
    """The largest number of elements of a tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.numel())
        return result


def test_logits_of_all_rows_never_exist() -> None:
    head = nn.Linear(16, 3000, bias=False)
    hidden, labels = torch.randn(2, 512, 16, requires_grad=True), torch.randint(0, 3000, (2, 512))
    sizes = []
    for loss in (
        lambda: of_a_loop(hidden, head, labels, 1024),
        lambda: tiering.chunked_cross_entropy(hidden, head, labels, rows=64),
    ):
        with Largest() as largest:
            loss().backward()
        sizes.append(largest.elements)
    assert sizes == [1024 * 3000, 64 * 3000]


PEAK = """
import sys, torch, tiering
from pathlib import Path
from torch.nn import functional

def resident(field):
    status = Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) * 1024

rows, tokens, width, classes = map(int, sys.argv[1:])
head = torch.nn.Linear(width, classes, bias=False)
hidden, labels = torch.randn(tokens, width, requires_grad=True), torch.randint(0, classes, (tokens,))
tiering.chunked_cross_entropy(hidden[:4], head, labels[:4]).backward()
head.zero_grad(); hidden.grad = None
before = resident("VmRSS")
tiering.chunked_cross_entropy(hidden, head, labels, rows=rows).backward()
print(resident("VmHWM") - before)
"""


@pytest.mark.slow
def test_the_peak_is_that_of_one_chunk() -> None:
    """4,096 rows of 16,384 classes have 256 MiB of logits, and a chunk of 256 rows has 16 MiB."""
    tokens, width, classes = 4096, 128, 16384
    above = {}
    for rows in (256, tokens):
        run = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, (rows, tokens, width, classes))],
            # Freed tensors go back to the system at once.
            env=os.environ
            | {"PYTHONPATH": str(Path(__file__).parents[3]), "MALLOC_MMAP_THRESHOLD_": "65536"},
            capture_output=True,
            text=True,
            check=True,
        )
        above[rows] = int(run.stdout)
    logits, weight, all_rows = 4 * 256 * classes, 4 * width * classes, 4 * tokens * width
    assert above[tokens] > 2 * 4 * tokens * classes
    # Logits, their softmax and gradient; a gradient of the head and the sum; the gradient of hidden; and a little.
    assert above[256] < 3 * logits + 2 * weight + all_rows + (12 << 20)


class Language(nn.Module):
    """A language model whose head is a large group, apart from the embedding or tied to it."""

    def __init__(self, rows: int, *, tied: bool = False, width: int = 48) -> None:
        super().__init__()
        self.rows = rows
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        normed: Tensor = self.norm(stream)
        return normed

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return tiering.chunked_cross_entropy(self.hidden(tokens), self.head, targets, rows=self.rows)


@pytest.fixture
def start(tmp_path: Path) -> Any:
    engines: list[Engine] = []

    def initialize(rows: int, *, tied: bool = False, **settings: Any) -> Engine:
        torch.manual_seed(0)
        settings = {"precision": "fp32", "accumulation": 1, "device_budget": "1GiB"} | settings
        settings = {"host_budget": "1GiB", "nvme_budget": "1GiB"} | settings
        engine, *_ = tiering.initialize(model=Language(rows, tied=tied), config=config(tmp_path, **settings))
        engines.append(engine)
        return engine

    yield initialize
    for engine in engines:
        engine.close()


def trained(engine: Engine, steps: int = 3) -> tuple[dict[str, Tensor], Snapshot]:
    for number, batch in enumerate(batches(steps * engine.gradient_accumulation_steps())):
        if number % 2:
            # Other shapes, and so another number of chunks.
            batch = tuple(each[:1] for each in batch)
        engine.backward(engine(*batch))
        engine.step()
    return engine.state_dict(), engine.snapshot()


ROWS_OF_A_BATCH = 2 * SEQUENCE


@pytest.mark.one_of(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"accumulation": 2}, {"step_in_backward": True, "clip": 0.0}], ids=str
)
def test_the_head_is_fetched_once_per_pass(
    start: Callable[..., Engine], options: dict[str, Any], tied: bool
) -> None:
    """Bytes per step do not depend on the number of chunks, and no placement changes a bit."""
    runs = {}
    for rows in (ROWS_OF_A_BATCH, 3):
        device, _ = trained(start(rows, tied=tied, **options))
        state, snapshot = trained(start(rows, tied=tied, **STREAMED, **options))
        assert not same_bits(device, state)
        runs[rows] = [step.read_bytes for step in snapshot.steps]
    assert runs[3] == runs[ROWS_OF_A_BATCH]
    assert min(runs[3]) > 0


def test_the_head_is_updated_before_the_blocks(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks count as one forward: a group that is called more than once waits for the end of backward."""
    done, on_group_done = [], BackwardEvents.on_group_done

    def noted(events: BackwardEvents, group: Any, final: bool) -> None:
        done.append((group.name, final))
        on_group_done(events, group, final)

    monkeypatch.setattr(BackwardEvents, "on_group_done", noted)
    trained(start(3, step_in_backward=True, clip=0.0, threshold=0, **STREAMED), steps=1)
    assert done[0] == ("head", True)


def test_the_smallest_budgets_have_room(start: Callable[..., Engine]) -> None:
    least = least_budgets(start(3, **STREAMED).plan)
    smallest = {"host_budget": least.host, "device_budget": least.device}
    with starved_soon():
        states = [trained(start(3, **options))[0] for options in ({}, STREAMED | smallest)]
    assert not same_bits(*states)


def test_a_tied_head_gives_one_part_of_the_gradient(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part from all chunks and one from the embedding, and autograd adds up nothing."""
    part, parts = PassSchedule.gradient_part, []

    def noted(schedule: PassSchedule, group: Any, piece: Any, param: nn.Parameter) -> None:
        parts.append(piece.name)
        part(schedule, group, piece, param)

    monkeypatch.setattr(PassSchedule, "gradient_part", noted)
    trained(start(3, tied=True, **STREAMED), steps=2)
    assert parts == 4 * ["embedding.weight"]


def test_the_loss_may_be_computed_outside_of_the_model(start: Callable[..., Engine]) -> None:
    """As compute_loss of a Trainer does: the hidden states come from a part of the model."""

    def outside(engine: Engine) -> tuple[dict[str, Tensor], Snapshot]:
        model = engine.module
        for tokens, targets in batches(3):
            loss = tiering.chunked_cross_entropy(model.hidden(tokens), model.head, targets, rows=5)
            engine.backward(loss)
            engine.step()
        return engine.state_dict(), engine.snapshot()

    def inside(engine: Engine) -> dict[str, Tensor]:
        for batch in batches(3):
            engine.backward(engine(*batch))
            engine.step()
        return engine.state_dict()

    expected = inside(start(5))
    for options in ({}, STREAMED):
        state, snapshot = outside(start(5, **options))
        assert snapshot.step == 3 and not same_bits(state, expected)


@pytest.mark.parametrize("place", ["host", "nvme"])
def test_hidden_states_leave_the_device(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(moved_activations, "SMALLEST", 2048)
    expected, _ = trained(start(3))
    state, snapshot = trained(start(3, activations=place, activation_budget="64KiB", **STREAMED))
    assert not same_bits(state, expected)
    assert snapshot.activations is not None and snapshot.activations.moved > 0


def test_an_error_in_a_chunk_leaves_the_engine_as_it_was(start: Callable[..., Engine]) -> None:
    engine, plain = start(3, **STREAMED), start(3)
    (tokens, targets), *_ = batches(1)
    calls: list[int] = []

    def fail(module: nn.Module, args: Any) -> None:
        calls.append(len(calls))
        if len(calls) == fails_at:
            raise RuntimeError("in the head")

    def train() -> None:
        calls.clear()
        engine.backward(engine(tokens, targets))

    # In forward, and in backward.
    for fails_at in (3, ROWS_OF_A_BATCH // 3 + 3):
        handle = engine.module.head.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the head"):
            train()
        handle.remove()
        assert len(calls) == fails_at
    states = [trained(each)[0] for each in (engine, plain)]
    assert not same_bits(*states)
