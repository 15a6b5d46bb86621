"""What scripts ask a DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tiering
from tests.zero3.plain import STREAMED, differing
from tiering.config.training import TieringConfig
from tiering.errors import ConfigError, EngineStateError
from zero3.deepspeed.engine import DeepSpeedEngine
from zero3.engine.engine import Engine

PLACEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "cpu": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nvme": {**STREAMED, "threshold": 0},
}


def test_what_an_engine_answers(start: Callable[..., Any]) -> None:
    engine = start(
        precision="fp16", accumulation=3, clip=0.5, offload_optimizer="cpu", fp16={"initial_scale_power": 4}
    )
    assert (engine.local_rank, engine.global_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
    assert (engine.mp_world_size, engine.get_data_parallel_rank(), engine.get_model_parallel_rank()) == (
        1,
        0,
        0,
    )
    assert (
        engine.get_batch_info()
        == (6, 2, 3)
        == (engine.train_batch_size(), 2, engine.gradient_accumulation_steps())
    )
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.torch_autocast_enabled()) == (
        True,
        False,
        False,
    )
    assert (engine.loss_scale(), engine.dynamic_loss_scale(), engine.gradient_clipping()) == (16.0, True, 0.5)
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 3
    assert engine.zero_optimization_partition_gradients() and engine.zero_optimization_partition_weights()
    assert engine.zero_cpu_offload() and engine.zero_offload_optimizer().device == "cpu"
    assert engine.zero_offload_param() is None and engine.torch_autocast_dtype() is None
    assert (engine.steps_per_print(), engine.wall_clock_breakdown(), engine.dataloader_drop_last()) == (
        None,
        False,
        False,
    )
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("AdamW", None)
    assert (engine.get_lr(), engine.get_mom(), engine.get_type()) == ([1e-3], [(0.9, 0.999)], [0.0])
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5] and engine.global_samples == 0
    state = engine.module_state_dict(prefix="net.")
    assert {name.removeprefix("net.") for name in state} == set(engine.state_dict())
    engine.module.position.weight.requires_grad_(False)
    assert set(state) - set(engine.module_state_dict(prefix="net.", exclude_frozen_parameters=True)) == {
        "net.position.weight"
    }


def test_the_configuration_is_a_plain_dict_with_a_value_for_each_auto() -> None:
    """A trainer reads it with get; ours is beside it."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": "auto"}
    settings: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": zero,
        "tiering": {"telemetry": {"enabled": False}},
    }
    engine, *_ = tiering.initialize({"learning_rate": 0.5}, torch.nn.Linear(2, 2), config=settings)
    with engine:
        assert type(engine.config) is dict and isinstance(engine.settings, TieringConfig)
        assert engine.config == settings | {
            "train_batch_size": 2,
            "bf16": {"enabled": False},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.0}},
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 50_000_000},
        }
        assert engine.config.get("zero_optimization", {}).get("stage") == 3
        assert (
            engine.config["zero_optimization"] is not zero and zero["stage3_prefetch_bucket_size"] == "auto"
        )


@pytest.mark.parametrize("place", PLACEMENTS)
def test_the_whole_model_in_16_bits(start: Callable[..., Any], place: str) -> None:
    engine = start(**PLACEMENTS[place])
    engine.module.position.weight.requires_grad_(False)
    state = engine._zero3_consolidated_16bit_state_dict()
    assert differing(state, engine.state_dict()) == []
    assert differing(state, engine._consolidated_16bit_state_dict()) == []
    assert {value.dtype for value in state.values()} == {torch.bfloat16}
    assert state["head.weight"] is state["embedding.weight"]
    trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert set(state) - set(trained) == {"position.weight"}


def test_the_whole_model_is_requested_at_stage_3_only(start: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"at stage 2, .*call module_state_dict\(\)"):
        start(stage=2)._zero3_consolidated_16bit_state_dict()


@pytest.mark.parametrize(
    ("section", "gathers"),
    [
        ({}, False),
        ({"stage3_gather_16bit_weights_on_model_save": True}, True),
        ({"stage3_gather_16bit_weights_on_model_save": False}, False),
        ({"stage3_gather_fp16_weights_on_model_save": True}, True),
    ],
)
def test_whether_a_trainer_is_to_save_the_whole_model(section: dict[str, bool], gathers: bool) -> None:
    config: dict[str, Any] = {
        "train_batch_size": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3} | section,
        "tiering": {"telemetry": {"enabled": False}},
    }
    engine, *_ = tiering.initialize(model=torch.nn.Linear(2, 2), config=config)
    with engine:
        assert engine.zero_gather_16bit_weights_on_model_save() is gathers


def test_an_engine_stands_for_its_module(start: Callable[..., Any]) -> None:
    engine = start()
    assert dict(engine.named_parameters()).keys() == dict(engine.module.named_parameters()).keys()
    assert engine.training and not engine.eval().training and engine.blocks is engine.module.blocks
    with pytest.raises(AttributeError, match="training"):
        engine.training = True  # which would leave the module as it is
    with pytest.raises(
        AttributeError, match="its SmallModel has an attribute 'get_global_grad_nrom'; did you mean"
    ):
        engine.get_global_grad_nrom()
    for name in ("timers", "allreduce_gradients"):
        with pytest.raises(AttributeError) as missing:
            getattr(engine, name)
        assert "did you mean '_" not in str(missing.value), "a private name is no help"
    with pytest.raises(AttributeError, match="'_blocks'"):
        engine._blocks  # noqa: B018 # is what is tried
    engine.module._no_split_modules = ["Block"]
    assert engine._no_split_modules == ["Block"], "trainers ask for such names"
    engine.module.__array__ = 1
    assert not hasattr(engine, "__array__"), "what Python and others look for is the engine's"
    with pytest.raises(EngineStateError, match="compile its blocks"):
        engine.compile()

    class Broken(Engine):
        @property
        def training(self) -> bool:
            return self.module.norm.nothing

    vars(object)["__class__"].__set__(engine, Broken)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):  # and not: of no attribute 'training'
        engine.training  # noqa: B018 # is what is tried


def test_a_script_that_says_itself_where_an_update_is(
    start: Callable[..., Any], micro_batches: Callable[..., Any]
) -> None:
    """Bit for bit as one that lets the engine count; step() at each micro-batch, or only at the last."""

    def run(says: bool, each: bool) -> tuple[dict[str, Tensor], list[bool]]:
        engine, applied = start(accumulation=3), []
        for number, batch in enumerate(micro_batches(6), 1):
            last = number % 3 == 0
            if says:
                engine.set_gradient_accumulation_boundary(last)
            assert engine.is_gradient_accumulation_boundary() is last
            engine.backward(engine(*batch))
            if each or last:
                engine.step()
                applied.append(engine.was_step_applied())
        assert engine.global_steps == 2
        return engine.master_state_dict(), applied

    counted, applied = run(says=False, each=True)
    assert applied == [False, False, True] * 2
    for each in (True, False):
        outspoken, _ = run(says=True, each=each)
        assert all(torch.equal(counted[name], outspoken[name]) for name in counted)


def test_a_boundary_that_comes_early_leaves_nothing_waiting(
    start: Callable[..., Any], micro_batches: Callable[..., Any], tmp_path: Path
) -> None:
    engine = start(accumulation=3)
    first, second, third = micro_batches(3)
    engine.backward(engine(*first))
    engine.step()
    with pytest.raises(EngineStateError, match="no step has used"):
        engine.save_checkpoint(tmp_path)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(*second))
    engine.step()
    assert engine.was_step_applied() and engine.micro_steps == 2
    engine.save_checkpoint(tmp_path)
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(*third))
    engine.step()
    assert not engine.was_step_applied() and engine.global_steps == 1


def test_another_batch_size(
    start: Callable[..., Any], micro_batches: Callable[..., Any], tmp_path: Path
) -> None:
    """As an engine that had it from the start."""

    def train(engine: Any, batches: list[Any]) -> None:
        for batch in batches:
            engine.backward(engine(*batch))
            engine.step()

    batches = list(micro_batches(6))
    changed, other = start(accumulation=2), start(accumulation=2)
    train(changed, batches[:2])
    train(other, batches[:2])
    changed.set_train_batch_size(8)
    assert changed.get_batch_info() == (8, 2, 4)
    train(changed, batches[2:])
    assert (changed.global_steps, changed.global_samples) == (2, 4 + 8)
    changed.save_checkpoint(tmp_path)
    resumed = start(accumulation=2)
    resumed.load_checkpoint(tmp_path)
    assert resumed.global_samples == 4 + 8
    with other.no_sync():
        for batch in batches[2:5]:
            other.backward(other(*batch) / 4, scale_wrt_gas=False)
    other.set_gradient_accumulation_boundary(True)
    other.backward(other(*batches[5]) / 4, scale_wrt_gas=False)
    other.step()
    first, two = changed.master_state_dict(), other.master_state_dict()
    assert all(torch.equal(first[name], two[name]) for name in first)
    with pytest.raises(ConfigError, match="is 2 samples; give a multiple"):
        changed.set_train_batch_size(7)
    with pytest.raises(ConfigError, match="grad_accum_dtype"):
        changed.set_train_batch_size(2)
    train(changed, batches[:1])
    with pytest.raises(EngineStateError, match="no step has used"):
        changed.set_train_batch_size(4)


def test_step_gives_the_schedule_what_it_is_told(
    start: Callable[..., Any], micro_batches: Callable[..., Any]
) -> None:
    engine = start(accumulation=1)
    calls: list[Any] = []

    class Schedule(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *args: Any, **kwargs: Any) -> None:
            calls.append(kwargs)

    engine.lr_scheduler = Schedule(engine.optimizer, lambda _: 1.0)
    calls.clear()
    for options in ({}, {"lr_kwargs": {"epoch": 3}}):
        engine.backward(engine(*next(micro_batches(1))))
        engine.step(**options)
    assert calls == [{}, {"epoch": 3}]


def test_a_loader_of_an_engine(start: Callable[..., Any]) -> None:
    engine = start()
    dataset = TensorDataset(torch.arange(7))
    sizes = [len(batch[0]) for batch in engine.deepspeed_io(dataset)]
    assert sizes == [2, 2, 2, 1]
    order = [int(x) for (batch,) in engine.deepspeed_io(dataset, batch_size=3, route="eval") for x in batch]
    assert order == list(range(7))
    sampler = torch.utils.data.SequentialSampler(range(3))
    (batch,) = engine.deepspeed_io(dataset, 4, data_sampler=sampler, collate_fn=lambda items: len(items))
    assert batch == 3
    engine.collate_fn = len
    assert [*engine.deepspeed_io(dataset)] == [2, 2, 2, 1]
    engine.settings = engine.settings.model_copy(update={"dataloader_drop_last": True})
    assert [*engine.deepspeed_io(dataset)] == [*engine.deepspeed_io(dataset, route="eval")] == [2, 2, 2]
    with pytest.raises(ConfigError, match="'test'; use 'train'"):
        engine.deepspeed_io(dataset, route="test")


def test_a_loss_that_the_engine_was_not_told_is_not_that_of_an_earlier_step(
    start: Callable[..., Any], micro_batches: Callable[..., Any]
) -> None:
    engine = start(accumulation=1)
    first, second = micro_batches(2)
    loss = engine(*first)
    engine.backward(loss)
    engine.step()
    assert engine.snapshot().loss == loss.item()
    engine(*second).backward()
    engine.step()
    assert engine.snapshot().loss is None


def test_a_module_has_an_engine_as_its_child(
    start: Callable[..., Any], micro_batches: Callable[..., Any]
) -> None:
    engine, parent = start(), nn.Module()
    parent.model = engine.module
    with pytest.raises(TypeError, match="cannot assign"):
        parent.model = engine
    engine.become_child()
    parent.model = engine
    assert isinstance(engine, nn.Module)
    assert type(engine) is DeepSpeedEngine
    assert [*parent.state_dict()] == [f"model.{name}" for name in engine.state_dict()]
    assert [*parent.parameters()] == [*engine.module.parameters()]
    assert parent.eval().model is engine
    assert not engine.module.training
    batch = next(iter(micro_batches(1)))
    assert torch.equal(engine.as_module()(*batch), engine(*batch))
