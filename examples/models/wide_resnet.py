"""Wide-ResNet in the sizes of Alpa's experiments, 250 million to 13 billion parameters (Zagoruyko and Komodakis 2016; Zheng et al. 2022).

Bottleneck blocks whose 3 x 3 convolution is wider; images of 224 x 224, 1024 classes. On the `meta` device:

hapx plan examples/models/wide_resnet.py:build_250m --cluster cluster_specs/v100x2_p100x6.yaml
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}  # by number of layers
EXPANSION = 4  # of the channels that leave a block


@dataclass(frozen=True)
class Size:
    """`channels`: of the first stage; each further stage has twice as many. `factor`: how much wider the 3 x 3 convolutions are."""

    layers: int
    channels: int
    factor: int


BATCH = 1536  # global, of all experiments but the largest
SIZES = {
    "250M": Size(50, 160, 2), "500M": Size(50, 224, 2), "1B": Size(50, 320, 2), "2B": Size(50, 448, 2), "4B": Size(50, 640, 2),
    "6.8B": Size(50, 320, 16), "13B": Size(101, 320, 16),
}  # fmt: skip


class ConvNorm(nn.Sequential):
    """A convolution without bias and its batch norm."""

    def __init__(self, a: int, b: int, kernel: int, stride: int = 1):
        super().__init__(nn.Conv2d(a, b, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(b))


class Block(nn.Module):
    """1 x 1, 3 x 3 (wider, perhaps strided), 1 x 1; and a shortcut, projected where the shape changes."""

    def __init__(self, entering: int, channels: int, factor: int, stride: int):
        super().__init__()
        leaving = EXPANSION * channels
        self.reduce = ConvNorm(entering, channels, 1)
        self.widen = ConvNorm(channels, factor * channels, 3, stride)
        self.expand = ConvNorm(factor * channels, leaving, 1)
        self.shortcut = ConvNorm(entering, leaving, 1, stride) if stride > 1 or entering != leaving else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(F.relu(self.widen(F.relu(self.reduce(x)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class WideResNet(nn.Module):
    """Stem, four stages of blocks, mean over the image, linear classifier; mean cross entropy."""

    def __init__(self, size: Size, classes: int = 1024):
        super().__init__()
        self.stem = ConvNorm(3, size.channels, 7, stride=2)
        blocks: list[Block] = []
        entering = size.channels
        for stage, count in enumerate(BLOCKS[size.layers]):
            channels = size.channels * 2**stage
            for k in range(count):
                blocks.append(Block(entering, channels, size.factor, stride=2 if stage and not k else 1))
                entering = EXPANSION * channels
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(entering, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        return F.cross_entropy(self.classify(self.blocks(x).mean((2, 3))), targets)


def make(size: Size, batch: int, side: int = 224) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model on the `meta` device and one global batch."""
    with torch.device("meta"):
        return WideResNet(size), (torch.zeros(batch, 3, side, side), torch.zeros(batch, dtype=torch.int64))


def build_250m(batch: int = BATCH) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return make(SIZES["250M"], batch)


def build_500m(batch: int = BATCH) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return make(SIZES["500M"], batch)


def build_1b(batch: int = BATCH) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return make(SIZES["1B"], batch)


def build_2b(batch: int = BATCH) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return make(SIZES["2B"], batch)


def build_4b(batch: int = BATCH) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return make(SIZES["4B"], batch)


def build_6_8b(batch: int = BATCH) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return make(SIZES["6.8B"], batch)


def build_13b(batch: int = BATCH) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return make(SIZES["13B"], batch)


build = build_250m
