"""Architectures of transformers under the shim in fp16, and the weights that their checkpoints hold.

transformers' test_zero_to_fp32 runs its example scripts with small models of the hub. These models are built here, one
of each of its architectures, for the same tasks. M2M100 adds its positions, a buffer of fp32, to activations: as with
DeepSpeed 0.19.8, which leaves buffers in fp32, too, it needs the key data_types.buffer_dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from .line_trainers import arguments, ds_config
from .shimmed import under_shim
from .trainers import different

pytestmark = pytest.mark.slow

WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
LAYERS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SEQ2SEQ = LAYERS | {"d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2}
RELATIVE = WIDE | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
PROPHET = {"num_encoder_layers": 1, "num_decoder_layers": 1}
PROPHET |= {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
WINDOW = {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "trans_bart": ("BartForConditionalGeneration", SEQ2SEQ),
    "trans_t5": ("T5ForConditionalGeneration", T5),
    "trans_t5_v1": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "trans_m2m_100": ("M2M100ForConditionalGeneration", SEQ2SEQ),
    "clm_bigbird_pegasus": ("BigBirdPegasusForCausalLM", SEQ2SEQ | {"attention_type": "original_full"}),
    "clm_blenderbot": ("BlenderbotForCausalLM", SEQ2SEQ),
    "clm_bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "clm_gpt2": ("GPT2LMHeadModel", GPT),
    "clm_gpt_neo": (
        "GPTNeoForCausalLM",
        {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    "clm_gptj": ("GPTJForCausalLM", GPT | {"rotary_dim": 8}),
    "clm_xlm-roberta": ("XLMRobertaForCausalLM", WIDE | {"is_decoder": True}),
    "clm_prophetnet": ("ProphetNetForCausalLM", PROPHET | {"hidden_size": 32, "decoder_ffn_dim": 64}),
    "mlm_albert": ("AlbertForMaskedLM", WIDE | {"embedding_size": 16}),
    "mlm_deberta": ("DebertaForMaskedLM", RELATIVE),
    "mlm_deberta-v2": ("DebertaV2ForMaskedLM", RELATIVE),
    "mlm_distilbert": ("DistilBertForMaskedLM", {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}),
    "mlm_electra": ("ElectraForMaskedLM", WIDE | {"embedding_size": 16}),
    "mlm_layoutlm": ("LayoutLMForMaskedLM", WIDE),
    "qa_led": ("LEDForQuestionAnswering", SEQ2SEQ | WINDOW),
    "qa_longformer": ("LongformerForQuestionAnswering", WIDE | {"attention_window": [4, 4]}),
    "qa_mobilebert": (
        "MobileBertForQuestionAnswering",
        WIDE | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "qa_mpnet": ("MPNetForQuestionAnswering", WIDE),
    "qa_roberta": ("RobertaForQuestionAnswering", WIDE),
    "qa_squeezebert": ("SqueezeBertForQuestionAnswering", WIDE | {"embedding_size": 32}),
    "clas_bert": ("BertForSequenceClassification", WIDE),
    "clas_xlnet": (
        "XLNetForSequenceClassification",
        {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
    ),
    "img_clas_vit": ("ViTForImageClassification", WIDE | {"image_size": 8, "patch_size": 4}),
}
SECTIONS = {"trans_m2m_100": {"data_types": {"buffer_dtype": "fp16"}}}
WORDS, SEPARATOR = 96, 2


def example(task: str, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    if task == "img":
        return {"pixel_values": torch.randn(3, 8, 8, generator=generator), "labels": torch.tensor(number % 2)}
    tokens = torch.randint(5, WORDS, (12,), generator=generator)
    if task == "qa":
        # A question and its context, which some models tell apart.
        tokens[[4, 5, 11]] = SEPARATOR
    labels: dict[str, dict[str, Tensor]] = {
        "qa": {"start_positions": torch.tensor(number), "end_positions": torch.tensor(number + 1)},
        "clas": {"labels": torch.tensor(number % 2)},
    }
    return {"input_ids": tokens} | labels.get(task, {"labels": tokens.clone()})


def build(name: str) -> PreTrainedModel:
    kind, options = MODELS[name]
    cls = getattr(transformers, kind)
    torch.manual_seed(1)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "sep_token_id": SEPARATOR, "eos_token_id": SEPARATOR}
    return cls(cls.config_class(vocab_size=WORDS, **tokens, **options))


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", MODELS)
@under_shim()
def test_zero_to_fp32(name: str, stage: int, tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    made = build(name)
    made.save_pretrained(tmp_path / "files")
    # With this scale no step is an overflow.
    half = {"enabled": "auto", "initial_scale_power": 4}
    settings = ds_config(stage, "scheduler", fp16=half, **SECTIONS.get(name, {}))
    saves = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 1, "learning_rate": 1e-3}
    args = arguments(tmp_path, settings, fp16=True, per_device_train_batch_size=2, **saves)
    # In stage 3, transformers loads the model without memory.
    model = type(made).from_pretrained(tmp_path / "files")
    trainer = Trainer(
        model, args, train_dataset=[example(name.partition("_")[0], number) for number in range(2)]
    )
    trainer.train()
    engine = trainer.model_wrapped
    assert (engine.global_steps, engine.skipped_steps) == (1, 0)
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "checkpoint-1", tmp_path / "fp32")
    recovered = {}
    for file in (tmp_path / "fp32").glob("*.safetensors"):
        recovered |= load_file(file)
    masters = {name: engine.get_fp32_parameter(name) for name, _ in model.named_parameters()}
    assert different({name: recovered[name] for name in masters}, masters) == []
    # The step has changed what has a gradient, and the files have digits that fp16 lacks.
    before = dict(made.named_parameters())
    changed = [name for name, value in masters.items() if not value.equal(before[name])]
    assert len(changed) > len(masters) / 2
    assert any(not masters[name].half().float().equal(masters[name]) for name in changed)
