"""SFTTrainer of TRL with adapters over a base that a library has quantised reports the same on the engine."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

import tiering
from tests.zero3.ranks.pool import Pool
from tiering.integrations.transformers import TieringTrainerMixin

from . import test_trl
from .test_trl import LORA, OPTIONS, TEXTS, bytewise
from .trainers import PLACES, config, differences, different, llama, reported, state, tiered

datasets = pytest.importorskip("datasets", reason="datasets is not installed")
trl = pytest.importorskip("trl", reason="trl is not installed")

pytestmark = [
    pytest.mark.slow,
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}")
        for kind in ("FutureWarning", "UserWarning", "DeprecationWarning")
    ),
]


class TieredSFTTrainer(TieringTrainerMixin, trl.SFTTrainer): ...


def base(kind: str, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model in ``directory``, its linear layers quantised as ``kind`` says; with "key" the engine does that."""
    if not directory.exists():
        sizes = {"hidden_size": 128, "intermediate_size": 192}
        llama(vocab_size=259, **sizes).save_pretrained(directory)
    if kind in ("function", "key"):
        model = LlamaForCausalLM.from_pretrained(directory)
        return model if kind == "key" else tiering.quantize(model.requires_grad_(False), "nf4")
    how: Any
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        how = TorchAoConfig(Int8WeightOnlyConfig())
    elif kind == "nf4":
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    else:
        how = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=how, dtype=dtype, device_map={"": "cpu"}
    )
    for module in model.modules():
        # Otherwise an evaluation reorders codes in place, and bitsandbytes 0.50 trains on with other weights.
        module.support_avx512bf16_for_cpu = False
    return model


def settings(kind: str, place: str, nvme: Path) -> dict[str, Any]:
    quantize = {"quantize": {"type": "nf4"}} if kind == "key" else {}
    return config(place, nvme, tiering={"cache_in_host": False} | quantize)


def sft(cls: type, kind: str, output: Path, steps: int, **more: Any) -> Any:
    data = datasets.Dataset.from_list([{"text": text} for text in TEXTS])
    half = more.pop("bf16", False)
    args = trl.SFTConfig(
        output_dir=str(output),
        eval_strategy="steps",
        eval_steps=4,
        max_length=32,
        max_steps=steps,
        **OPTIONS | {"bf16": half} | {name: more.pop(name) for name in [*more] if name.startswith("save_")},
    )
    trainer = cls(
        base(kind, output.parent / "model", torch.bfloat16 if half else torch.float32),
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(6)),
        processing_class=bytewise(),
        peft_config=LoraConfig(**LORA | {"target_modules": "all-linear"}),
        **more,
    )
    if not half:
        in_fp32(trainer)
    return trainer


def in_fp32(trainer: Any) -> None:
    """Cast the adapters: trl casts some to bf16, in which the stock trainer would then compute and step them."""
    for param in trainer.model.parameters():
        if param.requires_grad:
            param.data = param.data.float()


def kinds() -> list[Any]:
    libraries = {"function": "tiering", "key": "tiering", "nf4": "bitsandbytes", "int8": "bitsandbytes"}
    libraries["torchao"] = "torchao"
    return [
        pytest.param(
            kind,
            marks=pytest.mark.skipif(
                importlib.util.find_spec(library) is None, reason=f"{library} is not installed"
            ),
        )
        for kind, library in libraries.items()
    ]


QUANTISED = pytest.mark.parametrize("kind", kinds())


@QUANTISED
def test_a_run_reports_what_trl_reports(kind: str, tmp_path: Path) -> None:
    plain = sft(trl.SFTTrainer, "function" if kind == "key" else kind, tmp_path / "stock", 6)
    plain.train()
    states = []
    for place in PLACES:
        trainer = sft(
            TieredSFTTrainer, kind, tmp_path / place, 6, tiering_config=settings(kind, place, tmp_path)
        )
        trainer.train()
        assert list(differences(trainer, plain, 1e-5)) == [], place
        states.append(state(trainer))
        assert states[0].keys() and different(states[0], states[-1]) == [], place
        trainer.save_model()
        trainer.engine.close()
    adapted = PeftModel.from_pretrained(base(kind, tmp_path / "model"), tmp_path / "nvme")
    for name, values in states[-1].items():
        if " of " not in name:
            assert torch.equal(adapted.get_parameter(name), values), name


@pytest.mark.parametrize("kind", kinds()[2:])
def test_half_precision_follows(kind: str, tmp_path: Path) -> None:
    plain = sft(trl.SFTTrainer, kind, tmp_path / "stock", 6, bf16=True)
    plain.train()
    found = []
    for place in PLACES:
        options = {"tiering_config": settings(kind, place, tmp_path), "bf16": True}
        trainer = sft(TieredSFTTrainer, kind, tmp_path / place, 6, **options)
        trainer.train()
        found.append((reported(trainer), state(trainer)))
        trainer.engine.close()
        assert found[0][0] == found[-1][0] and different(found[0][1], found[-1][1]) == [], place
    for entry, expected in zip(found[0][0], reported(plain), strict=True):
        name = "loss" if "loss" in entry else "eval_loss"
        assert entry[name] == pytest.approx(expected[name], rel=0.002)


@pytest.mark.parametrize("kind", kinds()[2:])
def test_a_model_without_adapters_is_refused_as_without_the_engine(kind: str, tmp_path: Path) -> None:
    settings_here = settings(kind, "nvme", tmp_path)
    with pytest.raises(ValueError, match="purely quantized"):
        tiered(tmp_path, settings_here, base(kind, tmp_path / "model"))


@pytest.mark.parametrize("name", ["dpo", "grpo"])
@pytest.mark.parametrize("kind", kinds()[2:3])
def test_the_reference_is_the_base_without_adapters(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_trl, "from_directory", lambda output: base(kind, tmp_path / "model"))
    make, stock, tiered_class = test_trl.MAKERS[name]
    trainers = []
    for cls, options in (
        (stock, {}),
        (tiered_class, {"tiering_config": settings(kind, "nvme", tmp_path)}),
    ):
        trainer = make(cls, tmp_path / cls.__name__, bytewise(), 3, LoraConfig(**LORA), **options)
        in_fp32(trainer)
        trainer.train()
        trainers.append(trainer)
    plain, trainer = trainers
    assert list(differences(trainer, plain, 1e-5, 1e-8 if name == "grpo" else 0.0)) == []
    trainer.engine.close()


@QUANTISED
def test_a_resumed_run_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    options = {"tiering_config": settings(kind, "nvme", tmp_path), "save_strategy": "steps", "save_steps": 2}
    states = []
    for saved in (None, str(tmp_path / "out/checkpoint-2")):
        trainer = sft(TieredSFTTrainer, kind, tmp_path / "out", 4, **options)
        trainer.train(resume_from_checkpoint=saved)
        states.append(state(trainer))
        trainer.engine.close()
    assert states[0].keys() and different(*states) == []


def ranked(rank: int, out: Path, kind: str, place: str | None) -> tuple[list[dict[str, float]], Any]:
    """What a run of 4 steps reports, and its masters and moments; ``place`` None is the stock trainer."""
    warnings.simplefilter("ignore")
    cls, options = trl.SFTTrainer, dict[str, Any]()
    if place is not None:
        cls, options = TieredSFTTrainer, {"tiering_config": settings(kind, place, out)}
    trainer = sft(cls, kind, out / str(rank), 4, **options)
    trainer.train()
    if place is None:
        return reported(trainer), None
    left = state(trainer)
    trainer.engine.close()
    return reported(trainer), left


# The key of the configuration quantises as the function does.
@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind.values != ("key",)])
def test_two_ranks_report_what_trl_reports(kind: str, tmp_path: Path) -> None:
    base("key", tmp_path / "model")
    pool = Pool(2, tmp_path / "ranks")
    try:
        # torch's DistributedDataParallel refuses the tensors of torchao: placements are compared with each other.
        plain = pool.run(ranked, tmp_path, kind, "device" if kind == "torchao" else None)
        lefts = []
        for place in ("device", "nvme"):
            for (ours, left), (theirs, _) in zip(pool.run(ranked, tmp_path, kind, place), plain, strict=True):
                for entry, expected in zip(ours, theirs, strict=True):
                    assert entry == pytest.approx(expected, rel=1e-5), place
                lefts.append(left)
        assert all(different(lefts[0], left) == [] for left in lefts)
    finally:
        pool.close()


class Packed(torch.nn.Module):
    """Two 4-bit layers of bitsandbytes with random weights, and a trained offset."""

    def __init__(self, kind: str, seed: int, width: int = 512) -> None:
        super().__init__()
        from bitsandbytes.nn import Linear4bit

        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(
            Linear4bit(width, width, bias=False, quant_type=kind, compute_dtype=torch.float32)
            for _ in range(2)
        ).to("cpu")
        self.offset = torch.nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x + self.offset))
        return x


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_checkpoints_hold_the_statistics_of_a_base(tmp_path: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit

    whole = config("nvme", tmp_path, tiering={"cache_in_host": False})
    whole |= {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    saved = Packed("nf4", seed=1)
    with torch.no_grad():
        expected = saved(x)
    with tiering.initialize(model=saved, config=whole).engine as engine:
        with torch.no_grad():
            assert torch.equal(engine(x), expected)
        weight = saved.layers[0].weight
        assert "layers.0.weight.absmax" in engine.state_dict()
        with pytest.raises(tiering.ResidencyError, match=r"layers\.0\.weight"):
            dequantize_4bit(weight, weight.quant_state)
        with tiering.gathered(weight):
            assert dequantize_4bit(weight, weight.quant_state).shape == (512, 512)
        engine.save_checkpoint(tmp_path)
    other = Packed("nf4", seed=2)
    with tiering.initialize(model=other, config=whole).engine as engine:
        engine.load_checkpoint(tmp_path)
        engine.release()
    with torch.no_grad():
        assert torch.equal(other(x), expected)
    with (
        tiering.initialize(model=Packed("fp4", seed=1), config=whole).engine as engine,
        pytest.raises(tiering.CheckpointError, match=r"quant_state\.bitsandbytes__fp4"),
    ):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", kinds()[2:])
def test_exports_load_without_the_engine(kind: str, tmp_path: Path) -> None:
    model = base(kind, tmp_path / "model").eval()
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected = model(tokens).logits
    options = {"train_micro_batch_size_per_gpu": 1} | settings(kind, "nvme", tmp_path)
    with tiering.initialize(model=model, config=options).engine as engine:
        with torch.no_grad():
            assert torch.equal(engine(tokens).logits, expected)
        if kind == "torchao":
            with pytest.raises(tiering.ConfigError, match=r"part of a quantised weight.*release\(\)"):
                engine.save_pretrained(tmp_path / "export")
            engine.release()
            model.save_pretrained(tmp_path / "export")
        else:
            engine.save_pretrained(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.float32, device_map={"": "cpu"}
    ).eval()
    for module in loaded.modules():
        module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected)
