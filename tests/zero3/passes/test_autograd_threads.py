"""Backward in another thread than forward: on a GPU autograd runs all of it, hooks included, in threads of its own.

Here a thread that lives as long as the test stands for autograd's: the one that called waits for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.zero3.conftest import SEQUENCE, SmallModel, batches
from tiering.errors import EngineStateError

Start = Callable[..., Any]
Run = Callable[[Callable[[], Any]], Any]
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


class Checkpointed(SmallModel):
    """Its blocks are recomputed in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens) + self.position(torch.arange(SEQUENCE))
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=self.reentrant)
        logits = self.head(self.norm(stream)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.fixture
def elsewhere() -> Iterator[Run]:
    """``elsewhere(call)`` is ``call()``, in a thread that is the same each time."""
    calls: queue.Queue[Callable[[], Any] | None] = queue.Queue()
    answers: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def work() -> None:
        while (call := calls.get()) is not None:
            try:
                answers.put((call(), None))
            except BaseException as error:
                answers.put((None, error))

    def run(call: Callable[[], Any]) -> Any:
        calls.put(call)
        answer, error = answers.get()
        if error is not None:
            raise error
        return answer

    thread = threading.Thread(target=work)
    thread.start()
    yield run
    calls.put(None)
    thread.join()


def here(call: Callable[[], Any]) -> Any:
    return call()


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


@pytest.mark.parametrize(
    ("reentrant", "early"), [(True, False), (False, True)], ids=["reentrant", "saved, stepped in backward"]
)
def test_gradients_and_steps_are_those_of_one_thread(
    start: Start, elsewhere: Run, differing: Any, reentrant: bool, early: bool
) -> None:
    def train(run: Run, **placement: Any) -> dict[str, Tensor]:
        model = seeded(lambda: Checkpointed(reentrant=reentrant))
        engine = start(model, accumulation=1, clip=0.0, step_in_backward=early, **placement)
        for tokens, targets in batches(3):
            loss = engine(tokens, targets)
            run(loss.backward if early else lambda: engine.backward(loss))  # noqa: B023 # it is over then
            engine.step()
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(train(elsewhere, **STREAMED), train(here)) == []


@pytest.mark.parametrize("guarded", [True, False])
def test_an_exception_there_leaves_a_usable_engine(
    start: Start, elsewhere: Run, differing: Any, guarded: bool
) -> None:
    """Of the user's own ``loss.backward()`` as of ``engine.backward``; the failed micro-batch does not count."""

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError("by the user's hook")

    def train(run: Run, *, fails: bool, **placement: Any) -> dict[str, Tensor]:
        engine = start(seeded(lambda: Checkpointed(reentrant=True)), accumulation=1, **placement)
        for step, (tokens, targets) in enumerate(batches(3)):
            for failing in [True, False] if fails and step == 1 else [False]:
                loss = engine(tokens, targets)
                backward = (lambda: engine.backward(loss)) if guarded else loss.backward  # noqa: B023
                if failing:
                    hook = engine.module.blocks[1].up.weight.register_hook(fail)
                    with pytest.raises(ZeroDivisionError):
                        run(backward)
                    hook.remove()
                else:
                    run(backward)
                    engine.step()
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(train(elsewhere, fails=True, **STREAMED), train(here, fails=False)) == []


def test_a_backward_inside_of_a_forward_recomputes_there(start: Start, elsewhere: Run) -> None:
    """And is no second thread that calls the model: the forward goes on when it is over."""

    class Penalised(Checkpointed):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            stream = self.embedding(tokens).detach().requires_grad_()
            recomputed = checkpoint(self.blocks[0], stream, use_reentrant=False)
            (slope,) = self.run(lambda: torch.autograd.grad(recomputed.float().sum(), stream))
            return super().forward(tokens, targets) + slope.float().pow(2).mean()

    def train(run: Run) -> list[float]:
        model: Any = seeded(lambda: Penalised(reentrant=False))
        model.run = run
        engine = start(model, accumulation=1, **STREAMED)
        losses = []
        for tokens, targets in batches(2):
            loss = engine(tokens, targets)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        return losses

    assert train(elsewhere) == train(here)


@pytest.mark.parametrize("placement", [{}, STREAMED], ids=["device", "nvme"])
def test_a_forward_beside_a_backward_is_refused_and_does_it_no_harm(
    start: Start, differing: Any, placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero3.passes.pass_state.RELEASE_TIMEOUT", 0.01)
    first, second = batches(2)
    running, refused = threading.Event(), threading.Event()

    def pause(gradient: Tensor) -> None:
        running.set()
        assert refused.wait(60)

    engine = start(accumulation=1, **placement)
    hook = engine.module.blocks[1].up.weight.register_hook(pause)
    thread = threading.Thread(target=engine(*first).backward)
    thread.start()
    assert running.wait(60)
    for call in (lambda: engine(*second), lambda: engine.module(*second), engine.step):
        with pytest.raises(EngineStateError, match="a backward is running in another thread"):
            call()
    refused.set()
    thread.join()
    hook.remove()
    engine.step()

    undisturbed = start(accumulation=1)
    undisturbed.backward(undisturbed(*first))
    undisturbed.step()
    assert differing(engine.master_state_dict(), undisturbed.master_state_dict()) == []
