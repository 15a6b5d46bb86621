"""Classifies lines of source code by their package: real text with ZeRO-2, in fp16.

    python examples/text_classification/train.py
    torchrun --standalone --nproc-per-node=2 examples/text_classification/train.py --steps 400

The lines come from five packages of Python's standard library, so nothing is downloaded. A guess is right for one line
in five. Every tenth line is a test line.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import tiering as deepspeed

PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest")
FEATURES = 1 << 14  # of a line: its words and pairs of words, numbered by their checksums; 0 fills up
Sample = tuple[Tensor, int]


def features(line: str) -> Tensor:
    words = re.findall(r"[A-Za-z]+|\d|[^\s\w]", line)
    found = [*words, *map(" ".join, pairwise(words))]
    return torch.tensor([zlib.crc32(feature.encode()) % (FEATURES - 1) + 1 for feature in found])


def rows() -> list[tuple[Sample, ...]]:
    """Each row has one line of each package: its features and the number of the package."""
    library = Path(sysconfig.get_path("stdlib"))
    samples: list[list[Sample]] = []
    for label, package in enumerate(PACKAGES):
        text = "\n".join(path.read_text("utf-8") for path in sorted((library / package).rglob("*.py")))
        lines = [line for line in dict.fromkeys(text.split("\n")) if len(line.split()) > 2]
        samples.append([(features(line), label) for line in lines])
    return list(zip(*samples, strict=False))


def pad(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Features [samples, maximum number of features], labels [samples]."""
    lines = pad_sequence([line for line, _ in samples], batch_first=True)
    return lines, torch.tensor([label for _, label in samples])


class Classifier(nn.Module):
    """The mean of the embeddings of the features, followed by two layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Embedding(FEATURES, width, padding_idx=0)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, len(PACKAGES))

    def forward(self, lines: Tensor) -> Tensor:
        mean = self.features(lines).sum(1) / (lines != 0).sum(1, keepdim=True)
        return self.head(functional.relu(self.hidden(mean)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--local_rank", type=int, default=-1, help="from a launcher that gives it")
    parser.add_argument("--save", metavar="DIRECTORY", help="where to leave the weights, in 16 bits")
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    options = parser.parse_args(argv)

    deepspeed.init_distributed()
    known, kept_back = [], []
    for index, row in enumerate(rows()):
        (known if index % 10 else kept_back).extend(row)
    torch.manual_seed(0)
    model = Classifier()
    engine, _, loader, _ = deepspeed.initialize(
        args=options,
        model=model,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
        training_data=known,
        collate_fn=pad,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / 20, max(0.05, 1 - step / options.steps))
        ),
    )
    while engine.global_steps < options.steps:
        for lines, labels in loader:
            loss = functional.cross_entropy(engine(lines.to(engine.device)).float(), labels.to(engine.device))
            engine.backward(loss)
            updates = engine.is_gradient_accumulation_boundary()
            engine.step()
            if updates and engine.global_rank == 0 and engine.global_steps % 10 == 0:
                print(f"step {engine.global_steps}: loss {loss.item():.4f}", flush=True)
            if engine.global_steps >= options.steps:
                break

    engine.eval()
    lines, labels = pad(kept_back)
    with torch.no_grad():
        answers = engine(lines.to(engine.device)).argmax(dim=1).cpu()
    if engine.global_rank == 0:
        print(f"right answers: {(answers == labels).float().mean().item():.1%}")
    if options.save is not None:
        engine.save_16bit_model(options.save)
    engine.destroy()


if __name__ == "__main__":
    main()
