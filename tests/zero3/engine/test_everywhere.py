"""Ways to train, and to begin, that other tests try in some placements only: here in all, against the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiering
from tests.zero3.plain import (
    PLACEMENTS,
    STREAMED,
    WIDTH,
    Loop,
    Outcome,
    PlainLoop,
    Tower,
    assert_same_everywhere,
    differing,
    inputs,
    run_engine,
    update,
)
from tiering.errors import ConfigError
from tiering.placement.workload import Tier
from zero3.building.zero_init import recipe_of

Start = Callable[..., Any]
PRECISIONS = ["fp32", "bf16"]
ON_NVME = {"offload_param": "nvme", "offload_optimizer": "nvme"}
FRACTIONS: dict[str, dict[str, Any]] = {
    "a share leaves for the host": {"offload_optimizer": "cpu", "ratio": 0.4},
    "a share leaves for nvme": {"offload_optimizer": "nvme", "ratio": 0.4, "cache_in_host": False},
    "all parameters and a share": {**STREAMED, "ratio": 0.6},
    "some parameters in host memory": {**ON_NVME, "host_budget": "170KiB"},
    "some fp32 parameters in host memory": {**ON_NVME, "host_budget": "180KiB"},
    "some state in host memory": {**ON_NVME, "host_budget": "320KiB"},
}


def plainly(loop: Loop) -> list[float]:
    return [update(loop, x) for x in inputs(4)]


def assert_same(run: Outcome, reference: Outcome, where: str) -> None:
    assert run.losses == reference.losses, where
    assert differing(run.masters, reference.masters) == [], where
    assert differing(run.state, reference.state) == [], where


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_optimizer_that_is_taken_over(start: Start, precision: str) -> None:
    """torch's AdamW as an object, also where a share of its state is on each tier."""
    optimizers = []

    def begin(model: nn.Module, *, model_parameters: Any, optimizer: dict[str, Any], **options: Any) -> Any:
        client = torch.optim.AdamW(model_parameters, **{**optimizer, "betas": tuple(optimizer["betas"])})
        engine = start(model, client=client, rule=None, **options)
        assert engine.optimizer.param_groups is client.param_groups
        optimizers.append(engine.optimizer)
        return engine

    def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            {"params": [p for p in model.parameters() if p.dim() > 1]},
        ]

    def script(loop: Loop) -> list[float]:
        return [update(loop, x, skip=n % 3) for n, x in enumerate(inputs(5))]

    reference = assert_same_everywhere(begin, Tower, script, precision=precision, groups=decay_groups)
    named = run_engine(start, Tower, script, precision=precision, groups=decay_groups)
    assert_same(named, reference, "the rule by its name")
    for name, options in FRACTIONS.items():
        run = run_engine(begin, Tower, script, precision=precision, groups=decay_groups, **options)
        assert_same(run, reference, name)
    assert len({type(optimizer) for optimizer in optimizers}) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fractions_are_fractions(start: Start, precision: str) -> None:
    for name, options in FRACTIONS.items():
        if name.endswith("parameters in host memory") and (precision == "fp32") != ("fp32" in name):
            continue  # no budget is between none and all of them in both precisions
        plan = start(Tower(), precision=precision, accumulation=1, threshold=0, **options).plan
        kind = "parameters" if "parameters" in name and "share" not in name else "optimizer state"
        assert sum(kind in plan.contents(tier) for tier in Tier) == 2, name


@pytest.mark.one_of(2)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_the_engine_has_scaled(start: Start, accumulation: int) -> None:
    def script(loop: Any, scales: bool = True) -> list[float]:
        losses = []
        for x in inputs(6):
            loss = loop(x)
            losses.append(loss.item())
            if scales and not isinstance(loop, PlainLoop):
                loop.scale(loss).backward()
            else:
                loop.backward(loss)
            loop.step()
        return losses

    run = assert_same_everywhere(start, Tower, script, precision="bf16", accumulation=accumulation)
    engines = run_engine(
        start, Tower, partial(script, scales=False), precision="bf16", accumulation=accumulation
    )
    assert_same(engines, run, "engine.backward")


class Doubling(nn.Module):
    """A tower whose blocks are classes of their own: the compiler skips calls of torch's."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + self.down(functional.gelu(self.up(x)))
            return result

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x.to(self.into.weight.dtype))
        for block in self.blocks:
            x = block(x)
        result: Tensor = x.float().pow(2).mean()
        return result


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# The compiler looks at .grad of everything, and silences the warning in a way that "error" comes before.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks(start: Start) -> None:
    def backend(graph: Any, example_inputs: Any) -> Any:
        compiled.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

    def build() -> nn.Module:
        torch.compiler.reset()
        compiled.clear()
        model = Doubling(layers=2)
        model.blocks[1].compile(backend=backend)  # each of them takes long; test_compile.py has several
        return model

    def script(loop: Loop) -> list[float]:
        losses = plainly(loop)
        assert compiled, "nothing was compiled"
        return losses

    compiled: list[Any] = []
    assert_same_everywhere(start, build, script)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_built_without_memory(start: Start, precision: str) -> None:
    """Under zero.Init values are made again when the model is placed, one parameter at a time."""

    def begin(model: nn.Module, **options: Any) -> Any:
        torch.manual_seed(11)  # as before the ordinary build
        with tiering.zero.Init():
            empty = Doubling()
        assert all(recipe_of(p) is not None for p in empty.parameters())
        return start(empty, **options)

    reference = assert_same_everywhere(begin, Doubling, plainly, precision=precision)
    assert_same(run_engine(start, Doubling, plainly, precision=precision), reference, "an ordinary build")


class Decoder(nn.Module):
    """Attention over keys and values that it keeps from the tokens before, when it is given a cache."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
            query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
            if cache is not None:
                if cache:
                    key, value = torch.cat([cache[0], key], 1), torch.cat([cache[1], value], 1)
                cache[:] = [key, value]
            mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(
                key.shape[1] - query.shape[1]
            )
            attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            result: Tensor = x + self.out(attended)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)

    def logits(self, tokens: Tensor, cache: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, None if cache is None else cache[number])
        result: Tensor = self.head(x).float()
        return result

    def forward(self, tokens: Tensor, cache: list[list[Tensor]] | None = None) -> Tensor:
        logits = self.logits(tokens, cache)
        if cache is not None:
            return logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Calls itself once per token, as a library's generate does."""
        cache: list[list[Tensor]] = [[] for _ in self.layers]
        prompt = tokens
        for _ in range(count):
            prompt = self(prompt, cache)[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, prompt], 1)
        return tokens


@pytest.mark.one_of(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_generation_between_steps(start: Start, precision: str) -> None:
    """With a cache of keys and values, token by token: those of the plain model with these weights, everywhere."""

    def script(loop: Any, generate: bool = True) -> list[float]:
        generator = torch.Generator().manual_seed(3)
        losses = []
        for _ in range(4):
            tokens = torch.randint(50, (2, 9), generator=generator)
            if generate:
                loop.eval()
                generated_tokens = loop.module.generate(tokens[:, :3], 6)
                assert generated_tokens.equal(plain_copy(loop).generate(tokens[:, :3], 6))
                loop.train()
                generated.append(generated_tokens)
            loss = loop(tokens)
            losses.append(loss.item())
            loop.backward(loss)
            loop.step()
        return losses

    def plain_copy(loop: Any) -> Decoder:
        plain = Decoder().to(loop.module.embedding.weight.dtype)
        plain.load_state_dict((loop.module if isinstance(loop, PlainLoop) else loop).state_dict())
        return plain

    generated: list[Tensor] = []
    run = assert_same_everywhere(start, Decoder, script, precision=precision)
    by_run = torch.stack(generated).unflatten(0, (-1, 4))
    assert len(by_run) == 3 + len(PLACEMENTS) and all(tokens.equal(by_run[1]) for tokens in by_run[1:])
    assert not by_run[1, 0, :, 3:].equal(by_run[1, 3, :, 3:]), "training changes no token"
    undisturbed = run_engine(start, Decoder, partial(script, generate=False), precision=precision)
    assert_same(undisturbed, run, "without generation")


@pytest.mark.parametrize("where", [{}, {"offload_param": "cpu", "offload_optimizer": "cpu"}, STREAMED])
def test_sparse_gradients_are_refused_with_the_remedy(start: Start, where: dict[str, Any]) -> None:
    class Sparse(nn.Module):
        def __init__(self, *, by_module: bool) -> None:
            super().__init__()
            self.table = nn.Embedding(20, WIDTH, sparse=by_module)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = nn.functional.embedding(tokens, self.table.weight, sparse=True)
            for layer in self.layers:
                x = layer(x)
            result: Tensor = x.float().pow(2).mean()
            return result

    declared = Sparse(by_module=True)
    with pytest.raises(ConfigError, match=r"module 'table' has sparse=True.*model\.table\.sparse = False"):
        start(declared, accumulation=1, threshold=0, **where)
    declared.table.requires_grad_(False)
    start(declared, accumulation=1, threshold=0, **where)

    engine = start(Sparse(by_module=False), accumulation=1, threshold=0, **where)
    with pytest.raises(ConfigError, match=r"'table\.weight'.*sparse=False"):
        engine.backward(engine(torch.tensor([1, 2])))
