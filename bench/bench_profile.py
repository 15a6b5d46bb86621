"""The engine's update beside its replay by ``tierbench profile``, in turn, on one swap directory.

    python bench/bench_profile.py DIR [--params 200M] [--rounds 8]

Both run the optimizer's kernels, and both are timed until their last byte is written. A ratio of about 1 says that the
replay takes as long as training does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiering
from tiering.planning.decoder import decoder, parse_count
from tiering.tierbench.replay.replayed_step import Replay
from zero3.engine.engine import Engine


def start(directory: Path, params: int) -> Engine:
    shape = decoder(params)
    print(shape)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=False,
    )
    offload = {"device": "nvme", "nvme_path": str(directory)}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "tiering": {"cache_in_host": False, "telemetry": {"enabled": False}},
    }
    return tiering.initialize(model=LlamaForCausalLM(config), config=settings).engine


def settle(engine: Engine) -> None:
    for home in engine._tiers._homes:
        if home.extent is not None:
            engine._tiers.swap.settle(home.extent)


def update(engine: Engine, tokens: torch.Tensor) -> float:
    """Seconds of a step's update."""
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    began = time.monotonic()
    engine.step()
    settle(engine)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--params", type=parse_count, default=200_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    os.environ["TIERING_DEVICE"] = "cpu"
    engine = start(options.directory, options.params)
    tokens = torch.randint(32_000, (1, 64))
    on_nvme = 16 * options.params
    with (
        engine,
        Replay(
            engine.plan,
            "optimizer",
            [options.directory],
            engine.settings.tiering,
            size=on_nvme,
            with_kernels=True,
        ) as replay,
    ):
        replay.lay_out()
        (step,) = replay.turns
        pairs = []
        for number in range(options.rounds + 1):
            ours = update(engine, tokens)
            theirs = replay.replay_turn(step).seconds + replay.settle()
            if number:  # the first time nothing was written before
                pairs.append((ours, theirs))
                print(f"engine {ours:.3f} s, replay {theirs:.3f} s, ratio {ours / theirs:.3f}")
    ratios = [ours / theirs for ours, theirs in pairs]
    ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
    print(
        f"medians: engine {ours:.3f} s, replay {theirs:.3f} s, ratio {statistics.median(ratios):.3f}"
        f" ({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
