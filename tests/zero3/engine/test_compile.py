"""torch.compile: blocks compiled in place work under the hooks; what cannot work says so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiering
from tests.zero3.conftest import batches
from tests.zero3.frozen_bytes import frozen_model
from tiering.errors import ConfigError, EngineStateError
from zero3.passes.pass_state import PassState
from zero3.state.parameters import Parameters

Start = Callable[..., Any]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
# The compiler looks at .grad of everything, and silences the warning in a way that "error" comes before.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
BACKEND = "aot_eager"  # graphs, autograd ahead of time, no compiler of C++


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counted:
    """A backend that counts graphs, and what the compiler has counted."""

    def __init__(self, backend: str = BACKEND) -> None:
        self.name = backend
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.name)(graph, inputs)

    @property
    def breaks(self) -> int:
        return sum(counters["graph_break"].values())


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


class KeptLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Kept.apply(x, self.weight)
        return result


class Layer(nn.Module):
    """``reads``: another module, whose weight it uses, inside of the graph or left out of it."""

    def __init__(self, width: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.checkpointed = checkpointed
        self.reads: list[nn.Embedding] = []
        self.left_out = False

    def inner(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(functional.gelu(self.up(x)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = x + (checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x))
        for other in self.reads:
            x = x + (looked_up(other) if self.left_out else first_row(other))
        return x


def first_row(embedding: nn.Embedding) -> Tensor:
    return embedding.weight[0]


@torch.compiler.disable
def looked_up(embedding: nn.Embedding) -> Tensor:
    return first_row(embedding)


class Layers(nn.Module):
    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(600, 48)
        self.body = nn.Sequential(*(Layer(48, checkpointed=checkpointed) for _ in range(3)))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.body(self.embedding(tokens)).float().pow(2).mean()


def seeded(build: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(3)
    return build()


def compile_blocks(model: Any, how: str, **options: Any) -> None:
    for block in model.blocks if hasattr(model, "blocks") else model.body:
        if how == "forward":
            block.forward = torch.compile(block.forward, **options)
        else:
            block.compile(**options)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("how", "when", "by", "tile"),
    [
        ("in place", "before", BACKEND, 0),
        ("in place", "before", BACKEND, 32 << 10),
        ("in place", "after", "eager", 0),
        ("forward", "before", "eager", 0),
    ],
)
def test_compiled_blocks_give_the_same_bits_wherever_they_live(
    start: Start, small_model: type[nn.Module], differing: Any, how: str, when: str, by: str, tile: int
) -> None:
    """One graph for all blocks, which our hooks do not cut, and none that is compiled after the first steps."""

    def run(**placement: Any) -> dict[str, Tensor]:
        torch.compiler.reset()
        counters.clear()
        model, backend = seeded(small_model), Counted(by)
        if tile:
            tiering.tile(model, tile)
            assert "blocks.0.up.tiles.0.weight" in dict(model.named_parameters())
        if when == "before":
            compile_blocks(model, how, backend=backend, fullgraph=True)
        engine = start(model, accumulation=1, **placement)
        if when == "after":
            compile_blocks(model, how, backend=backend, fullgraph=True)
        for tokens, targets in batches(3):
            engine.backward(engine(tokens, targets))
            engine.step()
        assert (backend.graphs, backend.breaks) == (1, 0)
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(run(**STREAMED), run()) == []


@pytest.mark.parametrize(
    ("outside", "by"), [(True, "eager"), (False, BACKEND)], ids=["of blocks", "in blocks"]
)
def test_checkpoints_of_and_in_compiled_blocks(start: Start, differing: Any, outside: bool, by: str) -> None:
    class Outside(Layers):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for block in self.body:
                x = checkpoint(block, x, use_reentrant=False)
            return x.float().pow(2).mean()

    def run(**placement: Any) -> dict[str, Tensor]:
        torch.compiler.reset()
        counters.clear()
        backend = Counted(by)
        model = seeded(Outside if outside else lambda: Layers(checkpointed=True))
        compile_blocks(model, "in place", backend=backend, fullgraph=True)
        engine = start(model, accumulation=1, **placement)
        for tokens, targets in batches(3):
            engine.backward(engine(tokens, targets))
            engine.step()
        assert (backend.graphs, backend.breaks) == (1, 0)
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(run(**STREAMED), run()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler imports what torch has given up
@pytest.mark.parametrize(("precision", "keeps"), [("bf16", False), ("fp32", True)])
def test_the_compiler_of_kernels_gives_the_same_bits_wherever_blocks_live(
    start: Start, differing: Any, precision: str, keeps: bool
) -> None:
    """``keeps``: a function of the user's has a weight by itself until backward, in place of letting torch save it."""

    def run(**placement: Any) -> dict[str, Tensor]:
        torch.compiler.reset()
        model = seeded(Layers)
        for layer in model.body if keeps else ():
            layer.up = KeptLinear(48, 192)
        compile_blocks(model, "in place", backend="inductor")
        engine = start(model, accumulation=1, precision=precision, **placement)
        for tokens, targets in batches(3):
            engine.backward(engine(tokens, targets))
            engine.step()
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    on_device = run()
    for placement in (STREAMED, {"offload_param": "cpu", "offload_optimizer": "nvme", "threshold": 3000}):
        assert differing(run(**placement), on_device) == []


def test_other_shapes_compile_once_more_and_nobody_takes_the_compiler_for_the_user(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at .grad and at .data of everything, where there are gradients, and edits nothing."""
    edits: list[Any] = []
    monkeypatch.setattr(Parameters, "store_edits", lambda self, group, positions: edits.append(positions))
    model, backend = seeded(Layers), Counted()
    compile_blocks(model, "in place", backend=backend, fullgraph=True)
    engine = start(model, accumulation=2)
    for number, (tokens, targets) in enumerate(batches(4)):
        engine.backward(engine(tokens[:, number % 2 :], targets))
        engine.step()
    assert backend.graphs == 2
    assert edits == []
    assert "grad was read" not in caplog.text


def test_a_compiled_block_that_fails_is_left(start: Start) -> None:
    """torch calls no hook of a compiled module after an exception; what the block held goes all the same."""
    model = seeded(Layers)
    compile_blocks(model, "in place", backend="eager")
    engine = start(model, accumulation=1, **STREAMED)
    tokens, targets = next(batches(1))
    engine.eval()
    with torch.no_grad():
        engine(tokens, targets)
        with pytest.raises(RuntimeError):
            model.body[1](torch.zeros(2, 7, dtype=torch.bfloat16))
        before = engine(tokens, targets)
    assert engine._schedule.state is PassState.IDLE
    assert torch.equal(before, engine(tokens, targets))


def test_a_parameter_of_another_module_is_not_read_in_a_graph(start: Start, differing: Any) -> None:
    """The graph would be cut where that one moves, and sum up gradients in another order."""

    def build(*, left_out: bool) -> Any:
        torch.compiler.reset()
        model = seeded(Layers)
        for layer in list(model.body)[1:]:
            layer.reads, layer.left_out = [model.embedding], left_out
        compile_blocks(model, "in place", backend="eager")
        return model

    tokens, targets = next(batches(1))
    engine = start(build(left_out=False), accumulation=1, **STREAMED)
    with pytest.raises(
        Exception, match=r"(?s)'embedding.weight'.*is read by compiled code.*compiler\.disable"
    ):
        engine(tokens, targets)

    def run(**placement: Any) -> dict[str, Tensor]:
        engine = start(build(left_out=True), accumulation=1, **placement)
        engine.backward(engine(tokens, targets))
        engine.step()
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(run(**STREAMED), run()) == []


def test_a_closed_engine_leaves_the_module_as_it_was(start: Start) -> None:
    model = seeded(Layers)
    compile_blocks(model, "in place", backend="eager")
    compiled = [layer._compiled_call_impl for layer in model.body]
    engine = start(model, accumulation=1, **STREAMED)
    tokens, targets = next(batches(1))
    engine(tokens, targets)
    assert all(layer._compiled_call_impl not in compiled for layer in model.body)
    copied = copy.deepcopy(model.body[0])
    engine.close()
    assert [layer._compiled_call_impl for layer in model.body] == compiled
    assert copied(torch.ones(1, 48, dtype=torch.bfloat16)).shape == (1, 48)


@pytest.mark.parametrize("placement", [{}, STREAMED], ids=["device", "nvme"])
def test_a_compiled_whole_is_refused_with_the_remedy(start: Start, placement: dict[str, Any]) -> None:
    """Also where nothing moves now: what is trained there must be able to move."""
    model = seeded(Layers)
    engine = start(model, accumulation=1, **placement)
    tokens, targets = next(batches(1))
    compiled = torch.compile(model, backend="eager")
    step = torch.compile(lambda: engine(tokens, targets), backend="eager")
    for call in (lambda: compiled(tokens, targets), step):
        with pytest.raises(EngineStateError, match=r"the whole model.*block\.compile\(\)"):
            call()
    for module, name in [(model, "the whole model"), (model.body, "'body'")]:
        module.compile(backend="eager")
        with pytest.raises(EngineStateError, match=name):
            engine(tokens, targets)
        module._compiled_call_impl = None
    engine.backward(engine(tokens, targets))
    engine.step()


def test_compiled_autograd_is_refused(start: Start) -> None:
    engine = start(seeded(Layers), accumulation=1)
    tokens, targets = next(batches(1))
    loss = engine(tokens, targets)
    with (
        pytest.raises(EngineStateError, match=r"config\.compiled_autograd at False"),
        torch._dynamo.compiled_autograd._enable(lambda graph: graph),
    ):
        engine.backward(loss)
    engine.backward(engine(tokens, targets))
    engine.step()


def test_wrapped_blocks_go_back_to_their_places(start: Start, differing: Any) -> None:
    """And parameters have the names that they had, so that checkpoints are anybody's."""

    def run(*, wrapped: bool) -> dict[str, Tensor]:
        torch.compiler.reset()
        model, backend = seeded(Layers), Counted("eager")
        if wrapped:
            for number, layer in enumerate(model.body):
                model.body[number] = torch.compile(layer, backend=backend, fullgraph=True)
        engine = start(model, accumulation=1, **STREAMED)
        tokens, targets = next(batches(1))
        engine.backward(engine(tokens, targets))
        engine.step()
        assert backend.graphs == wrapped
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(run(wrapped=True), run(wrapped=False)) == []


def test_a_wrapped_model_is_refused_at_initialize(start: Start) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"the model is wrapped by torch\.compile"):
        start(torch.compile(model, backend="eager"))


@pytest.mark.slow
def test_compiled_blocks_read_frozen_bytes(start: Start) -> None:
    """Codes and integers, wherever they live, without a graph break."""
    results = []
    for where in ({}, STREAMED):
        model = frozen_model()
        for block in model.blocks:
            block.compile(fullgraph=True, backend=BACKEND)
        engine = start(model, threshold=0, accumulation=1, **where)
        losses = []
        for tokens, targets in batches(3):
            loss = engine(tokens, targets)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        results.append((losses, [values.tolist() for values in engine.master_state_dict().values()]))
    assert results[0] == results[1]
    assert len({*results[0][0]}) == 3
