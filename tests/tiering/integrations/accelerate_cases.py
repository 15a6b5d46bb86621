"""A program: the cases of accelerate's tests/deepspeed that are about the engine, by their names, in one process.

python -m tests.tiering.integrations.accelerate_cases DIRECTORY

The last line of output has, as JSON, the traceback of each case, or "" if it has passed.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiering.integrations import deepspeed as shim

shim.install()

import pytest  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator, DeepSpeedPlugin  # noqa: E402
from accelerate.utils import DummyOptim, DummyScheduler  # noqa: E402
from deepspeed import DeepSpeedEngine  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.lr_scheduler import LambdaLR  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled  # noqa: E402

from .loops import Loop, forget, parts, run, state  # noqa: E402
from .trainers import config, different, llama, sentences  # noqa: E402
from .under_shim import AUTO  # noqa: E402

OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
BUFFERS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def settings(directory: Path, stage: int, place: str = "cpu", **sections: Any) -> dict[str, Any]:
    return config(place, directory, stage) | AUTO | sections


@contextmanager
def accelerator(plugin: Any, **options: Any) -> Iterator[Any]:
    """An Accelerator of accelerate with ``plugin``, or with plugins by name. The next one starts anew."""
    forget()
    made = Accelerator(deepspeed_plugin=plugin, **options)
    try:
        yield made
    finally:
        made.free_memory()
        forget()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)


def plugin(directory: Path, stage: int, place: str = "cpu", **sections: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(hf_ds_config=settings(directory, stage, place, **sections))


def data(batch_size: int = 2) -> Any:
    return DataLoader(sentences(64), batch_size=batch_size)


def update(made: Any, model: Any, optimizer: Any, schedule: Any, loader: Any) -> float:
    """One update; returns the loss of its last micro-batch."""
    for batch in loader:
        with made.accumulate(model):
            loss = model(**batch).loss
            made.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if made.sync_gradients:
            return float(loss.item())
    raise AssertionError("the loader is too short")


def test_accelerate_state_deepspeed(directory: Path) -> None:
    for half, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with accelerator(plugin(directory, 2), mixed_precision=half) as made:
            model, *_ = made.prepare(*parts())
            assert model.config[half]["enabled"]
            assert {param.dtype for param in model.module.parameters()} == {dtype}


def loaded(directory: Path, init: bool) -> None:
    """A loss of a model that transformers has loaded with the flag ``init`` of the plugin."""
    llama().save_pretrained(directory / "model")
    expected = llama()(**next(iter(data()))).loss.item()
    given = DeepSpeedPlugin(hf_ds_config=settings(directory, 3, "nvme"), zero3_init_flag=init)
    with accelerator(given) as made:
        assert is_deepspeed_zero3_enabled() or not init
        model = LlamaForCausalLM.from_pretrained(directory / "model")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, _, loader = made.prepare(model, optimizer, data())
        assert model(**next(iter(loader))).loss.item() == pytest.approx(expected, rel=1e-6)


def test_ds_zero3_no_init_autofill(directory: Path) -> None:
    loaded(directory, init=False)


def test_init_zero3(directory: Path) -> None:
    loaded(directory, init=True)


def test_prepare_deepspeed(directory: Path) -> None:
    for ours in ("optimizer", "scheduler"), ("optimizer",), ("scheduler",), ():
        sections = {name: {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}[name] for name in ours}
        with accelerator(plugin(directory, 2, **sections)) as made:
            model = llama()
            before = model.lm_head.weight.detach().clone()
            own = torch.optim.AdamW(model.parameters(), lr=1e-3)
            placeholder = DummyOptim(model.parameters(), lr=1e-3)
            optimizer, other = (placeholder, own) if "optimizer" in ours else (own, placeholder)

            def by_callable(optimizer: Any) -> LambdaLR:
                return LambdaLR(optimizer, lambda step: 1.0)

            if "scheduler" in ours:
                schedule = DummyScheduler(optimizer, warmup_num_steps=2)
            elif "optimizer" in ours:
                schedule = DummyScheduler(optimizer, lr_scheduler_callable=by_callable)
            else:
                schedule = by_callable(own)
            with pytest.raises(ValueError, match=r"optimizer in the config file|specifying an optimizer"):
                made.prepare(model, other, data(), schedule)
            engine, stepped, loader, scheduled = made.prepare(model, optimizer, data(), schedule)
            assert type(engine) is DeepSpeedEngine
            assert engine is made.deepspeed_engine_wrapped.engine
            # The rate is zero while it warms up.
            for _ in range(4):
                update(made, engine, stepped, scheduled, loader)
            assert engine.global_steps == 4
            assert not engine.get_fp32_parameter("lm_head.weight").equal(before)


def test_autofill_dsconfig(directory: Path) -> None:
    given = plugin(directory, 3, optimizer=OPTIMIZER, scheduler=SCHEDULER)
    given.deepspeed_config["zero_optimization"] |= dict.fromkeys(BUFFERS, "auto")
    given.deepspeed_config["gradient_clipping"] = 0.5
    with accelerator(given) as made:
        model = llama()
        optimizer = DummyOptim(model.parameters(), lr=5e-5, weight_decay=1e-4)
        schedule = DummyScheduler(optimizer, warmup_num_steps=10)
        engine, stepped, *_ = made.prepare(model, optimizer, data(4), schedule)
        assert engine.get_batch_info() == (4, 4, 1)
        assert stepped.param_groups[0]["weight_decay"] == 1e-4
        assert engine.config["scheduler"]["params"] == {
            "warmup_min_lr": 0,
            "warmup_max_lr": 5e-5,
            "warmup_num_steps": 10,
        }
        assert engine.gradient_clipping() == 0.5
        hidden = 32
        found = [engine.config["zero_optimization"][name] for name in BUFFERS]
        assert found == [hidden * hidden, int(0.9 * hidden * hidden), 10 * hidden]


def test_autofill_comm_buffers_dsconfig(directory: Path) -> None:
    for model_config, size in ((None, None), (type("Config", (), {"hidden_sizes": [8, 16]})(), 16)):
        given = plugin(directory, 3)
        given.deepspeed_config["zero_optimization"] |= dict.fromkeys(BUFFERS, "auto")
        with accelerator(given) as made:
            model: Any = nn.Linear(4, 1)
            model.config = model_config
            objects = model, torch.optim.AdamW(model.parameters()), DataLoader(torch.ones(8, 4), batch_size=2)
            if size is None:
                del model.config
                with pytest.raises(ValueError, match="Can't find"):
                    made.prepare(*objects)
            else:
                engine, *_ = made.prepare(*objects)
                assert engine.config["zero_optimization"]["reduce_bucket_size"] == size * size


def test_autofill_dsconfig_from_ds_plugin(directory: Path) -> None:
    given = settings(directory, 3)
    given["zero_optimization"] |= {"stage": "auto", "offload_param": {"device": "auto"}}
    given["zero_optimization"]["offload_optimizer"] = {"device": "auto"}
    filled = DeepSpeedPlugin(
        hf_ds_config=given,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        zero_stage=2,
        offload_optimizer_device="cpu",
        offload_param_device="none",
    )
    with accelerator(filled) as made:
        engine, *_ = made.prepare(*parts())
        assert engine.zero_optimization_stage() == 2
        assert engine.get_batch_info() == (4, 2, 2)
        assert engine.gradient_clipping() == 0.5
        assert engine.zero_cpu_offload()


def test_save_checkpoints(directory: Path) -> None:
    for gather in (False, True):
        given = plugin(directory, 3)
        given.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = gather
        with accelerator(given) as made:
            model, *_ = made.prepare(*parts())
            if gather:
                assert different(made.get_state_dict(model), model.module.state_dict()) == []
            else:
                with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save"):
                    made.get_state_dict(model)


def test_checkpointing(directory: Path) -> None:
    for stage in (1, 2, 3):
        folder = directory / f"saved{stage}"
        with accelerator(plugin(directory, stage), gradient_accumulation_steps=2) as made:
            loop = Loop(made)
            loop.run(3)
            made.save_state(folder)
            before = state(loop.model)
            reports, left = loop.run(3), state(loop.model)
        with accelerator(plugin(directory, stage), gradient_accumulation_steps=2) as made:
            again = Loop(made, *parts(llama(seed=99)))
            made.load_state(folder)
            assert different(state(again.model), before) == []
            again.skip(3)
            assert again.run(3) == reports
            assert different(state(again.model), left) == []


def test_gradient_accumulation_boundary_integration(directory: Path) -> None:
    with accelerator(plugin(directory, 2), gradient_accumulation_steps=4) as made:
        model, optimizer, loader, _ = made.prepare(*parts())
        seen = []
        for batch in [*loader][:8]:
            with made.accumulate(model):
                made.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                seen.append((made.sync_gradients, model.global_steps))
        assert seen == [*[(False, 0)] * 3, (True, 1), *[(False, 1)] * 3, (True, 2)]


test_accelerator_backward_passes_sync_gradients = test_gradient_accumulation_boundary_integration


def test_clip_grad_norm_returns_deepspeed_grad_norm(directory: Path) -> None:
    plain = run(0, None, 5)
    with accelerator(plugin(directory, 2, gradient_clipping=1.0), gradient_accumulation_steps=2) as made:
        found = Loop(made).run(5)
    assert [norm for _, norm, _ in found] == pytest.approx([norm for _, norm, _ in plain], rel=1e-6)
    overflows = plugin(directory, 2, fp16={"enabled": True, "initial_scale_power": 30})
    with accelerator(overflows, mixed_precision="fp16") as made:
        model, _, loader, _ = made.prepare(*parts())
        made.backward(model(**next(iter(loader))).loss)
        norm = made.clip_grad_norm_(model.parameters(), 1.0)
        assert norm is None or norm >= 0
        assert model.skipped_steps == 1


def test_prepare_multiple_models_zero3_inference(directory: Path) -> None:
    both = {"training": plugin(directory, 2), "inference": plugin(directory, 3, "nvme")}
    with accelerator(both) as made:
        first, *others = made.prepare(*parts())
        made.state.select_deepspeed_plugin("inference")
        both["inference"].deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        teacher = made.prepare(llama(seed=7))
        assert teacher.zero_optimization_stage() == 3
        assert made.deepspeed_engine_wrapped.engine is first
        batch = next(iter(data()))
        with torch.no_grad():
            expected = llama(seed=7)(**batch).loss.item()
            assert teacher(**batch).loss.item() == pytest.approx(expected, rel=1e-6)
        made.state.select_deepspeed_plugin("training")
        update(made, first, others[0], others[2], others[1])
        assert first.global_steps == 1
        teacher.destroy()


def test_train_multiple_models(directory: Path) -> None:
    plain = run(0, None, 4)
    both = {"two": plugin(directory, 2), "three": plugin(directory, 3, "nvme")}
    for given in both.values():
        given.deepspeed_config |= {"gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2}
    with accelerator(both, gradient_accumulation_steps=2) as two:
        one = Loop(two)
        three = Accelerator(gradient_accumulation_steps=2)
        three.state.select_deepspeed_plugin("three")
        other = Loop(three)
        assert [loop.model.zero_optimization_stage() for loop in (one, other)] == [2, 3]
        for loop in (one, other):
            for found, expected in zip(loop.run(4), plain, strict=True):
                assert found[:2] == pytest.approx(expected[:2], rel=1e-6)
        three.free_memory()


CASES: dict[str, Callable[[Path], None]] = {
    name: case for name, case in [*globals().items()] if name.startswith("test_")
}


def main(directory: Path) -> dict[str, str]:
    found = {}
    for name, case in CASES.items():
        (directory / name).mkdir()
        try:
            case(directory / name)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
