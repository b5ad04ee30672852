"""Predicted and measured peak of memory, per model, strategy and rank.

    python -m benchmarks.memory                  prints the table (four processes over gloo; over NCCL where there is a GPU, which they may share)
    python -m benchmarks.memory --write          and writes it to docs/memory.md

Predicted is `plan.memory`. Measured is what `hapx.profile.memory.training_peak` finds in training steps with AdamW: what is allocated before the
step, plus the highest running total of the allocation events of torch.profiler (on GPUs: of the caching allocator). The models are so small that all
of it takes a few minutes, and so large that parameters, optimizer state and activations are tens of MiB. Half of the devices are 2.5 times as fast as
the others, so shares differ. Vectors of oneDNN are those of the machine that plans (16 numbers with AVX-512, 8 with AVX2): with shorter ones
convolutions of few channels need less.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.gpus import take_gpu
from benchmarks.workloads import example_module, random_images, random_tokens
from hapx.cluster.spec import ClusterSpec
from hapx.collectives.communicator import create_groups, own_device
from hapx.errors import PlanError
from hapx.graph.capture_inputs import bind_inputs
from hapx.plan import Plan
from hapx.planner import plan_module
from hapx.profile.memory import Peak, training_peak

RANKS = 4
STRATEGIES = ("dp-proportional", "zero", "tensor-parallel")
PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
COMMAND = "python -m benchmarks.memory"
MIB = 2**20


def _mlp() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return example_module("mlp").MLP(512, 2048, 2048, 512), (torch.randn(2048, 512), torch.randn(2048, 512))


def _gpt() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return example_module("gpt").GPT(4096, width=256, heads=8, layers=4, context=128), random_tokens(16, 128, 4096)


def _vgg() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    stages = ((32, 32), (64, 64), (128, 128), (256, 256))
    return example_module("vgg19").VGG19(hidden=1024, dropout=0.0, stages=stages), random_images(64)


def _moe() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    example_module("bert")
    return example_module("bert_moe").BERTMoE(4096, 192, 64, heads=4, layers=4, experts=8), random_tokens(16, 64, 4096)


def _vit() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return example_module("vit").ViT(size=32, patch=4, width=256, heads=8, layers=4, classes=10), random_images(32)


class Translation(nn.Module):
    """torch's own encoder and decoder layers."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.Transformer(width, 8, 2, 2, 4 * width, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        made = self.layers(self.tokens(source), self.tokens(target[:, :-1]))
        return F.cross_entropy(self.head(made).flatten(0, 1), target[:, 1:].flatten())


class UNet(nn.Module):
    """Two scales, with strides down and a transposed convolution up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.first, self.down, self.inner = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 2 * c, 3, 2, 1), nn.Conv2d(2 * c, 2 * c, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(2 * c, c, 2, 2), nn.Conv2d(2 * c, 3, 1)

    def forward(self, images: Tensor, wanted: Tensor) -> Tensor:
        wide = F.leaky_relu(self.first(images))
        deep = self.up(F.leaky_relu(self.inner(F.leaky_relu(self.down(wide)))))
        return F.mse_loss(self.last(torch.cat([wide, deep], 1)), wanted)


class Tagger(nn.Module):
    """Two layers of LSTMs in both directions."""

    def __init__(self, vocabulary: int, width: int, tags: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(2 * width, tags)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor, tags: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(self.tokens(tokens))[0]).flatten(0, 1), tags.flatten())


MODELS: Mapping[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]] = {
    "MLP": _mlp, "GPT": _gpt, "VGG": _vgg, "BERT-MoE": _moe, "ViT": _vit,
    "Transformer": lambda: (Translation(2048, 256), random_tokens(32, 48, 2048)),
    "U-Net": lambda: (UNet(24), (torch.randn(128, 3, 32, 32), torch.randn(128, 3, 32, 32))),
    "LSTM": lambda: (Tagger(1024, 96, 32), (torch.randint(0, 1024, (96, 24)), torch.randint(0, 32, (96, 24)))),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    model: str
    strategy: str
    rank: int
    share: float
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def cluster(cuda: bool = False) -> ClusterSpec:
    """Two fast and two slow devices; names say whether they are processors."""
    kind = "GPU" if cuda else "CPU"
    speeds = {f"{kind}-fast": ("20e9", "10 GB/s"), f"{kind}-slow": ("8e9", "4 GB/s")}
    return ClusterSpec.load(
        {
            "name": "memory",
            "machines": [{"name": name.lower(), "devices": [name, name]} for name in speeds],
            "device_types": {n: {"flops": flops, "memory": "2 GiB", "memory_bandwidth": moved} for n, (flops, moved) in speeds.items()},
            "network": {"inter": {"bandwidth": "8 GB/s", "latency": "10 us"}, "intra": {"bandwidth": "10 GB/s", "latency": "5 us"}},
        }
    )


def planned(name: str, strategy: str, cuda: bool = False) -> tuple[str, Plan]:
    """The plan of a model, and the strategy that it has: "auto" where the model cannot be split the other way."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operators without a rule are named there
        try:
            return strategy, plan_module(module, cluster(cuda), inputs, strategy=strategy)
        except PlanError:
            return "auto", plan_module(module, cluster(cuda), inputs, strategy="auto")


def measure(plan: Plan, name: str) -> Peak:
    """The peak of this rank (a collective call; the default process group is there)."""
    rank = dist.get_rank()
    device = own_device()
    torch.manual_seed(0)
    module, batch = MODELS[name]()
    inputs = dict(zip(plan.graphs[plan.first].input_names, bind_inputs(module, batch).tensors, strict=True))
    communicators = create_groups(plan.stages[0].mesh)
    return training_peak(plan, rank, module.to(device), communicators, inputs, lambda p: torch.optim.AdamW(p, lr=1e-4), device=device)


def measured(plans: Sequence[tuple[str, Plan]], cuda: bool = False) -> list[list[Peak]]:
    """Per plan (with the name of its model), the peak of every rank, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder, f"{i}.json")) for i in range(len(plans))]
        for path, (_, plan) in zip(paths, plans, strict=True):
            plan.save(path)
        context = multiprocessing.get_context("spawn")
        with context.Pool(RANKS) as pool:
            work = [(rank, folder, [(name, path) for path, (name, _) in zip(paths, plans, strict=True)], cuda) for rank in range(RANKS)]
            by_rank = pool.starmap_async(_rank, work, chunksize=1).get()
    return [list(peaks) for peaks in zip(*by_rank, strict=True)]


def _rank(rank: int, folder: str, plans: Sequence[tuple[str, str]], cuda: bool) -> list[Peak]:
    torch.set_num_threads(1)
    if cuda:
        take_gpu(rank, RANKS)
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=RANKS)
    try:
        return [measure(Plan.load(path), name) for name, path in plans]
    finally:
        dist.destroy_process_group()


def rows(models: Sequence[str], strategies: Sequence[str] = STRATEGIES) -> list[Row]:
    cuda = torch.cuda.is_available()
    plans = [(name, *planned(name, strategy, cuda)) for name in models for strategy in strategies]
    peaks = measured([(name, plan) for name, _, plan in plans], cuda)
    return [
        Row(name, strategy, rank, plan.shares[rank], plan.memory[rank], peak.total)
        for (name, strategy, plan), by_rank in zip(plans, peaks, strict=True)
        for rank, peak in enumerate(by_rank)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--write", action="store_true", help=f"write the table to docs/{PAGE.name}")
    args = parser.parse_args()
    found = rows(args.models, args.strategies)
    table = Table("model", "strategy", "rank", "share", "predicted MiB", "measured MiB", "ratio")
    for r in found:
        table.add_row(*_cells(r))
    Console(width=110).print(table)
    print(_summary(found))
    print(f"made by: {COMMAND}")
    if args.write:
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"written to {PAGE}")


def _cells(r: Row) -> tuple[str, ...]:
    return r.model, r.strategy, str(r.rank), f"{r.share:.2f}", f"{r.predicted / MIB:.2f}", f"{r.measured / MIB:.2f}", f"{r.ratio:.3f}"


def _summary(found: Sequence[Row]) -> str:
    ratios = [r.ratio for r in found]
    near = sum(0.9 <= x <= 1.1 for x in ratios)
    return f"predicted / measured is {min(ratios):.3f} to {max(ratios):.3f}; {near} of {len(ratios)} are within 10 %"


def page(found: Sequence[Row]) -> str:
    """docs/memory.md."""
    lines = [
        "# Predicted and measured memory", "",
        f"Made by `{COMMAND} --write`. {(__doc__ or '').split(chr(10) * 2)[2].strip()}", "",
        "How the prediction is made: `hapx/cost/liveness.py` walks the program as the runtime runs it.", "",
        f"{_summary(found)}.", "",
        "| model | strategy | rank | share | predicted MiB | measured MiB | ratio |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join([*lines, *("| " + " | ".join(_cells(r)) + " |" for r in found), ""])


if __name__ == "__main__":
    main()
