"""What is around the engine on a GPU: compiled blocks, autocast, a backward inside of a forward, nobody who waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .conftest import DEVICE, SmallModel, batches, no_wait

pytestmark = pytest.mark.gpu

Start = Callable[..., Any]
HOST = {"offload_param": "cpu", "offload_optimizer": "cpu"}
STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
PLACEMENTS = [pytest.param(HOST, id="host"), pytest.param(STREAMED, id="nvme")]


class Penalised(SmallModel):
    """Takes a gradient in forward, for which autograd's thread computes a block again."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens).detach().requires_grad_()
        again = checkpoint(self.blocks[0], stream, use_reentrant=False)
        (slope,) = torch.autograd.grad(again.float().sum(), stream)
        return super().forward(tokens, targets) + slope.float().pow(2).mean()


class Checkpointed(SmallModel):
    reentrant = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=self.reentrant)
        logits = self.head(self.norm(stream)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def seeded(build: Callable[[], nn.Module] = SmallModel) -> Any:
    torch.manual_seed(3)
    return build()


def masters(engine: Any, steps: int = 3) -> dict[str, Tensor]:
    """Of a training that ends here."""
    for tokens, targets in batches(steps * engine.settings.gradient_accumulation_steps):
        engine.backward(engine(tokens, targets))
        engine.step()
    weights: dict[str, Tensor] = engine.master_state_dict()
    engine.close()
    return weights


def differing(first: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert first.keys() == other.keys()
    return [
        name
        for name in first
        if not torch.equal(first[name].view(torch.int32), other[name].view(torch.int32))
    ]


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler has advice for each machine,
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # and imports what torch has given up
def test_compiled_blocks_give_the_same_bits_wherever_they_live(start: Start) -> None:
    """One graph for all of them; kernels are compiled once and found again by the runs after the first."""
    from torch._dynamo.utils import counters

    def run(**placement: Any) -> dict[str, Tensor]:
        torch.compiler.reset()
        counters.clear()
        model = seeded()
        for block in model.blocks:
            block.compile(fullgraph=True)
        weights = masters(start(model, **placement))
        assert counters["stats"]["unique_graphs"] == 1
        return weights

    on_device = run()
    for placement in (HOST, STREAMED):
        assert differing(run(**placement), on_device) == []
    torch.compiler.reset()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_backward_inside_of_a_forward_runs_in_autograds_thread(
    start: Start, placement: dict[str, Any]
) -> None:
    """It calls the model from there, and the forward goes on when it is over."""
    assert differing(masters(start(seeded(Penalised), **placement)), masters(start(seeded(Penalised)))) == []


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("reentrant", [True, False])
def test_hooks_run_in_autograds_thread(start: Start, reentrant: bool) -> None:
    """What test_autograd_threads.py assumes of a GPU; and the next error is that of the user's hook, not ours."""

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError(threading.get_ident())

    def train(*, fails: bool, **placement: Any) -> dict[str, Tensor]:
        model = seeded(Checkpointed)
        model.reentrant = reentrant
        engine = start(model, **placement)
        for step, (tokens, targets) in enumerate(batches(3)):
            if fails and step == 1:
                hook = engine.module.blocks[1].up.weight.register_hook(fail)
                with pytest.raises(ZeroDivisionError) as raised:
                    engine.backward(engine(tokens, targets))
                assert raised.value.args != (threading.get_ident(),)
                hook.remove()
            engine.backward(engine(tokens, targets))
            engine.step()
        weights: dict[str, Tensor] = engine.master_state_dict()
        return weights

    assert differing(train(fails=True, **STREAMED), train(fails=False)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_over_a_model_kept_in_fp32(start: Start, dtype: torch.dtype) -> None:
    """The user's own, whose cache keeps copies of weights that have gone, and for which autograd has no scale."""

    class Cast(Checkpointed):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(DEVICE.type, dtype):
                return super().forward(tokens, targets)

    runs = [masters(start(seeded(Cast), precision="fp32", **placement)) for placement in ({}, HOST, STREAMED)]
    assert [differing(run, runs[0]) for run in runs] == [[], [], []]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("placement", [pytest.param({}, id="device"), *PLACEMENTS])
def test_nobody_waits_before_the_step_that_updates(start: Start, placement: dict[str, Any]) -> None:
    """By what torch knows of: asking for a number, copying to memory that is not pinned."""
    plain, batch = seeded().to(DEVICE), next(batches(1))
    plain(*batch).backward()  # cuBLAS takes its workspace
    try:
        with no_wait():
            plain(*batch).backward()
    except RuntimeError as error:
        pytest.skip(f"torch's own operations let the CPU wait for this GPU: {error}")
    engine = start(seeded(), accumulation=2, **placement)
    for number, (tokens, targets) in enumerate(list(batches(6))):
        if number < 2:  # the order of groups is recorded
            engine.backward(engine(tokens, targets))
        else:
            with no_wait():
                engine.backward(engine(tokens, targets))
        engine.step()
    assert engine.global_steps == 3
