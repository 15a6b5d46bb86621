"""A ConvNet on images of CIFAR's shape, 3 x 32 x 32 in ten classes, from ds_config.json.

    bash examples/cifar/launch.sh               # torchrun: a rank for each GPU of this machine
    sbatch examples/cifar/launch.sbatch         # SLURM: the same on each of its nodes
    python examples/cifar/train.py --steps 20

The images are generated: shapes of random colour, size and position on a background of another random colour.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import tiering as deepspeed

CLASSES = {
    "disc": lambda x, y: x.hypot(y) < 1,
    "ring": lambda x, y: (x.hypot(y) < 1) & (x.hypot(y) > 0.6),
    "square": lambda x, y: torch.maximum(x.abs(), y.abs()) < 0.9,
    "frame": lambda x, y: (torch.maximum(x.abs(), y.abs()) - 0.7).abs() < 0.2,
    "diamond": lambda x, y: x.abs() + y.abs() < 1.1,
    "triangle": lambda x, y: (2 * x.abs() - y < 1) & (y < 0.9),
    "plus": lambda x, y: (torch.minimum(x.abs(), y.abs()) < 0.25) & (torch.maximum(x.abs(), y.abs()) < 1),
    "cross": lambda x, y: ((x.abs() - y.abs()).abs() < 0.35) & (torch.maximum(x.abs(), y.abs()) < 0.9),
    "lying bars": lambda x, y: (torch.maximum(x.abs(), y.abs()) < 1) & ((y * 2.5 * math.pi).sin() > 0),
    "standing bars": lambda x, y: (torch.maximum(x.abs(), y.abs()) < 1) & ((x * 2.5 * math.pi).sin() > 0),
}


class Shapes(Dataset[tuple[Tensor, int]]):
    """Generated images; sample ``index`` is always the same image."""

    def __init__(self, count: int, *, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.first + index)
        label = int(torch.randint(len(CLASSES), (), generator=generator))
        radius, down, right = (torch.rand(3, generator=generator) * torch.tensor([6, 8, 8])).tolist()
        radius, places = radius + 7, torch.arange(32.0)
        y, x = (places[:, None] - 12 - down) / radius, (places[None, :] - 12 - right) / radius
        inside = [*CLASSES.values()][label](x, y)
        colours = torch.rand(2, 3, 1, 1, generator=generator)
        image = torch.where(inside, colours[0], colours[1])
        return image - 0.5 + 0.1 * torch.randn(image.shape, generator=generator), label


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(8, made), nn.GELU())
            for given, made in ((3, 16), (16, 32), (32, 64))
        )
        self.fc1 = nn.Linear(64 * 4 * 4, 128)
        self.fc2 = nn.Linear(128, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = functional.max_pool2d(block(images), 2)
        return self.fc2(functional.relu(self.fc1(images.flatten(1))))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--local_rank", type=int, default=-1, help="from a launcher that gives it")
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_name("ds_config.json")))
    options = parser.parse_args(argv)

    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    engine, _, loader, _ = deepspeed.initialize(
        args=options, model=net, model_parameters=net.parameters(), training_data=Shapes(20_000)
    )
    device = deepspeed.get_accelerator().device_name(engine.local_rank)
    dtype = (
        torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else torch.float
    )
    while engine.global_steps < options.steps:
        for images, labels in loader:
            scores = engine(images.to(device, dtype))
            loss = functional.cross_entropy(scores.float(), labels.to(device))
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0 and engine.global_steps % 10 == 0:
                rate = engine.get_lr()[0]
                print(f"step {engine.global_steps}: loss {loss.item():.4f}, lr {rate:.2e}", flush=True)
            if engine.global_steps >= options.steps:
                break

    engine.eval()
    images, labels = torch.utils.data.default_collate([*Shapes(1000, first=20_000)])
    with torch.no_grad():
        answers = engine(images.to(device, dtype)).argmax(dim=1).cpu()
    if engine.global_rank == 0:
        print(f"right answers: {(answers == labels).float().mean().item():.1%}")
    engine.destroy()


if __name__ == "__main__":
    main()
