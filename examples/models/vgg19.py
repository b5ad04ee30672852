"""VGG19 for images of 32 x 32, as in HAP's experiments (Simonyan and Zisserman 2015, configuration E): the classifier sees 7 x 7 positions, as that
for images of 224 x 224 does, which makes 139.6 million parameters. On the `meta` device:

hapx plan examples/models/vgg19.py:build --cluster cluster_specs/v100x2_p100x6.yaml
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# channels of the 3 x 3 convolutions between one halving of the image and the next
STAGES = ((64, 64), (128, 128), (256, 256, 256, 256), (512, 512, 512, 512), (512, 512, 512, 512))


class VGG19(nn.Module):
    """Sixteen convolutions, five poolings, three linear layers; mean cross entropy.

    Args:
        side: of the images, in pixels. The poolings leave side / 32.
        hidden: width of the classifier.
        pooled: side to which what the poolings leave is averaged, or repeated where it is smaller; None: it stays as it is.
    """

    def __init__(
        self, classes: int = 10, side: int = 32, hidden: int = 4096, dropout: float = 0.5, stages: tuple[tuple[int, ...], ...] = STAGES,
        pooled: int | None = None,
    ):  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for widths in stages:
            for width in widths:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        left = side // 2 ** len(stages) if pooled is None else pooled
        if pooled is not None:
            layers.append(nn.AdaptiveAvgPool2d((pooled, pooled)))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * left * left, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(images).flatten(1)), targets)


def build(batch: int = 1024) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and one global batch."""
    with torch.device("meta"):
        return VGG19(pooled=7), (torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64))
