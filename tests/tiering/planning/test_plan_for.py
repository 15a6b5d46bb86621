"""Plans of models: of one that is here, on meta, or described by transformers; the same as the engine makes."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tiering
from tiering.config import ds_config
from tiering.config.training import parse_size
from tiering.errors import ConfigError
from tiering.placement.configured import configured_state
from tiering.placement.workload import Tier
from tiering.planning.adapters import Adapters
from tiering.planning.decoder import Decoder, decoder
from tiering.planning.rates import Rates
from tiering.planning.setting import Setting, usual_config, with_changes
from tiering.planning.sizing import load_of, plan_of_decoder
from zero3.building.quantized_linear import QuantizedLinear
from zero3.optimizer import update_rules

from .asking import RATES, SMALL, Model, Plan, answered, configured

WITH_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.parametrize("state", ["fp32", "split+bf16"])
def test_the_plan_of_a_model_is_that_of_its_engine(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    config = configured(tmp_path, fits=True, state=state)
    with torch.device("meta"):
        on_meta = tiering.plan_for(model=Model(), config=config)
    with tiering.zero.Init():
        built = Model()
    in_init = tiering.plan_for(model=built, config=config)
    model = Model()
    report = tiering.plan_for(model=model, config=config)
    assert all(param.data_ptr() for param in model.parameters())  # nothing was moved
    engine, *_ = tiering.initialize(model=model, config=config)
    with engine:
        assert report.plan == engine.plan
        assert on_meta.plan == engine.plan
        assert in_init.plan == engine.plan
        assert report.plan is not None and report.plan.total(Tier.NVME) > 0
        tokens = torch.randint(0, 64, (2, 8))
        for _ in range(4):
            engine.backward(engine(tokens))
            engine.step()
        assert engine.plan.nvme_traffic() == report.plan.nvme_traffic()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_is_no_error_and_the_least_budget_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERING_DEVICE", "cpu")
    config = configured(tmp_path, fits=False)
    report = tiering.plan_for(model=Model(), config=config)
    assert not report.fits
    assert "host needs at least" in report.refusal
    budgets = [offer.change["tiering.host_budget"] for offer in report.remedies if len(offer.change) == 1]
    (least,) = budgets
    assert tiering.plan_for(model=Model(), config=configured(tmp_path, fits=True, host_budget=least)).fits
    assert not tiering.plan_for(
        model=Model(), config=configured(tmp_path, fits=True, host_budget=least - 4096)
    ).fits
    engine, *_ = tiering.initialize(model=Model(), config=configured(tmp_path, fits=True, host_budget=least))
    with engine:
        for _ in range(2):
            engine.backward(engine(torch.randint(0, 64, (2, 8))))
            engine.step()


@WITH_TRANSFORMERS
@pytest.mark.parametrize("options", [[], ["--checkpointing"], ["--checkpointing", "--chunked-loss"]])
def test_a_llama_by_its_config_is_planned_as_a_decoder_of_its_size(
    options: list[str], plan: Plan, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    shape = {"hidden_size": 640, "num_hidden_layers": 4, "num_attention_heads": 5, "intermediate_size": 1792}
    LlamaConfig(**shape, vocab_size=32_000, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    asked = [*SMALL[2:], *RATES, *options]
    by_size = answered(plan, *SMALL[:2], *asked)
    by_config = answered(plan, "--model", tmp_path, *asked)
    assert by_config.pop("model") == "LlamaForCausalLM of 61.28M parameters"
    assert by_size.pop("model").startswith("a decoder of 61.28M parameters: 4 layers, hidden 640, 5 heads")
    assert by_config == by_size
    assert answered(plan, "--model", tmp_path / "config.json", *asked)["plan"] == by_size["plan"]


@WITH_TRANSFORMERS
@pytest.mark.parametrize("base", ["bf16", "nf4", "int8", "fp8"])
@pytest.mark.parametrize("modules", ["all-linear", "q_proj, down_proj"])
def test_adapters_over_a_config_are_planned_as_over_a_decoder(
    base: str, modules: str, plan: Plan, tmp_path: Path
) -> None:
    from transformers import LlamaConfig

    shape = {"hidden_size": 640, "num_hidden_layers": 4, "num_attention_heads": 5, "intermediate_size": 1792}
    LlamaConfig(**shape, vocab_size=32_000, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    asked = [
        *SMALL[2:],
        "--host-budget=150MiB",
        *RATES,
        "--lora=160",
        "--base",
        base,
        "--lora-modules",
        modules,
    ]
    by_size = answered(plan, *SMALL[:2], *asked)
    by_config = answered(plan, "--model", tmp_path, *asked)
    trained = 4 * 160 * (2 * 640 + 640 + 1792)
    if modules == "all-linear":
        trained += 4 * 160 * (3 * 2 * 640 + 2 * (640 + 1792))
    assert by_config.pop("model") == (
        f"LlamaForCausalLM of 61.28M parameters, with adapters of rank 160 on"
        f" {'all linear layers' if modules == 'all-linear' else modules}, over a frozen model in {base}"
        f" ({trained / 1e6:.2f}M trained)"
    )
    assert by_size.pop("model").endswith(" trained)")
    assert by_config == by_size
    assert by_size["parameters"] == 61_281_920 + trained
    state = sum(tier["contents"].get("optimizer state", 0) for tier in by_size["plan"]["tiers"].values())
    assert 12 * trained <= state <= 12.1 * trained


@WITH_TRANSFORMERS
# Transformers has renamed what peft calls.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "base",
    [{}, {"type": "nf4", "modules": ("up_proj", "mlp.down_proj"), "block_size": 32, "double_quant": False}],
)
def test_adapters_are_planned_as_those_of_peft(base: dict[str, Any]) -> None:
    """Also over a base that the configuration stores in another format."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = Decoder(640, 4, 1792)
    settings = with_changes(
        usual_config(Path()),
        tiers={
            "host_budget": (160 if base else 220) << 20,
            "device_budget": 100 << 20,
            "nvme_budget": 2 << 30,
            "quantize": base,
        },
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=640,
                num_hidden_layers=4,
                num_attention_heads=5,
                intermediate_size=1792,
                vocab_size=32_000,
            )
        )
        adapted = peft.get_peft_model(
            model, peft.LoraConfig(r=160, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    trained = [param for param in adapted.parameters() if param.requires_grad]
    report = tiering.plan_for(model=adapted, config=settings, model_parameters=trained)
    expected = plan_of_decoder("", shape, settings, Setting(), Rates(), Adapters(160))
    assert report.params == expected.params
    assert not any(isinstance(module, QuantizedLinear) for module in adapted.modules())
    assert report.plan is not None and expected.plan is not None
    assert report.plan.nvme_traffic()[0] > 0 == report.plan.nvme_traffic()[1]
    for tier in Tier:
        assert report.plan.contents(tier) == expected.plan.contents(tier)


def test_adapters_of_a_model_in_memory_are_its_own() -> None:
    quantising = with_changes(usual_config(Path()), tiers={"quantize": {"type": "int8"}})
    with pytest.raises(
        ConfigError, match="stores frozen layers in int8, but all parameters of this plan are trained"
    ):
        plan_of_decoder("", Decoder(640, 4, 1792), quantising, Setting(), Rates())
    with pytest.raises(ConfigError, match=r"the base is nf4 \(--base\), and int8 in tiering.quantize"):
        plan_of_decoder("", Decoder(640, 4, 1792), quantising, Setting(), Rates(), Adapters(8, base="nf4"))
    with pytest.raises(ConfigError, match="add the adapters to the module"):
        tiering.plan_for(model=Model(), config=usual_config(Path()), adapters=Adapters(8))


@WITH_TRANSFORMERS
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Mixtral", {"num_local_experts": 8}),
        ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 96}),
    ],
)
def test_a_token_computes_with_the_experts_that_it_is_sent_to(
    architecture: str, options: dict[str, int], plan: Plan, tmp_path: Path
) -> None:
    """Two of eight experts: three quarters of what is in experts does not count for the time of a step."""
    transformers: Any = importlib.import_module("transformers")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = getattr(transformers, f"{architecture}Config")(
        **shape, **options, num_experts_per_tok=2, intermediate_size=96, vocab_size=100
    )
    config.save_pretrained(tmp_path)
    answer = answered(plan, "--model", tmp_path, *SMALL[2:], *RATES, "--tokens", "1000", "--sequence", "1")
    computed = sum(phase["busy"].get("compute", 0) for phase in answer["forecast"]["phases"])
    experts = 2 * 8 * 3 * 64 * 96
    # The last term is attention over sequences of one token.
    expected = 6 * (answer["parameters"] - 0.75 * experts) + 3 * 2 * 2 * 64
    assert computed * 1e12 / 1000 == pytest.approx(expected, rel=0.02)  # padding of small groups


@WITH_TRANSFORMERS
@pytest.mark.parametrize("named", [None, ["pipeline"], ["GPT2Config"], ["NotOfTransformers"]])
def test_a_config_that_names_no_model_gets_the_head_of_a_language_model(
    named: list[str] | None, tmp_path: Path
) -> None:
    """Of all that transformers has, only a model is taken from what a file says."""
    from transformers import GPT2Config

    from zero3.setup.plan_for import described

    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 16}
    GPT2Config(**shape, architectures=named).save_pretrained(tmp_path)
    model = described(tmp_path)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert all(param.is_meta for param in model.parameters())


@WITH_TRANSFORMERS
@pytest.mark.parametrize(
    "text", ["{}", "nonsense", '{"model_type": "nonesuch"}', '{"auto_map": {"AutoConfig": "evil.Config"}}']
)
def test_what_describes_no_model_is_refused(text: str, tmp_path: Path) -> None:
    from zero3.setup.plan_for import described

    (tmp_path / "config.json").write_text(text)
    (tmp_path / "evil.py").write_text("raise SystemExit('code beside a configuration was run')")
    with pytest.raises(ConfigError, match="describes no model that transformers"):
        described(tmp_path)


def test_without_transformers_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from zero3.setup.plan_for import described

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"needs transformers.*--params"):
        described(tmp_path)


@pytest.mark.parametrize(
    ("kind", "params", "tensors"),
    [
        ("AdamW", {}, 2),
        ("Adam", {}, 2),
        ("Lion", {}, 1),
        ("Adagrad", {}, 1),
        ("SGD", {}, 0),
        ("SGD", {"momentum": 0.9}, 1),
    ],
)
def test_state_is_counted_as_the_update_rules_keep_it(
    kind: str, params: dict[str, float], tensors: int
) -> None:
    config, _ = ds_config.load(
        {"train_batch_size": 1, "optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}
    )
    assert config.optimizer is not None
    rule, options = update_rules.from_config(config.optimizer)
    assert configured_state(config).tensors == tensors
    assert len(rule.state_names(options)) == tensors
    assert rule.at(options, 1).state_count == tensors


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_workload_knows_the_name_of_its_compute_dtype(precision: str) -> None:
    sections = {"train_batch_size": 1} | ({precision: {"enabled": True}} if precision != "fp32" else {})
    config, _ = ds_config.load(sections)
    assert load_of(decoder(60_000_000), config, Setting()).compute_dtype == precision


@pytest.mark.parametrize("state", ["fp32", "split", "bf16", "split+bf16"])
def test_formats_of_state_are_those_of_the_engine(state: str) -> None:
    config = with_changes(usual_config(Path()), tiers={"state": state})
    configuration, form = configured_state(config), update_rules.state_form(state)
    assert (configuration.split, configuration.moment_itemsize) == (form.split, form.format.itemsize)


def test_changes_of_a_configuration_are_checked() -> None:
    config = usual_config(Path(), world_size=4)
    more = with_changes(config, micro_batches=3, tiers={"host_budget": parse_size("1GiB")})
    assert (more.gradient_accumulation_steps, more.train_batch_size, more.tiering.host_budget) == (
        3,
        12,
        1 << 30,
    )
    with pytest.raises(ConfigError, match=r"tiering\.host_budget: .*unknown unit"):
        with_changes(config, tiers={"host_budget": "1 bushel"})


def saved_by(model: torch.nn.Module, *batch: torch.Tensor) -> int:
    """Bytes of the storages that autograd saves in a forward, without those of parameters."""
    own = {each.untyped_storage()._cdata for each in model.parameters()}
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*batch)
        nbytes = sum(storage.nbytes() for storage in saved.values())
    del output
    return nbytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_batch_has_the_activations_counted(device: str, tmp_path: Path) -> None:
    with torch.device(device):
        model, tokens = Model(), torch.zeros((2, 8), dtype=torch.long)
    config = configured(tmp_path, fits=True)
    report = tiering.plan_for(model=model, config=config, batch=(tokens,))
    assert report.activations is not None
    expected = saved_by(Model().bfloat16(), torch.zeros((2, 8), dtype=torch.long))
    assert report.activations.sizes.saved == expected > 0
    assert report.as_dict()["not_counted"] == []
    assert "that autograd saves" in " ".join(str(report).split())
    assert (
        tiering.plan_for(model=model, config=config, batch={"tokens": tokens}).activations
        == report.activations
    )
    assert all(param.device.type == device for param in model.parameters())


@pytest.mark.parametrize("by_keyword", [False, True])
def test_of_blocks_over_chunks_of_rows_a_batch_counts_the_inputs(by_keyword: bool, tmp_path: Path) -> None:
    class Stack(Model):
        checkpointed = False

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                if self.checkpointed:
                    x = checkpoint(block, x, use_reentrant=False)
                else:
                    x = block(x=x) if by_keyword else block(x)
            return self.head(x).float().logsumexp(-1).mean()

    tokens = torch.zeros((8, 8), dtype=torch.long)
    config = configured(tmp_path, fits=True, block_rows=2)
    report = tiering.plan_for(model=Stack(), config=config, batch=(tokens,))
    resident = Stack().bfloat16()
    resident.checkpointed = True
    assert report.activations is not None
    assert report.activations.sizes.saved == saved_by(resident, tokens)


def test_what_a_gpu_cannot_hold_of_a_batch_is_refused_and_moved(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, tokens = Model(), torch.zeros((64, 512), dtype=torch.long)
    config = configured(
        tmp_path, fits=True, host_budget="64MiB", activation_budget="32MiB", nvme_budget="1GiB"
    )
    report = tiering.plan_for(model=model, config=config, gpu_memory=64 << 20, batch=(tokens,))
    assert not report.fits and "for activations of a micro-batch" in report.refusal
    assert [dict(offer.change) for offer in report.remedies] == [{"tiering.activations": "auto"}]
    moved = configured(
        tmp_path,
        fits=True,
        host_budget="64MiB",
        activation_budget="32MiB",
        nvme_budget="1GiB",
        activations="auto",
    )
    report = tiering.plan_for(model=model, config=moved, gpu_memory=64 << 20, batch=(tokens,))
    assert report.fits and report.activations is not None
    assert report.activations.on_device == report.activations.room


def test_without_a_batch_activations_are_not_counted(tmp_path: Path) -> None:
    report = tiering.plan_for(model=Model(), config=configured(tmp_path, fits=True))
    assert report.activations is None and report.as_dict()["not_counted"] == ["activations"]
    assert "Not counted: activations" in str(report)


def test_a_forward_that_needs_values_is_not_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Routed(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * int(tokens.sum())

    tokens = torch.zeros((2, 8), dtype=torch.long)
    report = tiering.plan_for(model=Routed(), config=configured(tmp_path, fits=True), batch=(tokens,))
    assert report.fits and report.activations is None
    assert "activations are not counted: a forward without memory raised" in caplog.text


@WITH_TRANSFORMERS
# Transformers has renamed what peft calls.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*is deprecated:FutureWarning")
@pytest.mark.parametrize("rank", [8, 200])
def test_adapters_over_a_config_in_tiles_have_the_groups_of_those_of_peft(rank: int, tmp_path: Path) -> None:
    """A layer in tiles is no module that holds its adapter; adapters of rank 200 are cut, too."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    described = LlamaConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=704,
        vocab_size=2000,
        architectures=["LlamaForCausalLM"],
    )
    described.save_pretrained(tmp_path)
    tiers = {"tile": 64 << 10, "device_budget": 1 << 20, "host_budget": 64 << 20, "nvme_budget": 1 << 30}
    usual = usual_config(Path())
    zero = usual.zero.model_copy(update={"persistence_threshold": 1000})
    settings = with_changes(usual.model_copy(update={"zero": zero}), tiers=tiers)
    with torch.device("meta"):
        adapted = peft.get_peft_model(
            LlamaForCausalLM(described), peft.LoraConfig(r=rank, target_modules="all-linear")
        )
    trained = [param for param in adapted.parameters() if param.requires_grad]
    real = tiering.plan_for(model=adapted, config=settings, model_parameters=trained).request.load
    planned = tiering.plan_for(model=tmp_path, config=settings, adapters=Adapters(rank)).request.load
    for expected, groups in zip((real.groups, *real.finer), (planned.groups, *planned.finer), strict=True):
        names = [group.name.removeprefix("base_model.model.") for group in expected]
        assert groups == tuple(replace(group, name=name) for group, name in zip(expected, names, strict=True))


@WITH_TRANSFORMERS
@pytest.mark.parametrize(("ranks", "tied"), [(1, True), (2, False)])
def test_a_gpu_that_is_too_small_for_a_config_is_told_how_many_bytes_are_enough(
    ranks: int, tied: bool, plan: Plan, tmp_path: Path
) -> None:
    """As for a number of parameters; with the activations, which are not counted if the embedding is the head."""
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=1, intermediate_size=512, vocab_size=16_000,
        tie_word_embeddings=tied, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    asked = [
        "--model",
        tmp_path,
        f"--ranks={ranks}",
        "--host-budget=1GiB",
        "--nvme-budget=1GiB",
        "--gpu=1MiB",
    ]
    code, text, _ = plan(*asked)
    *_, command = text.splitlines()
    assert (code, "  - GPUs of " in text, command.startswith("tiering plan ")) == (1, True, True)
    changes = shlex.split(command)[2 + len(asked) :]
    assert plan(*asked, *changes)[0] == 0
    # The sizes that are tried lie at most a quarter apart.
    (enough,) = (parse_size(change.removeprefix("--gpu=")) for change in changes if "--gpu=" in change)
    others = [change for change in changes if not change.startswith(("--gpu=", "--device-budget="))]
    assert plan(*asked, *others, f"--gpu={enough // 4 * 3}")[0] == 1
