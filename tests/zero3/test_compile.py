"""torch.compile: blocks compiled in place work under the hooks; what cannot work says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiering.errors import ConfigError, EngineStateError

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}
# The compiler looks at .grad of everything, and silences the warning in a way that "error" comes before.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
BACKEND = "aot_eager"  # graphs, autograd ahead of time, no compiler of C++


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# Before it they are compiled in test_everywhere.py, too.
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_compiled_blocks_give_the_same_bits_wherever_they_live(
    start: Callable[..., Any], small_model: type[nn.Module], micro_batches: Any, differing: Any, when: str
) -> None:
    def run(**placement: Any) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model: Any = small_model()
        graphs = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)

        def compile_blocks() -> None:
            for block in model.blocks:
                block.compile(backend=backend)

        if when == "before":
            compile_blocks()
        engine = start(model, accumulation=1, **placement)
        if when == "after":
            compile_blocks()
        for tokens, targets in micro_batches(3):
            engine.backward(engine(tokens, targets))
            engine.step()
        assert graphs, "nothing was compiled"
        masters: dict[str, Tensor] = engine.master_state_dict()
        return masters

    assert differing(run(**STREAMED), run()) == []


def test_a_compiled_whole_is_refused_with_the_remedy(start: Callable[..., Any], micro_batches: Any) -> None:
    engine = start(accumulation=1, **STREAMED)
    tokens, targets = next(iter(micro_batches(1)))
    compiled = torch.compile(engine.module, backend="eager")
    step = torch.compile(lambda: engine(tokens, targets), backend="eager")
    for call in (lambda: compiled(tokens, targets), step):
        with pytest.raises(EngineStateError, match=r"block\.compile\(\)"):
            call()
    engine.backward(engine(tokens, targets))
    engine.step()


def test_wrapped_modules_are_refused_at_initialize(start: Callable[..., Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"the model is wrapped by torch\.compile"):
        start(torch.compile(model, backend="eager"))
    model[1] = torch.compile(model[1], backend="eager")
    with pytest.raises(ConfigError, match=r"1 is wrapped by torch\.compile"):
        start(model)
