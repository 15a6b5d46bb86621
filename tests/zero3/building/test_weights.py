"""Which stored tensor is whose, and that its values are what transformers would load."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tiering.config.training import IoConfig
from tiering.errors import EngineStateError, WeightsError
from tiering.weights.files import open_weights
from zero3.building.weights import Matched, match

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def llama(**options: Any) -> Any:
    torch.manual_seed(1)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**(SIZES | options)))


def gpt2(seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=16))


def loaded(matched: Matched, step: int = 300) -> dict[nn.Parameter, Tensor]:
    """The stored values of every parameter that has a source, taken in pieces."""
    values = {}
    with matched.reading(IoConfig()):
        for param, source in matched.sources.items():
            numel = param.numel()
            pieces = [source.read(first, min(step, numel - first)).clone() for first in range(0, numel, step)]
            source.release()
            values[param] = torch.cat(pieces).view(param.shape)
    return values


def by_name(model: nn.Module, matched: Matched) -> dict[str, Tensor]:
    values = loaded(matched)
    return {name: values[param] for name, param in model.named_parameters() if param in values}


def assert_takes(model: nn.Module, weights: Path, reference: nn.Module) -> Matched:
    matched = match(model, open_weights(weights))
    assert matched.missing == matched.unexpected == ()
    values_by_name = by_name(model, matched)
    expected = dict(reference.named_parameters())
    assert values_by_name.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(values_by_name[name].to(parameter.dtype), parameter.detach()), name
    return matched


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("ramp", torch.arange(3), persistent=False)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Saves the tensors of a Small, with changes; None leaves one out."""

    def save(**changes: Tensor | None) -> Path:
        torch.manual_seed(2)
        tensors = {
            name: value.clone() for name, value in Small().state_dict().items() if name != "head.weight"
        }
        tensors |= {name.replace("__", "."): value for name, value in changes.items()}
        path = tmp_path / "model.safetensors"
        save_file({name: value for name, value in tensors.items() if value is not None}, path)
        return path

    return save


def refusal(path: Path, model: nn.Module | None = None, **options: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        match(model or Small(), open_weights(path), **options)
    return str(caught.value)


# What transformers saves and loads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "build", [llama, lambda: llama(tie_word_embeddings=True), gpt2], ids=["llama", "tied llama", "gpt2"]
)
def test_shards_in_every_precision(tmp_path: Path, build: Callable[[], Any], dtype: torch.dtype) -> None:
    build().to(dtype).save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    reference = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    matched = assert_takes(build(), tmp_path, reference)
    assert {source.dtype for source in matched.sources.values()} == {dtype}


def test_a_model_on_meta(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = llama()
    assert_takes(model, tmp_path, llama())


@pytest.mark.parametrize("head", [False, True], ids=["into the base", "into the head"])
def test_a_base_model_and_one_with_a_head(tmp_path: Path, head: bool) -> None:
    """The name of the base model is put on or off; the head's tie gives it its values."""
    whole = gpt2()
    (whole.transformer if head else whole).save_pretrained(tmp_path)
    if head:
        assert_takes(gpt2(seed=2), tmp_path, hf.GPT2LMHeadModel.from_pretrained(tmp_path))
    else:
        assert_takes(gpt2(seed=2).transformer, tmp_path, hf.GPT2Model.from_pretrained(tmp_path))


def test_a_head_that_the_base_model_has_no_use_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = llama(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    base = llama().model
    assert "1 unexpected ('lm_head.weight')" in refusal(tmp_path, base)
    matched = match(base, open_weights(tmp_path), strict=False)
    assert matched.unexpected == ("lm_head.weight",) and matched.missing == ()
    assert caplog.messages[-1].endswith("these tensors are not loaded")
    reference = hf.LlamaModel.from_pretrained(tmp_path)
    for name, value in by_name(base, matched).items():
        assert torch.equal(value, reference.get_parameter(name))


def test_older_names(tmp_path: Path) -> None:
    """As transformers renames what early checkpoints call gamma and beta; a buffer they had is passed over."""
    config = hf.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=50
    )
    torch.manual_seed(1)
    hf.BertModel(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in tensors.items()
    }
    assert older.keys() != tensors.keys()
    older["embeddings.position_ids"] = torch.arange(512)
    save_file(older, tmp_path / "model.safetensors", {"format": "pt"})
    assert_takes(hf.BertModel(config), tmp_path, hf.BertModel.from_pretrained(tmp_path))


class OldFashioned(hf.PreTrainedModel):  # type: ignore[misc]
    config_class = hf.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.LayerNorm = nn.Module()
        self.LayerNorm.gamma = nn.Parameter(torch.zeros(3))
        self.post_init()


def test_older_names_that_the_model_still_has(tmp_path: Path) -> None:
    save_file({"LayerNorm.gamma": torch.ones(3)}, tmp_path / "model.safetensors")
    model = OldFashioned(hf.LlamaConfig())
    assert by_name(model, match(model, open_weights(tmp_path)))["LayerNorm.gamma"].tolist() == [1, 1, 1]


MIXTURES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=11)),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, decoder_sparse_step=1)
    ),
    "jamba": lambda: hf.JambaForCausalLM(hf.JambaConfig(**SIZES, num_experts=3, pad_token_id=0)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_that_are_stored_one_by_one(tmp_path: Path, name: str) -> None:
    """The files have a tensor for every expert and kind, the model one for all of them."""
    torch.manual_seed(1)
    model = MIXTURES[name]()
    model.save_pretrained(tmp_path / "usual", max_shard_size="50KB")
    model.save_pretrained(tmp_path / "native", save_original_format=False)
    matched = assert_takes(
        MIXTURES[name](), tmp_path / "usual", hf.AutoModelForCausalLM.from_pretrained(tmp_path / "usual")
    )
    most = max(matched.sources.values(), key=lambda source: len(source.parts))
    assert len(most.parts) >= 6
    size = most.parts[0].numel
    with matched.reading(IoConfig()):
        whole = most.read(0, size * len(most.parts))
        for first, numel in (
            (0, size),
            (size, size),
            (size - 1, 2),
            (size + 1, 3 * size - 1),
            (5 * size, size),
        ):
            assert torch.equal(most.read(first, numel), whole[first : first + numel])
    matched = assert_takes(MIXTURES[name](), tmp_path / "native", model)
    assert {len(source.parts) for source in matched.sources.values()} == {1}


def without(directory: Path, *names: str, **changed: Tensor) -> Path:
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if not name.endswith(names)}
    tensors |= {
        name: changed[end] for name in tensors for end in changed if name.endswith(end.replace("__", "."))
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_experts_that_are_incomplete(tmp_path: Path) -> None:
    torch.manual_seed(1)
    MIXTURES["mixtral"]().save_pretrained(tmp_path)
    model = MIXTURES["mixtral"]()
    expected = "other tensors of 'model.layers.0.mlp.experts.gate_up_proj' differ in number, shape or dtype"
    assert expected in refusal(without(tmp_path, "layers.0.block_sparse_moe.experts.4.w3.weight"), model)
    fewer = refusal(
        without(tmp_path, "experts.4.w1.weight", "experts.4.w2.weight", "experts.4.w3.weight"), model
    )
    assert "experts.0.w1.weight' and 19 more make up [10, 96, 32] and should be [11, 96, 32]" in fewer
    half = torch.ones(48, 32, dtype=torch.float16)
    message = refusal(without(tmp_path, layers__0__block_sparse_moe__experts__3__w1__weight=half), model)
    assert expected in message


def test_what_transformers_computes_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Three projections that lie in one stored tensor: what one of them takes is not a tensor of the file."""

    def build() -> Any:
        torch.manual_seed(1)
        sizes = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"}
        return hf.NomicBertModel(hf.NomicBertConfig(**sizes))

    model = build()
    model.save_pretrained(tmp_path / "usual")
    message = refusal(tmp_path / "usual", build())
    assert "Wqkv.weight' in another form than the model's 'layers.0.self_attn.q_proj.weight'" in message
    assert "save_pretrained(NEW_DIR, save_original_format=False), and pass NEW_DIR" in message
    model.save_pretrained(tmp_path / "native", save_original_format=False)
    assert_takes(build(), tmp_path / "native", model)


# Names


def test_a_tie_answers_to_each_of_its_names(saved: Callable[..., Path]) -> None:
    value = torch.randn(5, 4)
    for names in ({"embedding__weight": value}, {"embedding__weight": None, "head__weight": value}):
        model = Small()
        matched = match(model, open_weights(saved(**names)))
        assert torch.equal(loaded(matched)[model.head.weight], value)


def test_a_tie_stored_twice(saved: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    value = torch.randn(5, 4)
    model = Small()
    matched = match(model, open_weights(saved(embedding__weight=value, head__weight=value.clone())))
    assert caplog.messages == []
    assert torch.equal(loaded(matched)[model.head.weight], value)
    matched = match(model, open_weights(saved(embedding__weight=value, head__weight=-value)))
    (warning,) = caplog.messages
    assert "ties 'embedding.weight' and 'head.weight', but their stored values differ" in warning
    assert "the values of 'embedding.weight' are used" in warning
    assert torch.equal(loaded(matched)[model.head.weight], value)


def test_the_exact_name_comes_before_one_with_a_prefix(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = gpt2()
    tensors = {name: value.clone() for name, value in model.transformer.state_dict().items()}
    other = {f"transformer.{name}": value + 1 for name, value in tensors.items()}
    save_file(other | tensors, tmp_path / "model.safetensors")
    values_by_name = by_name(model.transformer, match(model.transformer, open_weights(tmp_path)))
    assert all(torch.equal(values_by_name[name], tensors[name]) for name in values_by_name)
    assert len(caplog.messages) == len(values_by_name)


def test_names_without_a_partner(saved: Callable[..., Path], caplog: pytest.LogCaptureFixture) -> None:
    path = saved(norm__weight=None, norms__weight=torch.ones(4))
    message = refusal(path)
    assert "1 missing ('norm.weight', perhaps 'norms.weight')" in message
    assert "1 unexpected ('norms.weight', perhaps 'norm.weight')" in message
    assert "strict=False" in message
    model = Small()
    matched = match(model, open_weights(path), strict=False)
    assert (matched.missing, matched.unexpected) == (("norm.weight",), ("norms.weight",))
    assert set(matched.sources) == set(model.parameters()) - {model.norm.weight}
    (warning,) = caplog.messages
    assert "'norm.weight', perhaps 'norms.weight'" in warning and warning.endswith("keep the model's values")


def test_many_names_without_a_partner_are_counted(tmp_path: Path) -> None:
    save_file({f"x{number}": torch.ones(1) for number in range(25)}, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert "25 unexpected ('x0'; 'x1'; 'x10'; " in message and " and 15 more)" in message
    assert len(re.findall(r"'x\d+'", message)) == 10


def test_what_a_model_says_may_be_absent_or_too_many(saved: Callable[..., Path]) -> None:
    model = Small()
    model._keys_to_ignore_on_load_missing = [r"^norm\.weight$"]  # type: ignore[assignment] # as transformers has it
    model._keys_to_ignore_on_load_unexpected = [r"\.masked_bias$"]  # type: ignore[assignment]
    path = saved(norm__weight=None, layer__masked_bias=torch.ones(1))
    matched = match(model, open_weights(path))
    assert matched.missing == matched.unexpected == ()
    assert model.norm.weight not in matched.sources
    assert "'norm.bias'" in refusal(saved(norm__bias=None), model)


# Shapes and dtypes


def test_other_shapes_are_listed(saved: Callable[..., Path]) -> None:
    path = saved(norm__weight=torch.ones(5), embedding__weight=torch.ones(5, 3))
    for strict in (True, False):
        message = refusal(path, strict=strict)
        assert "has 2 tensors whose shape differs from the model's: " in message
        assert "'embedding.weight' is [5, 3] and should be [5, 4]" in message
        assert "'norm.weight' is [5] and should be [4]" in message and "config.json" in message


def test_a_second_name_of_a_tie_has_its_shape_too(saved: Callable[..., Path]) -> None:
    assert "'head.weight' is [6, 4]" in refusal(saved(head__weight=torch.ones(6, 4)))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_dtypes_that_no_parameter_can_be_made_of(saved: Callable[..., Path], dtype: torch.dtype) -> None:
    message = refusal(saved(norm__weight=torch.ones(4).to(dtype)))
    assert "'norm.weight' is " in message and "should be torch.float32" in message and "dequantise" in message


def test_a_counter_is_no_floating_point_number(saved: Callable[..., Path]) -> None:
    message = refusal(saved(norm__num_batches_tracked=torch.tensor(3.0)))
    assert "'norm.num_batches_tracked' is F32 and should be torch.int64" in message


# Values


def test_buffers(saved: Callable[..., Path]) -> None:
    mean, count = torch.randn(4, dtype=torch.float64), torch.tensor(7)
    path = saved(norm__running_mean=mean, norm__num_batches_tracked=count)
    with torch.device("meta"):
        absent = Small()
    for model in (Small(), absent):
        buffer = model.norm.running_mean
        matched = match(model, open_weights(path))
        assert [name for _, name, _ in matched.buffers] == [
            "running_mean",
            "running_var",
            "num_batches_tracked",
        ]
        with matched.reading(IoConfig()):
            matched.fill_buffers()
        assert torch.equal(model.norm.running_mean, mean.float())
        assert torch.equal(model.norm.num_batches_tracked, count)
        assert (model.norm.running_mean is buffer) == (model is not absent)


def test_a_source_reads_only_while_the_files_are_open(saved: Callable[..., Path]) -> None:
    model = Small()
    matched = match(model, open_weights(saved()))
    source = matched.sources[model.head.weight]
    with pytest.raises(EngineStateError, match=r"'embedding.weight' was read while its file is not open"):
        source.read(0, 1)
    with matched.reading(IoConfig()) as opened:
        assert opened is matched
        assert source.read(0, 0).shape == (0,)
        assert source.read(3, 5).shape == (5,)
    with pytest.raises(EngineStateError, match=r"Matched\.reading"):
        source.read(0, 1)


def test_scalars_and_nothing(tmp_path: Path) -> None:
    model = nn.Module()
    model.scale, model.none = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(0, 3))
    save_file({"scale": torch.tensor(3.0), "none": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    matched = match(model, open_weights(tmp_path))
    with matched.reading(IoConfig()):
        assert matched.sources[model.scale].read(0, 1).tolist() == [3.0]
        assert matched.sources[model.none].read(0, 0).numel() == 0
