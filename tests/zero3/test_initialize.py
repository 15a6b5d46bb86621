"""What ``initialize`` takes, and what it gives for that; what it refuses, before anything has moved."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tiering
from optim_cpu.formats import split
from tiering.errors import ConfigError, PlacementError, SwapSpaceError
from zero3.optimizer.schedulers import WarmupLR

from .mixture import mixture, train_mixture

STREAMED = {"offload_param": "nvme", "offload_optimizer": "nvme", "cache_in_host": False}


def test_initialize_returns_loader_and_scheduler() -> None:
    data = TensorDataset(torch.arange(10))
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
        "tiering": {"telemetry": {"enabled": False}},
    }
    parts = tiering.initialize(
        model=nn.Linear(4, 4),
        config=config,
        training_data=data,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5),
    )
    engine, optimizer, loader, scheduler = parts
    assert loader is not None
    assert sorted(int(i) for (batch,) in loader for i in batch) == list(range(10))
    assert next(iter(loader))[0].shape == (5,)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert scheduler is parts.lr_scheduler is engine.lr_scheduler
    assert optimizer.param_groups[0]["lr"] == 5e-4
    engine.close()


def test_named_parameters_are_accepted(start: Callable[..., Any]) -> None:
    model = mixture()
    engine = start(model, model_parameters=model.named_parameters(), accumulation=1)
    losses = train_mixture(engine, [0, 0, 0])
    assert losses[-1] < losses[0]


def test_parameters_left_out_of_model_parameters(start: Callable[..., Any]) -> None:
    model = mixture()
    with pytest.raises(ConfigError, match="not in model_parameters"):
        start(model, model_parameters=[model.first.weight])
    with pytest.raises(ConfigError, match="nothing to train"):
        start(nn.Linear(2, 2).requires_grad_(False))
    model.register_parameter("codes", nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False))
    # Only what can be trained must be in model_parameters.
    trained = [param for param in model.parameters() if param.requires_grad]
    assert start(model, model_parameters=trained).state_dict()["codes"].dtype is torch.int8


def test_parameters_that_are_not_the_models_or_listed_twice(
    start: Callable[..., Any], differing: Callable[..., list[str]]
) -> None:
    model = mixture()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="1 parameters that are not the model's"):
        start(model, model_parameters=[*model.parameters(), nn.Parameter(torch.ones(2))], **STREAMED)
    twice = [{"params": list(model.parameters())}, {"params": [model.first.weight]}]
    with pytest.raises(ConfigError, match="twice"):
        start(model, model_parameters=twice, **STREAMED)
    assert differing(model.state_dict(), before) == [], "refused after the model was moved"


def test_a_parameter_without_elements(start: Callable[..., Any]) -> None:
    class Hollow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.nothing = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.float().pow(2).mean() + self.nothing.float().sum()

    engine = start(Hollow(), accumulation=1, threshold=0, **STREAMED)
    before = engine.master_state_dict()
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)))
    engine.step()
    assert engine.state_dict()["nothing"].shape == (0, 3)
    assert not torch.equal(engine.master_state_dict()["blocks.0.weight"], before["blocks.0.weight"])


def test_state_dict_has_the_models_names_and_values(
    start: Callable[..., Any], small_model: type[nn.Module]
) -> None:
    torch.manual_seed(3)
    original = small_model()
    expected = {name: value.clone() for name, value in original.state_dict().items()}
    engine = start(**STREAMED)
    state = engine.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], split(expected[name])[0]) for name in expected)
    masters = engine.master_state_dict()
    assert all(torch.equal(masters[name], expected[name]) for name in masters)
    assert set(masters) == set(dict(original.named_parameters()))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        pytest.param({"device_budget": "40KiB"}, PlacementError, ["device_budget", "embedding"], id="device"),
        pytest.param({"host_budget": "64KiB"}, PlacementError, ["host_budget"], id="host"),
        pytest.param({"nvme_budget": "100KiB"}, PlacementError, ["nvme_budget"], id="nvme"),
        pytest.param({"host_budget": -1}, ConfigError, ["host_budget", "negative"], id="negative"),
        pytest.param({"host_budgte": "1G"}, ConfigError, ["host_budget"], id="typo"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_moves(
    start: Callable[..., Any],
    small_model: type[nn.Module],
    options: dict[str, Any],
    error: type[Exception],
    words: list[str],
) -> None:
    model = small_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error) as refusal:
        start(model, **{**STREAMED, **options})
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_missing_directory_is_refused_by_name(start: Callable[..., Any], nvme: Path) -> None:
    nvme.rmdir()
    with pytest.raises(SwapSpaceError, match="does not exist"):
        start(**STREAMED)


USUAL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 5,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": "auto",
        "allgather_bucket_size": 1e6,
        "cpu_offload": False,
    },
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "tiering": {"telemetry": {"enabled": False}},
}


class Sized(nn.Linear):
    """As transformers' models, it knows its configuration."""

    config = SimpleNamespace(hidden_size=8)


LR: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "scheduler": {}}


def test_auto_is_filled_in_from_a_trainers_arguments_and_the_model() -> None:
    args = argparse.Namespace(
        learning_rate=2e-3, warmup_steps=3, adam_beta1=0.8, adam_beta2=0.9, max_grad_norm=0.5
    )
    model = Sized(8, 8).to(torch.bfloat16)
    engine, optimizer, _, scheduler = tiering.initialize(args, model, config=USUAL)
    with engine:
        assert engine.settings.precision == "bf16"
        assert engine.settings.zero.persistence_threshold == 80
        assert engine.settings.gradient_clipping == 0.5
        assert isinstance(scheduler, WarmupLR)
        (group,) = optimizer.param_groups
        assert group["betas"] == (0.8, 0.9)
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).sum())
            engine.step()
        assert group["lr"] == 2e-3
    with pytest.raises(
        ConfigError, match=r"lr: 'auto' needs .* initialize\(args=...\) with learning_rate"
    ) as caught:
        tiering.initialize(model=nn.Linear(4, 4), config=USUAL)
    assert "scheduler.params.warmup_num_steps" in str(caught.value)


def test_values_that_differ_from_a_trainers_arguments_are_refused() -> None:
    """The loop of the trainer uses its own values; the file's count if the caller says so."""
    args = argparse.Namespace(learning_rate=2e-3, warmup_steps=3, per_device_train_batch_size=4)
    config = USUAL | {"train_micro_batch_size_per_gpu": 2}
    differs = r"train_micro_batch_size_per_gpu: 2 differs from args\.per_device_train_batch_size, 4"
    with pytest.raises(ConfigError, match=differs):
        tiering.initialize(args, Sized(8, 8), config=config)
    engine, *_ = tiering.initialize(args, Sized(8, 8), config=config, strict_args=False)
    with engine:
        assert engine.train_micro_batch_size_per_gpu() == 2


def test_what_an_object_replaces_need_not_be_filled_in() -> None:
    model = nn.Linear(4, 4)
    mine = torch.optim.AdamW(model.parameters(), lr=0.25)
    halved = torch.optim.lr_scheduler.ConstantLR(mine, factor=0.5)
    engine, optimizer, _, scheduler = tiering.initialize(
        model=model, optimizer=mine, lr_scheduler=halved, config=USUAL
    )
    with engine:
        assert scheduler is halved
        assert optimizer.param_groups[0]["lr"] == 0.125
        assert engine.settings.optimizer is None
        assert engine.settings.scheduler is None


def test_the_configuration_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    usual = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "tiering": USUAL["tiering"]}
    path.write_text(json.dumps(usual))
    args = argparse.Namespace(deepspeed=True, deepspeed_config=str(path))
    empty = argparse.Namespace(deepspeed_config="")
    ways: list[dict[str, Any]] = [
        {"args": args},
        {"args": {"deepspeed": usual}},
        {"args": empty, "config": usual},
    ]
    for arguments in (*ways, {"config_params": usual}, {"config": path}):
        engine, *_ = tiering.initialize(model=nn.Linear(4, 4), **arguments)
        engine.close()
        assert engine.settings.train_batch_size == 1
    with pytest.raises(ConfigError, match=r"different configurations in config and args.deepspeed_config"):
        tiering.initialize(args, nn.Linear(4, 4), config=usual)
    with pytest.raises(ConfigError, match="got no configuration"):
        tiering.initialize(argparse.Namespace(deepspeed_config=None, deepspeed=True), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"needs a model.*not NoneType"):
        tiering.initialize(config=usual)
    with pytest.raises(ConfigError, match="object as mpu, which has no get_data_parallel_world_size"):
        tiering.initialize(model=nn.Linear(4, 4), config=usual, mpu=object())
    with pytest.raises(ConfigError, match="dist_init_required"):
        tiering.initialize(model=nn.Linear(4, 4), config=usual, dist_init_required=False)


def test_auto_precision_is_that_of_most_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).bfloat16()
    model[1].float()  # as a router or its bias is kept
    for built, precision in ((model, "bf16"), (nn.Linear(4, 4), "fp32"), (nn.Linear(4, 4).half(), "fp32")):
        with tiering.initialize(
            model=built, config=USUAL | {"bf16": {"enabled": "auto"}} | LR
        ).engine as engine:
            assert engine.settings.precision == precision


def test_arguments_may_be_of_any_class(tmp_path: Path) -> None:
    """As a notebook has them, where vars() has nothing: a weight decay that is not seen would be 0."""

    class Args:
        weight_decay = 0.25
        deepspeed_config = str(tmp_path / "ds_config.json")

        @property
        def learning_rate(self) -> float:
            return 0.5

    config = USUAL | {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}
    del config["scheduler"]
    Path(Args.deepspeed_config).write_text(json.dumps(config), encoding="utf-8")
    engine, optimizer, _, _ = tiering.initialize(Args(), nn.Linear(4, 4))
    engine.close()
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.25)]


def test_a_scheduler_of_any_class_is_stepped(tmp_path: Path) -> None:
    class Halving:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.param_groups[0]["lr"] /= 2

    config = USUAL | {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    engine, *_, scheduler = tiering.initialize(model=nn.Linear(4, 4), config=config, lr_scheduler=Halving)
    with engine:
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert (engine.get_lr(), type(scheduler)) == ([0.25], Halving)
        with pytest.raises(ConfigError, match=r"the Halving .* has no state_dict\(\), load_state_dict\(\)"):
            engine.save_checkpoint(tmp_path)
        assert list(tmp_path.iterdir()) == []
    for wrong, kind in (("WarmupLR", "not str"), (lambda optimizer: None, "the function returned NoneType")):
        with pytest.raises(ConfigError, match=kind):
            tiering.initialize(model=nn.Linear(4, 4), config=config, lr_scheduler=wrong)


def test_the_start_says_what_the_configuration_comes_to(caplog: pytest.LogCaptureFixture) -> None:
    config = USUAL | {"optimizer": {"type": "Lion"}, "scheduler": {}, "train_micro_batch_size_per_gpu": 3}
    for _ in range(2):
        engine, *_ = tiering.initialize(model=nn.Linear(4, 4), config=config)
        engine.close()
    messages = [record.getMessage() for record in caplog.records if record.name == "tiering.progress"]
    assert messages == [  # once
        (
            "batch 3, fp32, ZeRO stage 3, Lion, gradients clipped at 1; no effect: allgather_bucket_size;"
            " deprecated: cpu_offload;"
            " run `tiering check FILE` for the reasons"
        )
    ]
    configuration = engine._observation.description.configuration
    assert configuration.outcome == "batch 3, fp32, ZeRO stage 3, Lion, gradients clipped at 1"
    assert configuration.without_effect == ["zero_optimization.allgather_bucket_size"]


def test_a_short_last_micro_batch_is_left_out_if_the_configuration_says_so() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "dataloader_drop_last": True,
    }
    engine, _, loader, _ = tiering.initialize(
        model=nn.Linear(4, 4), config=config, training_data=TensorDataset(torch.arange(5))
    )
    with engine:
        assert loader is not None
        assert [len(batch) for (batch,) in loader] == [2, 2]


def test_loaders_that_the_engine_makes_later_collate_as_that_of_the_training_data() -> None:
    data, config = TensorDataset(torch.arange(3)), {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
    engine, _, loader, _ = tiering.initialize(
        model=nn.Linear(4, 4), config=config, training_data=data, collate_fn=len
    )
    with engine:
        assert loader is not None
        assert [*loader] == [*engine.deepspeed_io(data)] == [2, 1]


def test_a_model_that_could_not_be_placed_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an optimizer an engine freezes its model, but not before nothing can fail any more."""
    model = nn.Linear(4, 4)
    monkeypatch.setattr("zero3.setup.assembly.Fill.run", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tiering.initialize(model=model, config={"train_batch_size": 1})
    assert model.weight.requires_grad
