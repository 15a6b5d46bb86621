"""Random numbers go on where they were, to the bit."""

from __future__ import annotations

import json
import logging
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiering.errors import CheckpointError
from zero3.checkpoint import encoding, random_state


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:
    before = random_state.capture()
    yield
    random_state.restore(before)


def drawn() -> list[Any]:
    """Some of each kind; an odd number of normals, of which generators keep the other half of a pair."""
    return [
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.random(),
        np.random.standard_normal(),
    ]


def through_a_file(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encoding.encode(value, tensors, "random"), allow_nan=False)
    return encoding.decode(json.loads(text), tensors, "random")


def test_every_generator_goes_on_where_it_was() -> None:
    drawn()  # to the middle of a pair of normals
    state = random_state.capture()
    expected = [drawn() for _ in range(3)]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    random_state.restore(through_a_file(state))
    assert [drawn() for _ in range(3)] == expected


def test_a_state_is_that_of_its_moment() -> None:
    state = random_state.capture()
    expected = drawn()
    for _ in range(2):
        random_state.restore(state)
        assert drawn() == expected


def test_what_is_not_in_it_stays() -> None:
    state = random_state.capture()
    expected = drawn()
    random_state.restore(state)
    random_state.restore({})
    assert drawn() == expected


def test_numpy_is_asked_only_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy loads its generators when they are first used: a checkpoint is not what makes it."""
    assert "numpy" in random_state.capture()
    monkeypatch.delitem(sys.modules, "numpy.random")
    state = random_state.capture()
    assert sorted(state) == ["python", "torch"]
    random_state.restore(state)
    assert "numpy.random" not in sys.modules


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("torch", 5),
        ("python", (3, (1, 2), None)),
        ("python", (3, (-1,) * 625, None)),
        ("python", [5]),
        ("numpy", {}),
        ("numpy", {"bit_generator": "PCG64"}),
        ("numpy", {"bit_generator": "MT19937", "state": {"key": np.zeros(624, np.uint32), "pos": 10**7}}),
        ("cuda", 5),
    ],
)
def test_what_is_no_state_is_an_error(name: str, broken: Any) -> None:
    before = random_state.capture()
    with pytest.raises(
        CheckpointError, match=f"random state of '{name}' is invalid: .+; the file is damaged"
    ):
        random_state.restore({name: broken})
    expected = drawn()
    random_state.restore(before)
    assert drawn() == expected


def test_other_gpus_are_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    numbers: dict[int, int] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: numbers.update({device: int(state[0])})
    )
    states = [torch.tensor([number], dtype=torch.uint8) for number in (7, 8, 9)]
    with caplog.at_level(logging.WARNING):
        random_state.restore({"cuda": states[:2]})
        assert numbers == {0: 7, 1: 8} and not caplog.records
        random_state.restore({"cuda": states})
    assert numbers == {0: 7, 1: 8}
    assert "has random states of 3 GPUs, but this process sees 2" in caplog.text


def test_the_gpu_that_is_computed_on_goes_on_whatever_its_number_is_now(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved by the third of four ranks that saw all GPUs of their node, loaded where each sees its own alone."""
    numbers: dict[int, int] = {}
    states = [torch.tensor([number], dtype=torch.uint8) for number in (6, 7, 8, 9)]
    for name, answer in {
        "is_initialized": lambda: True,
        "get_rng_state_all": lambda: states,
        "current_device": lambda: 2,
        "set_rng_state": lambda state, device: numbers.update({device: int(state[0])}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    tensors: dict[str, Tensor] = {}
    saved = encoding.decode(encoding.encode(random_state.capture(), tensors), tensors)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    random_state.restore(saved)
    assert numbers == {0: 8}
    with pytest.raises(CheckpointError, match="random state of 'cuda' is invalid"):
        random_state.restore({"cuda": states, "cuda_device": 4})


def test_no_states_at_all_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="the random states are a list; the file is damaged"):
        random_state.restore([])
