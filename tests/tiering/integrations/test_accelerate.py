"""A loop of accelerate on the engine reports what it reports without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration, is_peft_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.docs.blocks import blocks
from tests.zero3.ranks.pool import Pool
from tiering.errors import CheckpointError, ConfigError, EngineStateError
from tiering.integrations.accelerate import COMPLETE, Accelerator, DummyOptim, DummyScheduler

from .loops import Loop, accelerator, parts, resumed, run, saved, state
from .programs import output_of
from .trainers import PLACES, config, different, llama, sentences

UPDATES = 20


@pytest.fixture(scope="module")
def plain() -> list[tuple[float, float, float]]:
    return run(0, None, UPDATES)


@pytest.mark.parametrize("place", PLACES)
def test_a_loop_reports_what_it_reports_without(place: str, plain: Any, tmp_path: Path) -> None:
    found = run(0, config(place, tmp_path), UPDATES)
    assert len(found) == UPDATES
    for ours, theirs in zip(found, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_mixed_precision_follows(half: str, plain: Any, tmp_path: Path) -> None:
    found = run(0, config("nvme", tmp_path), UPDATES, mixed_precision=half)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=0.01)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_two_ranks_do(place: str, ranks: Pool, tmp_path: Path) -> None:
    expected = ranks.run(run, None, UPDATES)
    found = ranks.run(run, config(place, tmp_path), UPDATES)
    for ours, theirs in zip(found, expected, strict=True):
        for entry, other in zip(ours, theirs, strict=True):
            assert entry == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("tile", [0, 2048])
def test_a_saved_loop_resumes_with_the_same_bits(tile: int, tmp_path: Path) -> None:
    settings = config("nvme", tmp_path, tiering={"tile": tile})
    before, left, reports = saved(0, settings, tmp_path / "saved", 3)
    loaded, ended, again = resumed(0, settings, tmp_path / "saved", 3)
    assert different(loaded, before) == different(ended, left) == []
    assert again == reports
    assert ("exp_avg of lm_head.tiles.5.weight" in before) == bool(tile)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_loop_of_two_ranks_resumes(place: str, ranks: Pool, tmp_path: Path) -> None:
    settings = config(place, tmp_path)
    # Otherwise accelerate steps a schedule once for each rank, and the rate would depend on their number.
    once = {"step_scheduler_with_optimizer": False}
    by_two = ranks.run(saved, settings, tmp_path / "saved", 3, **once)
    before, left, _ = by_two[0]
    twice = ranks.run(resumed, settings, tmp_path / "saved", 3, **once)
    for (_, _, reports), (loaded, ended, again) in zip(by_two, twice, strict=True):
        assert different(loaded, before) == different(ended, left) == []
        assert again == reports
    # One rank, with the batches of both.
    loaded, _, again = resumed(0, settings, tmp_path / "saved", 3, batch_size=4, **once)
    assert different(loaded, before) == []
    (*_, one), (*_, other) = by_two
    for entry, first, second in zip(again, one, other, strict=True):
        mean = (first[0] + second[0]) / 2
        assert entry == pytest.approx((mean, *first[1:]), rel=1e-5)


def test_an_interrupted_save_is_not_loaded(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    with accelerator(config("device", tmp_path), project_config=project) as made:
        loop = Loop(made)
        loop.run(1)
        made.save_state()
        first = state(made.engine())
        loop.run(1)
        project.iteration = 1
        made.save_state()
        second = state(made.engine())
        made.load_state()
        assert different(state(made.engine()), second) == []
        (tmp_path / "checkpoints/checkpoint_1" / COMPLETE).unlink()
        made.load_state()
        assert different(state(made.engine()), first) == []
        with pytest.raises(CheckpointError, match=f"{COMPLETE} is missing"):
            made.load_state(tmp_path / "checkpoints/checkpoint_1")


def test_another_optimizer_loads_the_weights_alone(tmp_path: Path) -> None:
    def loop(made: Any, kind: type) -> Any:
        torch.manual_seed(5)
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        model, optimizer, schedule = made.prepare(
            model, optimizer, LambdaLR(optimizer, lambda step: 0.5**step)
        )
        made.backward(model(torch.ones(1, 2)).sum())
        return model, optimizer, schedule

    with accelerator(config("nvme", tmp_path), gradient_accumulation_steps=1) as made:
        _, optimizer, schedule = loop(made, torch.optim.Adagrad)
        optimizer.step()
        schedule.step()
        made.save_state(tmp_path / "saved")
        values = made.engine().master_state_dict()
    with accelerator(config("device", tmp_path), gradient_accumulation_steps=1) as made:
        _, optimizer, schedule = loop(made, torch.optim.AdamW)
        optimizer.zero_grad()
        with pytest.raises(CheckpointError, match=r"load_state\(folder, load_optimizer_states=False\)"):
            made.load_state(tmp_path / "saved")
        alone = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
        made.load_state(tmp_path / "saved", **alone)
        assert different(made.engine().master_state_dict(), values) == []
        assert schedule.get_last_lr() == [0.1]
        assert made.engine().global_steps == 0


def test_save_model_writes_the_weights(tmp_path: Path) -> None:
    with accelerator(config("nvme", tmp_path)) as made:
        loop = Loop(made)
        loop.run(2)
        made.save_model(loop.model, tmp_path / "model")
        values = made.get_state_dict(loop.model)
        assert made.unwrap_model(loop.model) is made.engine().module
        with pytest.raises(ConfigError, match="safe_serialization=False"):
            made.save_model(loop.model, tmp_path / "pickled", safe_serialization=False)
    written = load_file(tmp_path / "model/model.safetensors")
    assert different(written, {name: values[name] for name in written}) == []
    assert set(values) - set(written) <= {"lm_head.weight"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
def test_an_adapter_is_unwrapped_and_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    model = get_peft_model(llama(), LoraConfig(**options))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    loader = DataLoader(sentences(8), batch_size=2)
    with accelerator(config("nvme", tmp_path)) as made:
        loop = Loop(made, model, optimizer, loader, LambdaLR(optimizer, lambda step: 1.0))
        loop.run(2)
        unwrapped = made.unwrap_model(loop.model)
        assert unwrapped is model
        assert is_peft_model(unwrapped)
        unwrapped.save_pretrained(tmp_path / "both", state_dict=made.get_state_dict(loop.model))
        unwrapped.save_pretrained(tmp_path / "alone")
        loop.model.eval()
        batch = next(iter(loader))
        with torch.no_grad():
            expected = loop.model(**batch).loss.item()
    name = "adapter_model.safetensors"
    written = load_file(tmp_path / "both" / name)
    assert different(written, load_file(tmp_path / "alone" / name)) == []
    assert any(values.any() for key, values in written.items() if "lora_B" in key)
    again = PeftModel.from_pretrained(llama(), tmp_path / "both").eval()
    with torch.no_grad():
        assert again(**batch).loss.item() == pytest.approx(expected, rel=1e-6)


def test_free_memory_gives_the_model_back(tmp_path: Path) -> None:
    model, *others = parts()
    with accelerator(config("nvme", tmp_path)) as made:
        loop = Loop(made, model, *others)
        loop.run(2)
        values = made.engine().master_state_dict()
        made.free_memory()
        assert different({name: param.data for name, param in model.named_parameters()}, values) == []
        again = Loop(made, *parts(model)).run(1)
        assert again[0][0] < 5


def test_several_models_train_in_one_loop(tmp_path: Path) -> None:
    def losses(settings: Any) -> list[float]:
        torch.manual_seed(5)
        both = [nn.Linear(4, 4), nn.Linear(4, 4)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 * (1 + i)) for i, model in enumerate(both)]
        schedules = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
        teacher = nn.Linear(4, 4)
        with accelerator(settings, gradient_accumulation_steps=1) as made:
            one, two, first, second, *stepped = made.prepare(*both, *optimizers, *schedules)
            frozen = made.prepare(teacher)
            found = []
            for _ in range(4):
                loss = (two(one(torch.ones(2, 4))) - frozen(torch.ones(2, 4)).detach()).square().mean()
                made.backward(loss)
                made.clip_grad_norm_(one.parameters(), 0.5)
                for step in (first, second, *stepped):
                    step.step()
                first.zero_grad()
                second.zero_grad()
                found += [loss.item(), *(schedule.get_last_lr()[0] for schedule in stepped)]
            return found

    assert losses(config("device", tmp_path)) == pytest.approx(losses(None), rel=1e-6)


def test_the_configuration_has_the_optimizer_and_the_schedule(tmp_path: Path) -> None:
    sections = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(
                ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
            ),
        },
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    model = llama()
    optimizer = DummyOptim(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    with accelerator(config("cpu", tmp_path) | sections) as made:
        loop = Loop(made, model, optimizer, DataLoader(sentences(64), batch_size=2), schedule)
        # The engine steps the schedule once in an update: two updates of warmup, and eight in which it falls.
        rates = [rate for *_, rate in loop.run(6)]
        assert rates == pytest.approx([0, 0, 1e-3, 1e-3, 0.875e-3, 0.75e-3])
        assert made.engine().get_batch_info() == (4, 2, 2)
        assert loop.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_accumulation_is_that_of_the_configuration(tmp_path: Path) -> None:
    settings = config("device", tmp_path) | {"gradient_accumulation_steps": 4}
    assert Accelerator(tiering_config=settings, cpu=True).gradient_accumulation_steps == 4
    with (
        accelerator(settings, gradient_accumulation_steps=2) as other,
        pytest.raises(ConfigError, match="is 4"),
    ):
        other.prepare(*parts())


def test_overflow_keeps_the_learning_rate(tmp_path: Path) -> None:
    settings = config("device", tmp_path) | {"fp16": {"enabled": True, "initial_scale_power": 30}}
    with accelerator(settings) as made:
        loop = Loop(made)
        assert made.mixed_precision == "fp16"
        rates = [rate for *_, rate in loop.run(3)]
        assert rates == [1e-3] * 3
        assert loop.optimizer.step_was_skipped
        assert made.engine().skipped_steps == 3


def test_the_environment_names_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="TIERING_CONFIG"):
        Accelerator(cpu=True)
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 8}')
    monkeypatch.setenv("TIERING_CONFIG", str(path))
    assert Accelerator(cpu=True).gradient_accumulation_steps == 8
    # As accelerate launch passes the file that its own file names.
    monkeypatch.delenv("TIERING_CONFIG")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert Accelerator(cpu=True).gradient_accumulation_steps == 8


def another_with_its_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Another model, and an optimizer of both."""
    other = nn.Linear(2, 2)
    return other, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)


LAUNCHED = """
import torch
from tiering.integrations.accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
# One argument is one write, which another rank cannot part.
print(f"ended {accelerator.num_processes} {accelerator.engine().global_steps}")
accelerator.free_memory()
"""


@pytest.mark.slow
def test_accelerate_launch_passes_the_file_of_the_page(tmp_path: Path) -> None:
    (settings,) = [block.body for block in blocks("accelerate.md") if block.language == "yaml"]
    (tmp_path / "launch.yaml").write_text(settings)
    (tmp_path / "ds_config.json").write_text(json.dumps(config("nvme", tmp_path)))
    (tmp_path / "train.py").write_text(LAUNCHED)
    launcher = ("-m", "tiering.integrations.deepspeed", "-m", "accelerate.commands.launch")
    output = output_of(*launcher, "--config_file", "launch.yaml", "train.py", directory=tmp_path)
    assert output.count("ended 2 1") == 2


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (lambda model, optimizer: (optimizer,), "an optimizer without its model"),
        (lambda model, optimizer: (model, optimizer, optimizer), "2 optimizers of a model"),
        (lambda model, optimizer: (model, *another_with_its_optimizer(model)), "parameters of 2 models"),
        (lambda model, optimizer: (model, DummyOptim(model.parameters())), "no section 'optimizer'"),
    ],
)
def test_prepare_refuses(objects: Any, message: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with accelerator(config("device", tmp_path)) as made, pytest.raises(ConfigError, match=message):
        made.prepare(*objects(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert type(model.weight) is nn.Parameter, "a refused model is an ordinary one"


def test_a_prepared_model_is_prepared_again_after_free_memory(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accelerator(config("device", tmp_path), gradient_accumulation_steps=1) as made:
        made.prepare(model, optimizer)
        with pytest.raises(ConfigError, match=r"was prepared before; .* call accelerator.free_memory\(\)"):
            made.prepare(model, optimizer)
        made.free_memory()
        prepared, stepped = made.prepare(model, optimizer)
        made.backward(prepared(torch.ones(1, 2)).sum())
        stepped.step()
        assert made.unwrap_model(prepared).weight.allclose(before - 0.1)


def test_clipping_before_the_last_micro_batch_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its norm is that of accelerate without the engine; the step clips once."""

    def norms(settings: Any) -> list[float]:
        with accelerator(settings) as made:
            model, _, loader, _ = made.prepare(*parts())
            found = []
            for _, batch in zip(range(2), loader, strict=False):
                with made.accumulate(model):
                    made.backward(model(**batch).loss)
                    found.append(float(made.clip_grad_norm_(model.parameters(), 10.0)))
            return found

    expected = norms(None)
    assert norms(config("nvme", tmp_path)) == pytest.approx(expected, rel=1e-6)
    (message,) = [record.getMessage() for record in caplog.records if "clip_grad_norm_" in record.msg]
    assert "`if accelerator.sync_gradients:`" in message


def test_clipping_refuses_what_an_engine_cannot_do(tmp_path: Path) -> None:
    with accelerator(config("device", tmp_path)) as made:
        loop = Loop(made)
        with pytest.raises(ConfigError, match="a part of those of a model"):
            made.clip_grad_norm_(next(loop.model.parameters()), 1.0)
        with pytest.raises(ConfigError, match="norm_type=1"):
            made.clip_grad_norm_(loop.model.parameters(), 1.0, norm_type=1)
        with pytest.raises(ConfigError, match="clip_grad_value_"):
            made.clip_grad_value_(loop.model.parameters(), 1.0)
        with pytest.raises(EngineStateError, match="no engine for this model"):
            made.engine(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("sections", "precision", "message"),
    [
        ({"bf16": {"enabled": True}}, "fp16", "contradicts the section 'bf16'"),
        ({"bf16": {"enabled": False}}, "bf16", "in which bf16 is not enabled"),
        ({}, "fp8", "unsupported mixed_precision='fp8'"),
    ],
)
def test_precisions_that_differ_are_refused(sections: Any, precision: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Accelerator(tiering_config=sections, mixed_precision=precision, cpu=True)
