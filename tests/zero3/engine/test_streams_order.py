"""The engine on a device whose work is queued: everything that touches the same bytes is put in order, everywhere.

On the fake device (see fake_device.py) copies, kernels, NVMe transfers and operations of torch are noted with what they
wait for; bits are those of the CPU as the device. Events and transfers say of themselves that they are not over until
somebody waits for them, or that they are at once, or the one or the other by chance: the program has ways for both.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiering
from tests.fakes.fake_device import FakeDevice
from tests.fakes.gpu.streams import Answers, FakeStream, at_once, by_chance, never
from tests.zero3.conftest import SmallModel, batches, same_bits
from tests.zero3.plain import least_budgets
from zero3.checkpoint import rank_share
from zero3.checkpoint.saving import Saver
from zero3.device import tiers
from zero3.engine.engine import Engine
from zero3.passes import moved_activations

Start = Callable[..., Engine]
Script = Callable[[Engine, Path], Iterator[Tensor]]  # trains, and yields losses that nobody has waited for

HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
NVME = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
TIGHT = {"device_budget": "400KiB", "prefetch": 0}
LEAST = {"least": True}  # budgets, in which the plan could be made
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": HOST,
    "host, room for few groups": HOST | TIGHT | {"threshold": 0},
    "nvme": NVME | {"sub_group_size": 5000},
    "nvme, room for few groups": NVME | TIGHT | {"threshold": 0},
    "nvme, the least room": NVME | LEAST | {"threshold": 0, "sub_group_size": 5000},
    "host, the least room": HOST | LEAST | {"threshold": 0},
    "device": {},
    "parameters on the device, state on nvme": {"offload_optimizer": "nvme", "cache_in_host": False},
    "parameters on the device, state in host memory": {"offload_optimizer": "cpu"},
    "parameters on nvme, state in host memory": {
        "offload_param": "nvme",
        "offload_optimizer": "cpu",
        "cache_in_host": False,
    },
    "a share of the state on the device": HOST | {"ratio": 0.5, "sub_group_size": 5000},
    "parameters on the device, state visits it": {
        "offload_optimizer": "cpu",
        "update_on_device": 0.6,
        "sub_group_size": 5000,
    },
    "state visits the device": HOST | {"update_on_device": 0.6, "sub_group_size": 5000},
    "activations in host memory": HOST | {"activations": "host", "activation_budget": "1MiB"},
    "activations on nvme": NVME | {"activations": "nvme", "activation_budget": "64KiB"},
    "activations without room": NVME
    | LEAST
    | {"threshold": 0, "activations": "auto", "activation_budget": "64KiB"},
}
# Of each way in which state lives, and of each thing that is done to it, one with most to wait for.
FIRST = [
    ("host", "accumulation"),
    ("host, room for few groups", "evaluations"),
    ("host, room for few groups", "saves"),
    ("nvme, room for few groups", "failures"),
    ("nvme, the least room", "stepped in backward"),
    ("nvme, the least room", "begun in backward"),
    ("parameters on the device, state on nvme", "edits of split state"),
    ("device", "saves"),
    ("parameters on the device, state in host memory", "edits"),
    ("parameters on nvme, state in host memory", "overflows"),
    ("a share of the state on the device", "split state"),
    ("state visits the device", "updates"),
    ("activations on nvme", "failures"),
    ("activations without room", "accumulation"),
]
ANSWERS: dict[str, Callable[[], tuple[Answers, Answers]]] = {
    "never": lambda: (never, never),
    "at once": lambda: (at_once, at_once),
    "copies at once": lambda: (at_once, never),
    "by chance": lambda: (by_chance(5), by_chance(6)),
}


@pytest.fixture(autouse=True)
def saves_that_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In many chunks, so that training goes on meanwhile."""
    finish = Saver._finish

    def late(*args: Any) -> None:
        time.sleep(0.001)
        finish(*args)

    monkeypatch.setattr(rank_share, "CHUNK", 4096)
    monkeypatch.setattr(Saver, "_finish", late)


@pytest.fixture(autouse=True)
def small_tensors_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_activations, "SMALLEST", 1024)


@pytest.fixture(autouse=True)
def exact_sqrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's square root on a CPU is not rounded correctly, a GPU's is."""
    sqrt = torch.Tensor.sqrt
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda tensor: sqrt(tensor.double()).float())


def backward(engine: Engine, loss: Tensor) -> None:
    """Where that will do, the engine does not get the loss: it would wait for its value in ``step``, and so for all."""
    if engine.settings.gradient_accumulation_steps == 1 and engine.settings.precision != "fp16":
        loss.backward()
    else:
        engine.backward(loss)


def update(engine: Engine, pairs: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """One, over all its micro-batches."""
    for _ in range(engine.settings.gradient_accumulation_steps):
        tokens, targets = next(pairs)
        loss = engine(tokens, targets)
        yield loss.detach()
        backward(engine, loss)
        engine.step()


def updates(engine: Engine, directory: Path) -> Iterator[Tensor]:
    pairs = batches(100)
    for _ in range(3):
        yield from update(engine, pairs)


def evaluations(engine: Engine, directory: Path) -> Iterator[Tensor]:
    """Between backward and step, and after it: nobody waits for a forward without gradients."""
    pairs = batches(100)
    for _ in range(2):
        tokens, targets = next(pairs)
        for _ in range(engine.settings.gradient_accumulation_steps):
            backward(engine, engine(tokens, targets))
            engine.eval()
            with torch.no_grad():
                yield engine(tokens, targets)
            engine.train()
            engine.step()
        with torch.no_grad():
            yield engine(tokens, targets)


def edits(engine: Engine, directory: Path) -> Iterator[Tensor]:
    """By the user: of parameters, masters, moments and gradients, while forwards may still be under way."""
    pairs = batches(100)
    block = engine.module.blocks[1]
    for _ in range(2):
        handle = block.register_forward_pre_hook(_halve)
        yield from update(engine, pairs)
        handle.remove()
        with torch.no_grad():
            yield engine(*next(pairs))
        with torch.no_grad(), tiering.gathered(block.up.weight, modify=True):
            block.up.weight.mul_(0.5)
        with torch.no_grad():
            yield engine(*next(pairs))
        name = "blocks.0.down.weight"
        engine.set_fp32_parameter(name, engine.get_fp32_parameter(name) * 2)
        tokens, targets = next(pairs)
        loss = engine(tokens, targets)
        yield loss.detach()
        backward(engine, loss)
        other = "blocks.2.up.weight"
        engine.set_fp32_gradient(other, torch.ones(engine.module.blocks[2].up.weight.shape) / 8)
        engine.set_fp32_gradient(name, engine.get_fp32_gradient(name) / 2)
        engine.step()
        engine.set_fp32_state(name, "exp_avg", engine.get_fp32_state(name, "exp_avg") / 2)
    yield from update(engine, pairs)


def _halve(block: Any, args: Any) -> None:
    """In forward."""
    with torch.no_grad():
        block.down.weight.mul_(0.5)


def saves(engine: Engine, directory: Path) -> Iterator[Tensor]:
    """In the background, and what was saved is loaded."""
    pairs = batches(100)
    yield from update(engine, pairs)
    engine.save_checkpoint(directory, tag="one", background=True)
    yield from update(engine, pairs)
    with torch.no_grad():
        yield engine(*next(pairs))
    engine.load_checkpoint(directory, tag="one")
    yield from update(engine, pairs)
    engine.save_checkpoint(directory, tag="two")


def failures(engine: Engine, directory: Path) -> Iterator[Tensor]:
    """An exception in forward, and one in backward, with bytes under way."""
    pairs = batches(100)
    yield from update(engine, pairs)
    hooks = [
        lambda: engine.module.blocks[1].register_forward_hook(_fail),
        lambda: engine.module.blocks[1].register_full_backward_hook(_fail),
    ]
    for hook in hooks:
        handle = hook()
        with pytest.raises(OSError, match="on purpose"):
            backward(engine, engine(*next(pairs)))
        handle.remove()
        engine.zero_grad()
        yield from update(engine, pairs)


def _fail(*args: Any) -> None:
    raise OSError("on purpose")


def without_sync(engine: Engine, directory: Path) -> Iterator[Tensor]:
    pairs = batches(100)
    for _ in range(2):
        with engine.no_sync():
            loss = engine(*next(pairs))
            yield loss.detach()
            engine.backward(loss)
        yield from update(engine, pairs)


def streams(engine: Engine, directory: Path) -> Iterator[Tensor]:
    """Evaluations on a stream of the user's own, who puts them in order with training."""
    pairs, device = batches(100), engine._tiers.streams
    for _ in range(2):
        yield from update(engine, pairs)
        if device is None:
            with torch.no_grad():
                yield engine(*next(pairs))
            continue
        mine = FakeStream(device.compute.device, "of the user's")
        mine.wait_for(device.compute.record())
        with mine.running(), torch.no_grad():
            loss = engine(*next(pairs))
        device.compute.wait_for(mine.record())
        mine.keep(loss)
        yield loss


def overflows(engine: Engine, directory: Path) -> Iterator[Tensor]:
    pairs = batches(100)
    for number in range(4):
        loss = engine(*next(pairs))
        yield loss.detach()
        backward(engine, loss * 1e6 if number == 2 else loss)
        engine.step()


EARLY = {"step_in_backward": True, "clip": 0.0}
SCRIPTS: dict[str, tuple[Script, dict[str, Any]]] = {
    "updates": (updates, {"accumulation": 1}),
    "accumulation": (updates, {"accumulation": 2}),
    "fp32": (updates, {"accumulation": 2, "precision": "fp32"}),
    "stepped in backward": (updates, {"accumulation": 1} | EARLY),
    "begun in backward": (updates, {"accumulation": 1, "swap_versions": 2} | EARLY),
    "split state": (updates, {"accumulation": 1, "state": "split+bf16"}),
    "evaluations": (evaluations, {"accumulation": 1}),
    "edits": (edits, {"accumulation": 1}),
    "saves": (saves, {"accumulation": 1}),
    "failures": (failures, {"accumulation": 1}),
    "without sync": (without_sync, {"accumulation": 1}),
    "edits of split state": (edits, {"accumulation": 1, "state": "split+bf16"}),
    "streams of the user's": (streams, {"accumulation": 1}),
    "overflows": (overflows, {"accumulation": 1, "precision": "fp16", "fp16": {"initial_scale_power": 8}}),
}


ASKING = ("accumulation", "stepped in backward", "evaluations", "saves", "failures")
"""In which most depends on what is over when somebody looks."""


class Checkpointed(SmallModel):
    """Its blocks are computed twice."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=self.reentrant)
        logits = self.head(self.norm(stream)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PartlyFrozen(SmallModel):
    """Trained and frozen groups beside each other."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)


class LossInChunks(SmallModel):
    """The logits of each chunk are computed twice."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens) + self.position.weight
        for block in self.blocks:
            stream = block(stream)
        return tiering.chunked_cross_entropy(self.norm(stream), self.head, targets, rows=7)


MODELS: dict[str, Callable[[], SmallModel]] = {
    "small": SmallModel,
    "partly frozen": PartlyFrozen,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "loss in chunks": LossInChunks,
}


class Left(NamedTuple):
    """What a run left behind."""

    losses: list[float]
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]


@pytest.fixture
def outcome_of(start: Start, tmp_path: Path) -> Callable[..., Left]:
    """``outcome_of(script, model, placement)`` is what such a run leaves behind."""
    numbers = itertools.count()

    def run(script: str, model: str = "small", placement: str = "device") -> Left:
        steps, options = SCRIPTS[script]
        torch.manual_seed(3)
        options = PLACEMENTS[placement] | options
        if options.pop("least", False):
            (engine := start(MODELS[model](), **options)).close()
            budgets = least_budgets(engine.plan)
            options |= {"host_budget": budgets.host, "device_budget": budgets.device}
            torch.manual_seed(3)
        engine = start(MODELS[model](), **options)
        losses = list(steps(engine, tmp_path / f"saved{next(numbers)}"))
        weights, masters = copy.deepcopy(engine.state_dict()), engine.master_state_dict()
        engine.close()
        return Left([loss.item() for loss in losses], weights, masters)

    return run


_expected: dict[
    tuple[str, str], Left
] = {}  # of runs with the CPU as the device, where placement changes nothing


def check(
    outcome_of: Callable[..., Left], gpu: FakeDevice, script: str, placement: str, model: str = "small"
) -> None:
    """Nothing is out of order on ``gpu``, and the bits are those of the CPU."""
    key = script, model
    if key not in _expected:
        _expected[key] = outcome_of(*key)
    with pytest.MonkeyPatch.context() as patch, gpu:
        gpu.run_engines(patch)
        outcome = outcome_of(*key, placement)
    assert gpu.operations > 100
    assert outcome.losses == _expected[key].losses
    assert same_bits(outcome.weights, _expected[key].weights) == []
    assert same_bits(outcome.masters, _expected[key].masters) == []


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("placement", "script"), FIRST)
def test_what_touches_the_same_bytes_is_in_order(
    outcome_of: Callable[..., Left], placement: str, script: str
) -> None:
    check(outcome_of, FakeDevice(never, never), script, placement)


@pytest.mark.parametrize(
    ("placement", "script"),
    [
        ("host, room for few groups", "streams of the user's"),
        pytest.param("nvme, room for few groups", "failures", marks=pytest.mark.slow),
    ],
)
def test_without_a_slab(
    outcome_of: Callable[..., Left], monkeypatch: pytest.MonkeyPatch, placement: str, script: str
) -> None:
    """As where torch cannot exchange the memory of storages: torch allocates what is unsharded."""
    monkeypatch.setattr(tiers, "can_exchange", lambda device: False)
    check(outcome_of, FakeDevice(never, never), script, placement)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "answers"),
    [
        (script, answers)
        for script, answers in itertools.product(SCRIPTS, ANSWERS)
        if answers == "never" or script in ASKING
    ],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_everything_is_in_order_everywhere(
    outcome_of: Callable[..., Left], placement: str, script: str, answers: str
) -> None:
    check(outcome_of, FakeDevice(*ANSWERS[answers]()), script, placement)


@pytest.mark.parametrize(
    ("placement", "model"),
    [
        ("nvme, room for few groups", "loss in chunks"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in itertools.product(PLACEMENTS, MODELS)),
    ],
)
def test_what_is_computed_twice(outcome_of: Callable[..., Left], placement: str, model: str) -> None:
    gpu = FakeDevice(never, never)
    check(outcome_of, gpu, "accumulation", placement, model)
    # The CPU steps tiles on NVMe in runs of tasks, although the device is a GPU.
    assert gpu.runs or not placement.startswith("nvme")


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("placement", "script", "lockable"),
    [
        ("host, room for few groups", "accumulation", 0),
        ("nvme, room for few groups", "failures", 1 << 20),
        pytest.param("state visits the device", "updates", 0, marks=pytest.mark.slow),
        pytest.param("activations on nvme", "failures", 1 << 20, marks=pytest.mark.slow),
    ],
)
def test_memory_that_cannot_be_pinned(
    outcome_of: Callable[..., Left],
    caplog: pytest.LogCaptureFixture,
    placement: str,
    script: str,
    lockable: int,
) -> None:
    """Nothing of it, or some windows: copies of the other memory are as right, and the CPU waits for them."""
    gpu = FakeDevice(never, never, lockable=lockable)
    check(outcome_of, gpu, script, placement)
    (warning,) = (message for message in caplog.messages if "are pageable" in message)
    assert ("host arena, 0 B are pinned" in warning) is (lockable == 0)
    assert gpu.locked == {}, "close() unpins"


@pytest.mark.parametrize("placement", ["host, room for few groups", "device"])
def test_forward_and_backward_never_make_the_cpu_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    with FakeDevice(by_chance(2)) as gpu:
        gpu.run_engines(monkeypatch)
        engine = start(**PLACEMENTS[placement])
        for tokens, targets in batches(4):
            before = len(gpu.waits)
            engine.backward(engine(tokens, targets))
            assert gpu.waits[before:] == []
            engine.step()
        assert gpu.waits, "the norm is known in step, so somebody has waited"
