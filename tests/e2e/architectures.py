"""Architectures nobody here wrote, tiny and with random weights, and batches of what they naturally take.

Every one is called with keyword arguments and answers with an output whose ``loss`` is a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, LAYERS, HEADS, SEQUENCE = 300, 32, 2, 4, 16
BATCH = 2

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """How to build a model with random weights, and one batch for it from a generator."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    checkpoints: bool = True  # whether activation checkpointing can be switched on
    generates: bool = False


def build(name: str, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return ARCHITECTURES[name].build().train()


def batches(name: str, count: int, dtype: torch.dtype = torch.float32) -> Iterator[Batch]:
    """``count`` batches, the same for every caller; what is not an integer comes in ``dtype``."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        batch = ARCHITECTURES[name].batch(generator)
        yield {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def _tokens(generator: torch.Generator, length: int = SEQUENCE) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def _causal(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _next_token(generator: torch.Generator) -> Batch:
    """For models of our own, which do not shift labels."""
    tokens = _tokens(generator, SEQUENCE + 1)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def _masked(generator: torch.Generator) -> Batch:
    """A third of the tokens is to be guessed; the last quarter of one row is padding."""
    labels = _tokens(generator)
    hidden = torch.rand(labels.shape, generator=generator) < 1 / 3
    attention = torch.ones_like(labels)
    attention[0, -SEQUENCE // 4 :] = 0
    return {
        "input_ids": labels.masked_fill(hidden, 1),
        "attention_mask": attention,
        "labels": labels.masked_fill(~hidden, -100),
    }


def _translation(generator: torch.Generator) -> Batch:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, SEQUENCE // 2)}


def _images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(10, (BATCH,), generator=generator)}


def _speech(generator: torch.Generator) -> Batch:
    features = torch.randn(BATCH, 8, 2 * SEQUENCE, generator=generator)
    return {"input_features": features, "labels": _tokens(generator, SEQUENCE // 2)}


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "head_dim": WIDTH // HEADS,
    "max_position_embeddings": 2 * SEQUENCE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _decoder(name: str, **more: Any) -> Architecture:
    def build() -> Any:
        config = getattr(hf, f"{name}Config")(**(_DECODER | more))
        return getattr(hf, f"{name}ForCausalLM")(config)

    return Architecture(build, _causal, generates=True)


def _gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=2 * SEQUENCE,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    config = hf.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=2 * SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = hf.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_labels=10,
    )
    return hf.ViTForImageClassification(config)


def _whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=SEQUENCE,
        max_target_positions=2 * SEQUENCE,
        dropout=0.0,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.WhisperForConditionalGeneration(config)


def _mamba() -> nn.Module:
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=4, num_hidden_layers=LAYERS, time_step_rank=4
    )
    return hf.MambaForCausalLM(config)


def _lora() -> nn.Module:
    """A frozen Llama with adapters of rank 2 on its attention: what is trained is far less than what is read."""
    import peft  # seconds, which whoever collects tests would wait for

    base = hf.LlamaForCausalLM(hf.LlamaConfig(**(_DECODER | {"intermediate_size": 8 * WIDTH})))
    adapters = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(base, adapters)


class Mixture(nn.Module):
    """Blocks of four experts each; a token goes to one of them, and which are in use changes with every batch."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
                for _ in range(4)
            )

        def forward(self, stream: Tensor, route: Tensor) -> Tensor:
            normed, out = self.norm(stream), torch.zeros_like(stream)
            for index, expert in enumerate(self.experts):
                chosen = route == index
                if chosen.any():
                    out = out.masked_scatter(chosen[..., None], expert(normed[chosen]))
            return stream + out

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        stream = self.embedding(input_ids)
        for depth, block in enumerate(self.blocks):
            # The first token of the batch picks two of the four: the others get no gradient in this step.
            stream = block(stream, (input_ids[0, 0] + depth + 2 * (input_ids % 2)) % 4)
        logits = self.head(stream).float()
        return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Untied(nn.Module):
    """An embedding that is also the output head, by its weight alone: nobody calls the module there, nor ties it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        stream = self.embedding(input_ids)
        for block in self.blocks:
            stream = stream + block(torch.tanh(stream))
        logits = functional.linear(stream, self.embedding.weight).float()
        return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": Architecture(_gpt2, _causal, generates=True),
    "llama": _decoder("Llama"),
    "qwen3": _decoder("Qwen3", tie_word_embeddings=True),
    "mistral": _decoder("Mistral", sliding_window=SEQUENCE // 2),
    "gemma": _decoder("Gemma"),
    "mixtral": _decoder("Mixtral", num_local_experts=4, output_router_logits=True),
    "bert": Architecture(_bert, _masked),
    "t5": Architecture(_t5, _translation, generates=True),
    "vit": Architecture(_vit, _images),
    "whisper": Architecture(_whisper, _speech),
    "mamba": Architecture(_mamba, _causal, generates=True),
    "lora": Architecture(_lora, _causal, generates=True),
    "mixture": Architecture(Mixture, _next_token, checkpoints=False),
    "untied": Architecture(Untied, _next_token, checkpoints=False),
}
