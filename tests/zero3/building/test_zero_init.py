"""zero.Init: no memory for parameters, the ordinary build's bits whatever it does, and no silent loss of values."""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiering
from tiering.errors import ConfigError, EngineStateError, PlacementError, ResidencyError
from zero3.building import tape, zero_init
from zero3.building.zero_init import recipe_of

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
Start = Callable[..., Any]


@pytest.fixture(params=["kept for a while", "gone at once"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With models as small as these, nothing would be freed before the end."""
    if request.param == "gone at once":
        gone_at_once(monkeypatch)


def gone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "SMALLEST_FREED", 1)
    monkeypatch.setattr(tape, "GROWTH_LIMIT", 0)


def values(param: nn.Parameter) -> Tensor:
    """What ``param`` will have, without an engine."""
    recipe = recipe_of(param)
    assert recipe is not None, "it has memory"
    return recipe.make().clone()


def assert_built_as_ever(build: Callable[[], nn.Module], in_memory: Collection[str] = ()) -> nn.Module:
    """Same parameters, buffers and random numbers as without the context.

    Returns the model, of whose parameters those in ``in_memory`` have theirs, and no other.
    """
    torch.manual_seed(11)
    ordinary, after = build(), torch.rand(3)
    torch.manual_seed(11)
    with tiering.zero.Init():
        model = build()
    assert torch.equal(torch.rand(3), after)
    expected = dict(ordinary.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, param in model.named_parameters():
        assert (param.shape, param.dtype) == (expected[name].shape, expected[name].dtype), name
        assert param.requires_grad is expected[name].requires_grad
        values_of_param = param.detach() if name in in_memory else values(param)
        assert torch.equal(values_of_param, expected[name].detach()), name
    for name, buffer in ordinary.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    return model


class Everything(nn.Module):
    """Layers with the ways of initialising that torch's own modules have, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("ramp", torch.linspace(0, 1, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens)
        for layer in self.layers:
            stream = layer(stream)
        return self.head(self.norm(stream)).float().pow(2).mean()


@pytest.mark.parametrize("placement", [{}, STREAMED])
@pytest.mark.usefixtures("memory")
def test_same_seed_gives_the_weights_of_an_ordinary_build(start: Start, placement: dict[str, Any]) -> None:
    torch.manual_seed(11)
    ordinary = Everything()
    model = assert_built_as_ever(Everything)
    assert model.head.weight is model.embedding.weight
    engine = start(model, threshold=20, **placement)
    masters = engine.master_state_dict()
    for name, parameter in ordinary.named_parameters():
        assert torch.equal(masters[name], parameter.detach()), name
    assert not any(param in zero_init._recipes for param in model.parameters()), (
        "what was recorded stays in memory"
    )
    engine.backward(engine(torch.tensor([[1, 2, 3]])))


class Unruly(nn.Module):
    """Initialises as people do: in constructors, by apply, in loops, from each other, and from what it reads."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.rand(1).item()  # random numbers of its own, between those of the layers
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        for number, layer in enumerate(self.layers):
            nn.init.trunc_normal_(layer.weight, std=0.02, a=-0.03, b=0.03)  # draws again what is out of range
            nn.init.constant_(layer.bias, scale / (number + 1))
        self.gain = nn.Parameter(1e-6 * torch.ones(40))
        self.place = nn.Parameter(torch.randn(7, 24) * 0.02)
        self.table = nn.Parameter(torch.empty(24, 12, dtype=torch.bfloat16).normal_().t().contiguous())
        with torch.no_grad():
            self.layers[1].weight[::2] *= 0.5
            self.layers[2].weight.copy_(self.layers[1].weight.t())
            if self.layers[0].weight.abs().max() > 0.01:  # reads what may be gone
                self.layers[0].weight.sub_(self.layers[0].weight.mean())
        nn.init.orthogonal_(self.layers[1].weight)
        self.stack = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(24, 2, 40), 2, enable_nested_tensor=False
        )
        self.twin = copy.deepcopy(self.layers[0])
        self.own = nn.Parameter(torch.empty(30))
        nn.init.uniform_(self.own, generator=torch.Generator().manual_seed(5))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.half = nn.Linear(16, 16).to(torch.bfloat16)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.list = nn.ParameterList([torch.arange(5.0), torch.full((3, 3), 2.0)])
        self.register_buffer("copy", self.layers[2].weight.detach().clone())
        self.register_buffer("view", self.layers[1].weight.detach()[:2])
        self.apply(lambda m: nn.init.zeros_(m.bias) if type(m) is nn.LayerNorm else None)


@pytest.mark.usefixtures("memory")
def test_whatever_a_build_does_is_done_again() -> None:
    model = assert_built_as_ever(Unruly)
    assert torch.equal(model.view, values(model.layers[1].weight)[:2])


def test_the_default_dtype_of_the_build_counts() -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return nn.ParameterList([torch.ones(5), torch.randn(4), torch.linspace(0, 1, 7)])
        finally:
            torch.set_default_dtype(torch.float32)

    assert {param.dtype for param in assert_built_as_ever(build)} == {torch.bfloat16}


def test_parameters_made_in_another_order_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    gone_at_once(monkeypatch)
    torch.manual_seed(11)
    ordinary = dict(Unruly().named_parameters())
    torch.manual_seed(11)
    with tiering.zero.Init():
        model = Unruly()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    for name, param in reversed(list(model.named_parameters())):
        for _ in range(2):
            assert torch.equal(values(param), ordinary[name].detach()), name
    assert torch.equal(torch.get_rng_state(), before)


class Outspoken(nn.Module):
    """Shows its parameters to code that does not use torch's operations, by module ``layers[n]`` and what it does."""

    def __init__(self, *uses: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(len(uses) + 1))
        for layer, use in zip(self.layers, uses, strict=False):
            # Two operations, so that there is more than one to repeat.
            layer.weight.data = layer.weight.data * 2 + torch.randn(8, 8)
            nn.init.zeros_(self.layers[-1].weight)
            result = use(layer.weight)
            nn.init.ones_(self.layers[-1].weight)  # all else may go now
            if isinstance(result, float):
                nn.init.constant_(self.layers[-1].weight, result)
            elif isinstance(result, Tensor | np.ndarray):
                result[0] = 5.0


@pytest.mark.usefixtures("memory")
def test_what_reads_without_operations_finds_the_values() -> None:
    reads: list[Callable[[nn.Parameter], object]] = [
        lambda param: float(sum(param.flatten().tolist())),
        lambda param: float(len(f"{param} {param.detach()!r} {param[0]}")),
        lambda param: torch.tensor([*param.detach()[0]]).sum().item(),
    ]
    for read in reads:
        assert_built_as_ever(lambda read=read: Outspoken(read))


@pytest.mark.usefixtures("memory")
def test_memory_that_was_handed_out_stays() -> None:
    """Whoever has its address may write there, and nobody would know."""
    uses: list[Callable[[nn.Parameter], object]] = [
        lambda param: param.data.numpy(),
        lambda param: np.asarray(param.detach()),
        lambda param: torch.from_dlpack(param.detach()),
        lambda param: np.ctypeslib.as_array((ctypes.c_float * 64).from_address(param.data_ptr())),
        lambda param: param.untyped_storage().fill_(0),
        lambda param: copy.deepcopy(param.detach()),
        lambda param: param.data.apply_(lambda value: 2 * value),
        lambda param: torch.save(param, io.BytesIO()),
        lambda param: param.share_memory_().detach(),
        lambda param: written_by_an_operation_of_ones_own(param.data),
    ]
    assert_built_as_ever(lambda: Outspoken(*uses), {f"layers.{number}.weight" for number in range(len(uses))})


@torch.library.custom_op("tests::fill", mutates_args=["into"])
def written_by_an_operation_of_ones_own(into: Tensor) -> None:
    into.numpy()[:] = np.arange(64).reshape(8, 8)


class Odd(nn.Module):
    """Memory that is reached in ways of which one alone would be simple."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.late = nn.LazyLinear(8)
        self.late(torch.ones(2, 8))
        self.wave = nn.Parameter(torch.randn(5, 5, dtype=torch.complex64).conj().imag)  # lazily negated
        self.before = self.layers[0].weight.detach()
        nn.init.ones_(self.layers[1].weight)
        self.layers[0].weight.data = torch.ones(8, 8)
        adam = torch.optim.Adam(self.layers.parameters(), fused=True)
        self.layers[2](self.layers[0](torch.ones(2, 8))).sum().backward()
        adam.step()
        adam.zero_grad()
        for state in adam.state.values():  # nobody needs it, but what was written together with it
            state["exp_avg"].zero_()


@pytest.mark.usefixtures("memory")
def test_odd_memory() -> None:
    model = assert_built_as_ever(Odd, {"late.weight", "late.bias"})
    torch.manual_seed(11)
    assert torch.equal(model.before, Odd().before)


def test_parameters_of_an_earlier_context_can_be_part_of_the_model(start: Start) -> None:
    ready = nn.Linear(300, 300)
    with tiering.zero.Init():
        first = nn.Linear(300, 300)
    with tiering.zero.Init():
        model = nn.Sequential(first, nn.Linear(300, 300), ready)
        model[1].bias = first.bias
        with torch.no_grad():
            model[1].weight.copy_(2 * ready.weight)
    expected = 2 * ready.weight.detach()
    masters = start(model, offload_param="nvme").master_state_dict()
    assert torch.equal(masters["1.weight"], expected)
    assert masters["0.weight"].std() > 0


def test_memory_goes_while_the_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "GROWTH_LIMIT", 1 << 20)
    sizes = []

    class Wide(nn.Linear):
        def __init__(self) -> None:
            super().__init__(512, 512, bias=False)
            built.append(self)
            with torch._C.DisableTorchFunction():  # or asking would keep them
                sizes.append(sum(layer.weight.untyped_storage().nbytes() for layer in built))

    built: list[nn.Module] = []
    with tiering.zero.Init():
        model = nn.ModuleList(Wide() for _ in range(12))
    assert max(sizes) <= 3 << 20, "more than ROOM, and two of the parameters"
    assert all(values(layer.weight).shape == (512, 512) for layer in model)


def test_a_value_that_came_from_elsewhere_stays_and_must_not_change() -> None:
    source = torch.full((300, 300), 3.0)
    with tiering.zero.Init():
        model = nn.Linear(300, 300, bias=False)
        unseen = nn.ParameterList([nn.Parameter(torch.from_numpy(torch.ones(4).numpy()))])
        with torch.no_grad():
            model.weight.copy_(source)
    assert recipe_of(unseen[0]) is None
    assert unseen[0].tolist() == [1.0] * 4
    assert torch.equal(values(model.weight), source)
    for other in (source.data, source.numpy()):
        other += 1
        with pytest.raises(ConfigError, match="changed before they were needed"):
            values(model.weight)
        other -= 1
    assert torch.equal(values(model.weight), source)


def test_using_a_parameter_before_initialize_says_what_to_do(start: Start) -> None:
    with tiering.zero.Init():
        model = Everything()
    uses: list[Callable[[], object]] = [
        lambda: model.norm.weight.sum(),
        lambda: nn.init.zeros_(model.norm.weight),
        lambda: nn.init.trunc_normal_(model.norm.weight),
        lambda: model.half(),
        lambda: model.norm.weight.detach(),
        lambda: model(torch.tensor([[1]])),
    ]
    for use in uses:
        with pytest.raises(ResidencyError, match=r"no values before tiering\.initialize.*zero\.Init"):
            use()
    assert torch.equal(copy.deepcopy(model).norm.weight, torch.ones(16))
    start(model)


def test_the_state_dict_of_a_new_model_has_placeholders() -> None:
    """Loaders read names, shapes and dtypes from it; reading a value raises torch's error of meta tensors."""
    expected = Everything().state_dict()
    with tiering.zero.Init():
        model = Everything()
    state = model.state_dict(prefix="net.")
    assert {name: (value.shape, value.dtype) for name, value in state.items()} == {
        f"net.{name}": (value.shape, value.dtype) for name, value in expected.items()
    }
    parameters = {f"net.{name}" for name, _ in model.named_parameters(remove_duplicate=False)}
    assert {name for name, value in state.items() if value.is_meta} == parameters
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        state["net.norm.weight"].cpu()


def test_values_loaded_into_a_new_model_are_kept(start: Start) -> None:
    torch.manual_seed(11)
    values = {name: torch.randn_like(value) for name, value in Everything().state_dict().items()}
    with tiering.zero.Init():
        model = Everything()
    del values["norm.weight"]
    plain = Everything()
    for each in (plain, model):
        each.load_state_dict(values, strict=False)
    weights = start(model, precision="fp32").state_dict()
    assert torch.equal(weights["norm.weight"], torch.ones(16))
    expected = plain.state_dict()
    assert [name for name in values if not torch.equal(weights[name], expected[name])] == []


def test_a_model_that_was_refused_can_be_tried_again(start: Start) -> None:
    torch.manual_seed(11)
    expected = Everything().state_dict()
    torch.manual_seed(11)
    with tiering.zero.Init():
        model = Everything()
    with pytest.raises(PlacementError):
        start(model, device_budget=4096, offload_param="cpu")
    engine = start(model)
    assert torch.equal(engine.master_state_dict()["norm.weight"], expected["norm.weight"])
    assert torch.equal(engine.master_state_dict()["embedding.weight"], expected["embedding.weight"])


def test_two_parameters_over_one_memory_are_refused(start: Start) -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            both = torch.randn(10, 4)
            self.apart = nn.Linear(4, 4)
            self.first, self.second = nn.Parameter(both[:6]), nn.Parameter(both[5:])

    with tiering.zero.Init():
        model = Overlapping()
    with pytest.raises(ConfigError, match="'first' and 'second' are two parameters that share memory"):
        start(model)


def test_the_context_ends_also_after_an_error_and_is_not_reentrant() -> None:
    built: list[nn.Module] = []
    with pytest.raises(ZeroDivisionError), tiering.zero.Init():
        built.append(nn.Linear(2, 2 // len(built)))
    with pytest.raises(TypeError), tiering.zero.Init():
        built.append(nn.Sequential(nn.Linear(2, 2), len(built.append(nn.Linear(3, 3)))))
    assert values(built[0].weight).shape == (3, 3)
    assert nn.Linear(2, 2).weight.sum().isfinite()
    with tiering.zero.Init(), pytest.raises(EngineStateError, match="already open"), tiering.zero.Init():
        pass
    plain = nn.Linear(2, 2)
    assert recipe_of(plain.weight) is None
    assert recipe_of(copy.deepcopy(plain).weight) is None
    with pytest.raises(ConfigError, match="build the model inside the context"):
        tiering.zero.Init(module=plain)
    tiering.zero.Init(config={"train_batch_size": 1})
    tiering.zero.Init(config_dict_or_path="ds_config.json")


# Models on the meta device


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Plain(nn.Module):
    """What modules of torch can initialise by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.attention = nn.MultiheadAttention(16, 2)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens)
        stream = stream + self.attention(stream, stream, stream)[0]
        for layer in self.layers:
            stream = layer(stream)
        return self.norm(stream.flatten(0, 1)).float().pow(2).mean()


@pytest.mark.parametrize("placement", [{}, STREAMED])
def test_a_model_on_meta_is_initialised_as_an_ordinary_build(start: Start, placement: dict[str, Any]) -> None:
    torch.manual_seed(11)
    ordinary, after = Plain(), torch.rand(3)
    model = on_meta(Plain)
    identity = {name: id(param) for name, param in model.named_parameters()}
    model.layers[0].weight.mark = "kept"
    torch.manual_seed(11)
    engine = start(model, threshold=20, **placement)
    assert torch.equal(torch.rand(3), after)
    masters = engine.master_state_dict()
    for name, param in ordinary.named_parameters():
        assert torch.equal(masters[name], param.detach()), name
    for name, buffer in ordinary.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert identity == {name: id(param) for name, param in model.named_parameters()}
    assert model.layers[0].weight.mark == "kept"
    engine.backward(engine(torch.tensor([[1, 2, 3]])))


def unknown() -> Iterator[tuple[nn.Module, str]]:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            nn.init.constant_(self.weight, 2.0)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))

    class Ramp(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("ramp", torch.linspace(0, 1, 5))

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4)  # keeps weak references to its parameters

    applied = on_meta(lambda: nn.Sequential(nn.Linear(4, 4)))
    applied.apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None)
    yield from ((on_meta(Scaled), "weight"), (on_meta(Bare), "gain"), (on_meta(Ramp), "ramp"))
    yield from ((applied, "0.weight"), (on_meta(Everything), "head.weight"))
    yield on_meta(Recurrent), "lstm.weight_ih_l0"


@pytest.mark.parametrize(("model", "name"), list(unknown()))
def test_values_on_meta_that_nobody_knows_are_refused(start: Start, model: nn.Module, name: str) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"meta device.*zero\.Init") as refusal:
            start(model)
        assert name in str(refusal.value)
        assert all(param.is_meta for param in model.parameters())
        assert all(buffer.is_meta for buffer in model.buffers())
