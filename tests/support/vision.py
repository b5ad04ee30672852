"""Small models of images and signals, in float64; each returns its mean loss and has `example(batch)`, as those of `support.models`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.models import _initialise


def _noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Classified(nn.Module):
    """A model of scores for `classes` from inputs of `shape`; mean cross entropy."""

    def __init__(self, shape: tuple[int, ...], classes: int = 5):
        super().__init__()
        self.shape, self.classes = shape, classes

    def scores(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x), targets)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        targets = torch.randint(0, self.classes, (batch,), generator=torch.Generator().manual_seed(seed))
        return _noise(batch, *self.shape, seed=seed), targets


class ConvNorm(nn.Sequential):
    """Convolution, batch norm and perhaps an activation."""

    def __init__(self, a: int, b: int, kernel: int, activation: nn.Module | None = None, **options: int):
        super().__init__(nn.Conv2d(a, b, kernel, bias=False, **options), nn.BatchNorm2d(b), activation or nn.Identity())


class ResNet(Classified):
    """A bottleneck in four groups with a strided shortcut, then a depthwise block with squeeze and excitation."""

    def __init__(self, width: int = 8, seed: int = 0):
        super().__init__((3, 6, 6))
        self.stem = ConvNorm(3, width, 3, nn.ReLU(inplace=True), padding=1)
        self.bottleneck = nn.Sequential(
            ConvNorm(width, width, 1, nn.ReLU6()), ConvNorm(width, 2 * width, 3, nn.ReLU(), groups=4, stride=2, padding=1),
            ConvNorm(2 * width, width, 1),
        )  # fmt: skip
        self.shortcut = ConvNorm(width, width, 1, stride=2)
        self.depthwise = nn.Sequential(ConvNorm(width, width, 3, nn.Hardswish(), groups=width, padding=1), ConvNorm(width, width, 1))
        self.excite = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.Hardsigmoid())
        self.classify = nn.Linear(width, self.classes)
        _initialise(self, seed, torch.float64)

    def scores(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.bottleneck(x) + self.shortcut(x))
        y = self.depthwise(x)
        x = x + y * self.excite(y)
        return self.classify(x.mean((2, 3)))


class UNet(nn.Module):
    """Two levels with skips: down by pooling, up by a transposed convolution and by interpolation; group norm; an image for an image."""

    def __init__(self, width: int = 4, seed: int = 0):
        super().__init__()
        self.enter = self._level(2, width)
        self.down = self._level(width, 2 * width)
        self.bottom = self._level(2 * width, 2 * width)
        self.rise = nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2)
        self.up = self._level(4 * width, width)
        self.leave = self._level(2 * width, width)
        self.head = nn.Conv2d(width, 2, 1)
        _initialise(self, seed, torch.float64)

    @staticmethod
    def _level(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding="same"), nn.GroupNorm(4, b), nn.SiLU())

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        first = self.enter(image)
        second = self.down(F.max_pool2d(first, 2))
        x = self.rise(self.bottom(F.avg_pool2d(second, 2)))
        x = self.up(torch.cat([x, second], 1))
        x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return F.mse_loss(self.head(self.leave(torch.cat([x, first], 1))), target)

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        return _noise(batch, 2, 8, 8, seed=seed), _noise(batch, 2, 8, 8, seed=seed + 100)


class Signal(Classified):
    """1-D convolutions, circular, dilated and transposed, with instance norm: with running statistics and weights, and with nothing."""

    def __init__(self, width: int = 8, seed: int = 0):
        super().__init__((2, 12))
        self.first = nn.Conv1d(2, width, 5, padding=2, padding_mode="circular")
        self.norm = nn.InstanceNorm1d(width, affine=True, track_running_stats=True)
        self.slope = nn.PReLU(width)
        self.dilated = nn.Conv1d(width, 2 * width, 3, dilation=2, padding=2, groups=2)
        self.plain = nn.InstanceNorm1d(2 * width)
        self.rise = nn.ConvTranspose1d(width, width, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.classify = nn.Linear(2 * width, self.classes)
        _initialise(self, seed, torch.float64)

    def scores(self, x: Tensor) -> Tensor:
        x = F.avg_pool1d(self.slope(self.norm(self.first(x))), 2)
        x = F.glu(self.plain(self.dilated(x)), 1)
        return self.classify(F.adaptive_max_pool1d(self.rise(x), 2).flatten(1))


class VGG(Classified):
    """Convolutions and pooling, then a classifier of three layers. `dropout`: of channels and of units."""

    def __init__(self, width: int = 4, dropout: float = 0.0, seed: int = 0):
        super().__init__((3, 8, 8))
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout2d(dropout),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(2),
        )  # fmt: skip
        self.classifier = nn.Sequential(
            nn.Linear(8 * width, 16), nn.SELU(), nn.AlphaDropout(dropout), nn.Linear(16, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 5)
        )
        _initialise(self, seed, torch.float64)

    def scores(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


VISION: Mapping[str, Callable[[], nn.Module]] = {"resnet": ResNet, "unet": UNet, "signal": Signal, "vgg": VGG}
VISION_WITH_MASKS: Mapping[str, Callable[[], nn.Module]] = {"vgg with dropout": partial(VGG, dropout=0.3)}
