"""The pass schedule against every order of events that autograd can produce.

Hypothesis writes programs: which modules call which, under which kind of checkpointing, what their outputs hide, where
something is raised, which graphs are run backward, together or one after the other or twice. A small model of autograd
(autograd_model.py) runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.zero3.passes.autograd_model import PARENTS, RESIDENT, Autograd, BoomError, Call
from zero3.params.param_group import Residency
from zero3.passes import pass_state
from zero3.passes import schedule as schedule_module

INDEXES = st.integers(1, len(PARENTS) - 1)


def calls(inner: st.SearchStrategy[Call]) -> st.SearchStrategy[Call]:
    return st.builds(
        Call,
        group=INDEXES,
        calls=st.lists(inner, max_size=3).map(tuple),
        reads=st.lists(INDEXES, max_size=2).map(tuple) | st.just(()),
        tail=st.booleans(),
        watched=st.sampled_from([True, True, True, False]),
        checkpoint=st.sampled_from(["", "", "saved", "reentrant"]),
        late=st.booleans(),
        stop=st.sampled_from([0, 0, 1, 2]),
        catches=st.booleans(),
    )


LEAF = st.builds(
    Call, group=INDEXES, watched=st.booleans(), checkpoint=st.sampled_from(["", "saved", "reentrant"])
)

MODEL = st.lists(st.recursive(LEAF, calls, max_leaves=6), min_size=1, max_size=4).map(tuple)
MODELS = st.lists(MODEL, min_size=1, max_size=3)
ROOM = len(PARENTS)


@contextmanager
def autograd(room: int = ROOM) -> Iterator[Autograd]:
    model = Autograd(room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_module, "call_at_end_of_backward", model.queue)
        patch.setattr(pass_state, "graph_task", lambda: 0 if model.callbacks else -1)
        patch.setattr(torch._C, "_current_autograd_node", lambda: model.node)
        yield model


THOROUGH = settings(
    max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@THOROUGH
@given(MODELS)
def test_each_forward_with_its_backward(models: list[tuple[Call, ...]]) -> None:
    with autograd() as torch_model:
        for model in models * 2:
            tape = torch_model.forward(model)
            unsharded = [group.name for group in torch_model.groups if group.residency is Residency.UNSHARDED]
            assert unsharded == [], "still unsharded between forward and backward"
            torch_model.backward(tape)
            torch_model.check_quiet()
            assert torch_model.gradients.received.keys() >= {f"g{use}" for node in tape for use in node.uses}
            torch_model.gradients.reset()
        assert torch_model.began == torch_model.ended > 0


def chain(group: int) -> set[int]:
    """``group`` and those around it, as far as they move."""
    around = {group}
    while (parent := PARENTS[group]) is not None:
        group = parent
        around.add(group)
    return around - {RESIDENT}


def least_room(model: tuple[Call, ...], around: frozenset[int] = frozenset({0})) -> int:
    """The most groups that one moment of these forwards needs, each with those around it."""
    most = len(around)
    for call in model:
        most = max(most, least_room(call.calls, around | chain(call.group)))
    return most


def modest(inner: st.SearchStrategy[Call]) -> st.SearchStrategy[Call]:
    """Calls that need no room for what they read elsewhere."""
    return calls(inner).map(lambda call: replace(call, reads=()))


MODEST = st.lists(st.recursive(LEAF, modest, max_leaves=6), min_size=1, max_size=4).map(tuple)


@THOROUGH
@given(st.lists(MODEST, min_size=1, max_size=3), st.integers(0, 3))
def test_no_more_room_is_used_than_a_moment_needs(models: list[tuple[Call, ...]], spare: int) -> None:
    """With any more to fetch ahead into: prefetch never holds what compute waits for."""
    with autograd(max(map(least_room, models)) + spare) as torch_model:
        for model in models * 2:
            torch_model.backward(torch_model.forward(model))
            torch_model.forward(model, grad=False)
            torch_model.check_quiet()


@pytest.mark.slow
@THOROUGH
@given(MODELS, st.data())
def test_graphs_of_several_forwards_in_any_order(models: list[tuple[Call, ...]], data: st.DataObject) -> None:
    """Older first, newer first, twice over one graph, several in one pass, evaluation in between."""
    with autograd() as torch_model:
        tapes = [torch_model.forward(model) for model in models]
        numbers = st.lists(st.sampled_from(range(len(tapes))), min_size=1, max_size=2)
        for together in data.draw(st.lists(numbers, min_size=1, max_size=4)):
            torch_model.backward([node for number in sorted(set(together)) for node in tapes[number]])
            torch_model.check_quiet()
            if data.draw(st.booleans()):
                torch_model.forward(models[0], grad=False)
                torch_model.check_quiet()


@THOROUGH
@given(MODELS, st.integers(0, 60), st.sampled_from([BoomError, KeyboardInterrupt]), st.booleans())
def test_whatever_is_raised_at_any_moment(
    models: list[tuple[Call, ...]], fuse: int, kind: type[BaseException], guarded: bool
) -> None:
    """After it nothing is held, at the latest when the next forward begins, and passes run as if it never was."""
    with autograd() as torch_model:
        torch_model.fuse, torch_model.kind = fuse, kind
        for model in models:
            with suppress(BoomError, KeyboardInterrupt):
                torch_model.backward(torch_model.forward(model, guarded=guarded), guarded=guarded)
        event("raised" if torch_model.fuse < 0 else "not reached")
        torch_model.fuse = -1
        if not guarded:
            torch_model.forward((), grad=False)
        torch_model.check_quiet()
        torch_model.gradients.reset()
        ended_before = torch_model.ended
        for model in models:
            torch_model.backward(torch_model.forward(model))
            torch_model.check_quiet()
        assert torch_model.ended > ended_before
