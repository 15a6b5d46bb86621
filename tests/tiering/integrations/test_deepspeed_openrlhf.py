"""What OpenRLHF 0.11.0 does at stage 3 with several ranks, under the shim: it averages models, and saves them.

Its ``Actor`` has the engine in place of the model. The functions follow ``moving_average`` and ``save_model`` of its
DeepspeedStrategy, without its command line, which needs GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from tests.zero3.plain import differing
from tiering.errors import EngineStateError, ResidencyError

from .shimmed import under_shim
from .trainers import llama

pytestmark = pytest.mark.slow

BETA = 0.75
# Some parameters stay on the device, as with DeepSpeed's default for small ones.
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}


class Actor(nn.Module):
    def __init__(self, model: nn.Module, **sections: Any) -> None:
        import deepspeed

        super().__init__()
        self.model = model
        self.model = deepspeed.initialize(model=self.model, config=SETTINGS | sections)[0]


def to_fetch(params: list[nn.Parameter]) -> list[nn.Parameter]:
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    return [
        param
        for param in params
        if hasattr(param, "ds_id") and param.ds_status == ZeroParamStatus.NOT_AVAILABLE
    ]


def moving_average(model: nn.Module, average: nn.Module) -> None:
    import deepspeed

    with torch.no_grad():
        for param, averaged in zip(model.parameters(), average.parameters(), strict=True):
            fetched = to_fetch([param, averaged])
            with deepspeed.zero.GatheredParameters(fetched, enabled=len(fetched) > 0):
                data = param.data.to("cpu")
                averaged.data.copy_((1 - BETA) * data + BETA * averaged.data)


def save_model(model: Any, output: Path) -> None:
    state = model._consolidated_16bit_state_dict()
    if torch.distributed.get_rank() == 0:
        names = set(model.module.state_dict().keys())
        assert names <= set(state.keys())
        model.module.save_pretrained(output, state_dict=state)
    torch.distributed.barrier()


@under_shim(ranks=2)
def test_a_moving_average_is_kept_and_saved(tmp_path: Path) -> None:
    actor, averaged = Actor(llama(), optimizer=ADAMW), Actor(llama(seed=5))
    model, average = actor.model, averaged.model
    tokens = torch.randint(5, 50, (2, 8), generator=torch.Generator().manual_seed(model.global_rank))
    model.backward(model(input_ids=tokens, labels=tokens).loss)
    model.step()
    before, weights = average.state_dict(), model.state_dict()
    expected = {name: (1 - BETA) * weights[name] + BETA * before[name] for name in before}
    assert any(to_fetch([param]) for param in average.parameters())
    assert not all(to_fetch([param]) for param in average.parameters())
    moving_average(actor, averaged)
    assert differing(average.state_dict(), expected) == []
    save_model(average, tmp_path)
    assert isinstance(model, nn.Module) and isinstance(model, type(average))
    assert not actor.eval().training and not model.training and averaged.train().model.training
    assert [*averaged.state_dict()] == [f"model.{name}" for name in expected]
    saved = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    assert differing(saved, {name: expected[name] for name in saved}) == []


@under_shim(ranks=2)
def test_rank_0_alone_reads_names_and_no_values() -> None:
    import deepspeed

    model = deepspeed.initialize(model=llama(), config=SETTINGS)[0]
    whole = model.state_dict()
    if torch.distributed.get_rank() == 0:
        state = model.module.state_dict()
        assert [(name, value.shape, value.dtype) for name, value in state.items()] == [
            (name, value.shape, value.dtype) for name, value in whole.items()
        ]
        name = "model.layers.0.mlp.up_proj.weight"
        for use in (state[name].clone, state[name].float, state[name].untyped_storage):
            with pytest.raises(ResidencyError, match=f"{name}'.*with tiering.gathered"):
                use()
    torch.distributed.barrier()
    param = model.module.get_parameter("model.layers.0.mlp.up_proj.weight")
    with (
        pytest.raises(
            EngineStateError, match=r"was changed, and not alike on all ranks; the change is dropped"
        ),
        deepspeed.zero.GatheredParameters(param),
    ):
        param.data.fill_(torch.distributed.get_rank())
    assert differing(model.state_dict(), whole) == []
