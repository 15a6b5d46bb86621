"""Values of a training script as JSON and tensors, and back, as the files of a checkpoint hold them."""

from __future__ import annotations

import argparse
import enum
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

import tiering
from tiering import _strict_json
from tiering.errors import CheckpointError, ConfigError, ResidencyError
from zero3.checkpoint import encoding


def there_and_back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(
        {"client_state": encoding.encode(value, tensors, "client_state")}, indent=1, allow_nan=False
    )
    for tensor in tensors.values():
        assert tensor.device.type == "cpu" and tensor.is_contiguous() and type(tensor) is Tensor
        assert tensor.dtype in encoding.DTYPES
    return encoding.decode(_strict_json.parse(text.encode())["client_state"], tensors, "client_state")


def exact(value: Any) -> Any:
    """What two values are equal in exactly when they are the same in class, order and every bit."""
    if isinstance(value, float):
        return type(value), "nan" if math.isnan(value) else struct.pack("d", value)
    if isinstance(value, dict):
        return type(value), [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(exact(item)) for item in value)
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    if isinstance(value, Tensor):
        raw = value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
        return type(value), value.dtype, value.shape, raw
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype, value.shape, value.tobytes()
    return type(value), value


keys = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
hashable = st.recursive(
    keys, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
tensors = st.tuples(
    st.sampled_from(sorted(encoding.DTYPES, key=str)), st.lists(st.integers(0, 3), max_size=3)
).map(lambda drawn: (torch.arange(27) % 2).reshape(3, 3, 3)[tuple(slice(n) for n in drawn[1])].to(drawn[0]))
arrays = tensors.filter(lambda tensor: tensor.dtype.itemsize > 2).map(lambda tensor: tensor.numpy())
leaves = (
    hashable
    | st.just("$dict")
    | tensors
    | arrays
    | st.sampled_from(
        [
            torch.bfloat16,
            torch.Size([2, 3]),
            Path("/a/b"),
            np.float32("nan"),
            np.float64(-0.0),
            np.int8(-5),
            np.bool_(True),
        ]
    )
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable | st.sampled_from(["$dict", "$", "$tensor"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=150, deadline=None)
def test_what_comes_back_is_what_went_in(value: Any) -> None:
    assert exact(there_and_back(value)) == exact(value)


@pytest.mark.parametrize(
    "value",
    [
        *(0.1, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308),
        *(2**63, 2**64, -(2**63) - 1, 10**5000, -(10**5000)),
        *({}, [], (), set(), frozenset(), b"", "", "\0\ud800"),
        {"$tensor": "w"},
        {"$tensor": 1, "more": 2},
        {"\udc80.bin": 1},
        {1: "int", "1": "str", (1, None): "tuple", None: 0, 1.5: math.nan},
        [
            torch.zeros(()),
            torch.zeros(0),
            torch.zeros(0, 3),
            torch.arange(6).reshape(2, 3).T,
            torch.ones(1).expand(4),
        ],
        [torch.tensor([math.nan, -0.0]), torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()],
        [np.zeros(()), np.zeros((0, 2)), np.arange(6)[::-1], np.arange(6).reshape(2, 3).T, np.float16(65504)],
        Counter({3: 2, "a": -1}),
        {"b": 1, "a": {"d": 2, "c": 3}},
    ],
    ids=lambda value: type(value).__name__,
)
def test_corners(value: Any) -> None:
    assert exact(there_and_back(value)) == exact(value)


def test_plain_values_are_readable_as_they_are() -> None:
    state = {"epoch": 3, "best": 0.25, "name": "run", "milestones": [1, 2], "nothing": None, "on": True}
    assert encoding.encode(state, {}) == state
    tensors: dict[str, Tensor] = {}
    assert encoding.encode({"ema": [torch.ones(2)]}, tensors, "client_state") == {
        "ema": [{"$tensor": "client_state['ema'][0]"}]
    }
    assert list(tensors) == ["client_state['ema'][0]"]


def test_what_becomes_plainer() -> None:
    weight = nn.Parameter(torch.ones(2))
    came_back = there_and_back(
        {"ordered": OrderedDict(b=1, a=2), "default": defaultdict(list, x=[1]), "p": weight}
    )
    assert exact(came_back) == exact({"ordered": {"b": 1, "a": 2}, "default": {"x": [1]}, "p": torch.ones(2)})
    assert not came_back["p"].requires_grad


def test_tensors_are_copies_under_names_of_their_own() -> None:
    weight = torch.zeros(2)
    array = np.zeros(2)
    long = ["x" * 500 + str(number) for number in range(2)]
    tensors: dict[str, Tensor] = {}
    encoded = [
        encoding.encode({long[0]: weight, long[1]: weight + 1, "array": array}, tensors, "client_state"),
        encoding.encode({long[0]: weight + 2}, tensors, "client_state"),
    ]
    weight += 10
    array += 10
    assert len(tensors) == 4 and all(len(name) < 300 for name in tensors)
    first, second = (encoding.decode(value, tensors) for value in encoded)
    assert exact(first) == exact({long[0]: torch.zeros(2), long[1]: torch.ones(2), "array": np.zeros(2)})
    assert exact(second) == exact({long[0]: torch.full((2,), 2.0)})


def test_the_order_of_a_set_is_not_that_of_its_hashes() -> None:
    assert encoding.encode(set("performance"), {}) == {"$set": sorted(set("performance"))}


class Colour(enum.IntEnum):
    RED = 1


@dataclass
class Settings:
    rate: float = 0.1


class Point(NamedTuple):
    x: int
    y: int


class Words(list[str]):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (argparse.Namespace(lr=1), "of class argparse.Namespace, which .+; save vars(client_state['args'])"),
        (Colour.RED, "test_encoding.Colour, which .+; save client_state['args'].value"),
        (Settings(), "Settings, which .+; save dataclasses.asdict(client_state['args'])"),
        (Settings, "save its name"),
        (Point(1, 2), "Point, which .+; save client_state['args']._asdict()"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear, which .+; save client_state['args'].state_dict()"),
        (torch.Generator(), "Generator, which .+; save client_state['args'].get_state()"),
        (Words("ab"), "Words, which .+; save list(client_state['args'])"),
        (np.str_("a"), "numpy.str_, which .+; save str(client_state['args'])"),
        (bytearray(b"a"), "bytearray, which .+; save bytes(client_state['args'])"),
        (1j, "complex, which .+; save the plain values"),
        (lambda: 0, "function, which .+; save the plain values"),
        (
            torch.zeros(2, dtype=torch.complex128),
            "a tensor of torch.complex128 .+ supports dense tensors of torch.bfloat16,",
        ),
        (torch.zeros(2, device="meta"), "a tensor of torch.float32 .+ on meta"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (np.array(["a"]), "an array of dtype('<U1')"),
        (np.array([None]), "an array of dtype('O')"),
        (np.zeros(2, ">f4"), "an array of dtype('>f4').+ byte order"),
        (np.zeros(2, np.longdouble), "an array of dtype('float128')"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_refused_is_named_with_what_to_save(value: Any, message: str) -> None:
    pattern = ".+".join(re.escape(part) for part in message.split(".+"))
    with pytest.raises(ConfigError, match=r"client_state\['args'\] is .*" + pattern):
        encoding.encode({"step": 1, "args": value}, {}, "client_state")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused() -> None:
    value = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(ConfigError, match=r"value is a tensor of .+ a checkpoint supports dense tensors"):
        encoding.encode(value, {})


def test_a_parameter_that_is_elsewhere_is_not_saved_as_what_stands_for_it(
    start: Callable[..., Any],
) -> None:
    engine = start(
        offload_param="nvme", offload_optimizer="nvme", cache_in_host=False, threshold=0, prefetch=0
    )
    weight = engine.module.blocks[0].up.weight
    assert type(weight) is not nn.Parameter
    with pytest.raises(ResidencyError, match=r"copy of 'blocks\.0\.up\.weight', whose bytes are on NVMe"):
        encoding.encode({"up": weight}, {})
    with tiering.gathered(weight):
        expected = weight.detach().clone()
        tensors: dict[str, Tensor] = {}
        encoding.encode({"up": weight}, tensors)
    assert torch.equal(tensors["value['up']"], expected)


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [{level: value}, [value], (value,)][level % 3] if level % 3 else {level: value}
    return value


def test_depth_has_a_limit_on_both_sides() -> None:
    assert exact(there_and_back(nested(encoding.DEPTH))) == exact(nested(encoding.DEPTH))
    with pytest.raises(ConfigError, match=r"client_state\[.+ is nested deeper than 100 levels"):
        encoding.encode(nested(encoding.DEPTH + 1), {}, "client_state")
    cycle: list[Any] = []
    cycle.append({"self": cycle})
    with pytest.raises(ConfigError, match=r"client_state\[0\]\['self'\].+ it contains itself"):
        encoding.encode(cycle, {}, "client_state")
    deep: Any = 1
    for _ in range(encoding.DEPTH + 1):
        deep = {"$tuple": [deep]}
    with pytest.raises(CheckpointError, match=r"client_state\[0\]\[0\].+ is nested deeper than 100 levels"):
        encoding.decode(deep, {}, "client_state")
    for _ in range(900):
        deep = [deep]
    with pytest.raises(CheckpointError, match=r"client_state has '\$int', but \[.+\] has the wrong type"):
        encoding.decode({"$int": deep}, {}, "client_state")


@pytest.mark.parametrize(
    "value",
    [
        {"$pickle": "gASVAA=="},
        {"$tensor": "missing"},
        {"$tensor": 5},
        {"$tensor": ["there"]},
        {"$array": "half"},
        {"$array": None},
        {"$tuple": 5},
        {"$tuple": {"0": 1}},
        {"$tuple": [], "more": 1},
        {"$set": [[]]},
        {"$set": [1, 1]},
        {"$set": "ab"},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[], 1]]},
        {"$dict": [[1]]},
        {"$dict": [5]},
        {"$dict": {"a": 1}},
        {"$counter": [[{"$set": []}, 1]]},
        {"$int": 5},
        {"$int": "0xzz"},
        {"$float": "1.0"},
        {"$float": 1.0},
        {"$float": []},
        {"$bytes": "!"},
        {"$bytes": [1]},
        {"$path": 1},
        {"$dtype": "load"},
        {"$dtype": "torch.load"},
        {"$dtype": []},
        {"$size": [1.5]},
        {"$size": [2**70]},
        {"$size": 3},
        {"$scalar": ["float32"]},
        {"$scalar": ["float32", "1"]},
        {"$scalar": ["uint8", 300]},
        {"$scalar": ["object", 3]},
        {"$scalar": [[], 3]},
        {"$scalar": 3},
    ],
    ids=json.dumps,
)
def test_what_cannot_be_ours_is_named_with_its_place(value: Any) -> None:
    tensors = {"there": torch.zeros(1), "half": torch.zeros(1, dtype=torch.bfloat16)}
    tag = next(iter(value))
    with pytest.raises(CheckpointError, match=r"client_state\[2\]\['x'\](\[.+\])? has '\$") as caught:
        encoding.decode([0, 1, {"x": value}], tensors, "client_state")
    assert repr(tag) in str(caught.value) and "damaged, or from a newer version" in str(caught.value)


tags = ["$tensor", "$array", "$scalar", "$int", "$float", "$bytes", "$path", "$dtype", "$size", "$tuple"]
tags += ["$set", "$frozenset", "$dict", "$counter", "$new"]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["there", "torch.half", "float32", "nan"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*tags, "a"]), inner, max_size=2)
    ),
    max_leaves=8,
)


@given(json_values)
@settings(max_examples=300, deadline=None)
def test_json_of_any_kind_is_read_or_refused(value: Any) -> None:
    with suppress(CheckpointError):  # and with no other error
        came = encoding.decode(value, {"there": torch.zeros(2)}, "client_state")
        assert exact(there_and_back(came)) == exact(came)


SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.PolynomialLR(optimizer)], milestones=[4]
    ),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_and_optimizers_of_torch_go_on(make: Callable[[torch.optim.Optimizer], Any]) -> None:
    def build() -> tuple[nn.Parameter, torch.optim.Optimizer, Any]:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        return weight, optimizer, make(optimizer)

    def train(weight: nn.Parameter, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        rates = []
        for _ in range(3):
            (weight**2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    straight = build()
    train(*straight)
    saved = there_and_back([straight[0], straight[1].state_dict(), straight[2].state_dict()])
    rates = train(*straight)

    stopped = build()
    with torch.no_grad():
        stopped[0].copy_(saved[0])
    stopped[1].load_state_dict(saved[1])
    stopped[2].load_state_dict(saved[2])
    assert train(*stopped) == rates and len(set(rates)) > 1
    assert exact(stopped[0]) == exact(straight[0])
    assert exact(stopped[2].state_dict()) == exact(straight[2].state_dict())
