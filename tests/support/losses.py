"""Models whose losses are hard to divide: means over counts that are data (ignored targets, class weights, masks), every sample against every
other, tables that are split by rows, sums of several terms. In float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, WIDTH = 8, 6


class Seeded(nn.Module):
    """Parameters from a generator of its own; `example(batch, seed)`: inputs."""

    def finish(self, seed: int = 0) -> None:
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numbers(seed: int, limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape, generator=torch.Generator().manual_seed(seed))


class Contrastive(Seeded):
    """Two encoders; every sample meets every other; the right partner has the same number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, WIDTH), nn.Linear(4, WIDTH)
        self.scale = nn.Parameter(torch.zeros(()))
        self.finish()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)
        logits = self.scale.exp() * x @ y.T
        labels = torch.arange(x.shape[0], device=x.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    def example(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        return noise(seed, batch, 5), noise(seed + 9, batch, 4)


class Recommender(Seeded):
    """A user, the mean of what was bought, the weighted sum of tags; their products decide."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.tags = nn.Embedding(12, WIDTH), nn.Embedding(16, WIDTH), nn.EmbeddingBag(8, WIDTH, mode="sum")
        self.bags = nn.EmbeddingBag(16, WIDTH, mode="mean", padding_idx=0)
        self.head = nn.Linear(16, 1)
        self.finish()

    def forward(self, user: Tensor, item: Tensor, bought: Tensor, tags: Tensor, weights: Tensor, clicked: Tensor) -> Tensor:
        vectors = torch.stack([self.users(user), self.items(item), self.bags(bought), self.tags(tags, per_sample_weights=weights)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        logits = self.head(products).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits, clicked, pos_weight=torch.full((), 3.0, dtype=torch.float64))

    def example(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        ids = numbers(seed, 12, batch), numbers(seed + 1, 16, batch), numbers(seed + 2, 16, batch, 5), numbers(seed + 3, 8, batch, 3)
        return *ids, noise(seed + 4, batch, 3), numbers(seed + 5, 2, batch).double()


class Weighted(Seeded):
    """Means whose divisors are data: class weights, ignored targets, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(5, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)
        self.finish()
        self.register_buffer("weights", torch.arange(1.0, CLASSES + 1, dtype=torch.float64))

    def forward(self, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.up(x)))  # (batch, 3, classes)
        flat, targets = logits.flatten(0, 1), target.flatten()
        smooth = F.cross_entropy(flat, targets, self.weights, ignore_index=2, label_smoothing=0.1)
        likelihood = F.nll_loss(logits.log_softmax(-1).transpose(1, 2), target, self.weights, ignore_index=5)
        rows = F.cross_entropy(flat, targets, reduction="none").view_as(mask)
        by_hand = (rows * mask).sum() / mask.sum()
        picked = -logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return smooth + 0.5 * likelihood + by_hand + picked.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)

    def example(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        return noise(seed, batch, 3, 5), numbers(seed + 1, CLASSES, batch, 3), numbers(seed + 2, 2, batch, 3).bool()


class Terms(Seeded):
    """A sum of many losses, with and without means."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)
        self.finish()

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        a, b = self.one(x), self.two(y)
        sign = torch.where(label % 2 == 0, 1.0, -1.0).double()
        terms = [
            F.smooth_l1_loss(a, b),
            F.huber_loss(a, y @ y.T.new_ones(5, CLASSES), delta=0.5),
            F.l1_loss(a, b) * 0.3,
            F.mse_loss(a, b, reduction="sum"),
        ]
        terms += [
            F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"),
            F.poisson_nll_loss(a, b.exp()),
            F.soft_margin_loss(a, b.detach().sign()),
        ]
        terms += [F.cosine_embedding_loss(a, b, sign), F.triplet_margin_loss(a, b, a * b), F.multi_margin_loss(a, label)]
        terms += [F.multi_margin_loss(b, label, reduction="sum"), F.multilabel_margin_loss(b, (b > 0).long(), reduction="sum")]
        terms += [F.hinge_embedding_loss(a, sign[:, None].expand_as(a)), F.margin_ranking_loss(a[:, 0], b[:, 1], sign, margin=0.1)]
        terms += [F.binary_cross_entropy(a.sigmoid(), (label[:, None] == torch.arange(CLASSES, device=label.device)).double(), reduction="sum")]
        return torch.stack(terms).sum() + 1e-2 * (a.norm(dim=-1).mean() + F.pairwise_distance(a, b).mean() + torch.cdist(a, b).mean())

    def example(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        return noise(seed, batch, 5), noise(seed + 1, batch, 5), numbers(seed + 2, CLASSES, batch)


class Indexed(Seeded):
    """The last valid position of every sample, messages along edges, sorted and scanned features."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(5, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.table = nn.Embedding(12, WIDTH)
        self.finish()
        self.register_buffer("edges", torch.tensor([[0, 1, 1, 3, 2], [1, 0, 2, 2, 3]]))

    def forward(self, x: Tensor, length: Tensor, label: Tensor) -> Tensor:
        h = self.enter(x)  # (batch, 4, width)
        sources, targets = self.edges[0], self.edges[1]
        h = h + torch.zeros_like(h).index_add(1, targets, h.index_select(1, sources).tanh())
        last = h[torch.arange(h.shape[0], device=h.device), length]
        best = h.topk(2, dim=1).values.sum(1) + h.cumsum(1)[:, -1] + h.sort(dim=1).values[:, 0]
        wide = self.table.weight[length] + self.table.weight.index_select(0, label)
        spread = torch.zeros_like(last).scatter_add(1, label[:, None].expand(-1, 3) % WIDTH, best[:, :3])
        return F.cross_entropy(self.leave(last + best + wide + spread), label)

    def example(self, batch: int, seed: int) -> tuple[Tensor, ...]:
        return noise(seed, batch, 4, 5), numbers(seed + 1, 4, batch), numbers(seed + 2, CLASSES, batch)


MODELS: Mapping[str, Callable[[], Seeded]] = {m.__name__.lower(): m for m in (Contrastive, Recommender, Weighted, Terms, Indexed)}
