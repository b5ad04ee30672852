"""Steps of training on one GPU: what hapx predicts, what it takes, and what plain PyTorch takes.

    python -m benchmarks.one_gpu          prints the table (needs a GPU; about two minutes)

Nothing is divided on one device, so this shows what hapx itself costs (hapx / plain), how far the roofline of the cost model is from real kernels,
with the numbers of the catalogue and with measured ones (`hapx.profile.calibrate`), and the peak of memory. AdamW with foreach, medians of steps.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hapx
from benchmarks.workloads import example_module, random_images, random_tokens
from hapx.cluster.catalogue import CATALOGUE
from hapx.cluster.spec import ClusterSpec
from hapx.profile.calibrate import calibrate

STEPS, WARM = 10, 3
GIB = 2**30
Made = tuple[nn.Module, tuple[Tensor, Tensor]]


def _gpt2() -> Made:
    return example_module("gpt").GPT(50304, width=768, heads=12, layers=12, context=1024), random_tokens(8, 1024, 50304)


def _bert() -> Made:
    bert = example_module("bert")
    layers = [bert.Layer(768, 12) for _ in range(12)]
    return bert.BERT(bert.VOCABULARY, 768, bert.CONTEXT, layers), random_tokens(64, bert.CONTEXT, bert.VOCABULARY)


def _vgg() -> Made:
    return example_module("vgg19").VGG19(pooled=1), random_images(1024)


def _vit() -> Made:
    return example_module("vit").ViT(size=32, patch=4, width=768, heads=12, layers=12, classes=10), random_images(256)


MODELS: dict[str, Callable[[], Made]] = {"GPT-2 small, 8 x 1024": _gpt2, "BERT, 64 x 128": _bert, "ViT, 256 x 64": _vit, "VGG19, 1024": _vgg}


@dataclass(frozen=True)
class Measured:
    """Seconds per step, bytes at the peak."""

    seconds: float
    peak: int


def this_gpu() -> str:
    """The catalogue's name of this GPU: of those whose model is a word of the device's name the one whose memory is nearest, then whose board (PCIE,
    SXM) it names; one that names none is not the PCIe one. Ends the program where there is none."""
    found = torch.cuda.get_device_properties(0)
    named = found.name.upper().replace("-", " ")
    known = [name for name in CATALOGUE if f" {_model(name)} " in f" {named} "]
    if not known:
        raise SystemExit(f"benchmarks.one_gpu: {found.name} is not in the catalogue (`hapx devices` lists it); add it to hapx/cluster/catalogue.py")

    def far(name: str) -> tuple[int, bool]:
        return abs(CATALOGUE[name].memory - found.total_memory) // GIB, ("PCIE" in name) != ("PCIE" in named)

    return min(known, key=far)


def _model(name: str) -> str:
    """What device names call it: "H100" of H100-SXM5-80GB, "RTX 3060" of RTX-3060."""
    first, *rest = name.upper().split("-")
    return " ".join([first, *(part for part in rest if first == "RTX" and not part.endswith("GB"))])


def cluster_of(kind: str) -> ClusterSpec:
    link = {"bandwidth": "100 GB/s", "latency": "5 us"}
    return ClusterSpec.load({"name": "one", "machines": [{"name": "m", "device": kind, "devices": 1}], "network": {"intra": link, "inter": link}})


def train(step: Callable[[], Tensor], parameters: Sequence[nn.Parameter]) -> Measured:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
    times = []
    for k in range(WARM + STEPS):
        if k == WARM:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.zero_grad()
        step().backward()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return Measured(median(times[WARM:]), torch.cuda.max_memory_allocated())


def row(
    make: Callable[[], Made], dtype: torch.dtype | None, named: ClusterSpec, calibrated: ClusterSpec
) -> tuple[Measured, Measured, hapx.Plan, float]:
    """(plain, hapx, the plan with the catalogue's numbers, what measured numbers predict)."""

    def context() -> Any:
        return nullcontext() if dtype is None else torch.autocast("cuda", dtype)

    def loss_of(model: Any, batch: Any) -> Tensor:
        with context():
            return model(*batch)  # type: ignore[no-any-return]

    module, inputs = make()
    batch = tuple(t.cuda() for t in inputs)
    module.cuda()
    plain = train(lambda: loss_of(module, batch), list(module.parameters()))
    del module
    gc.collect()
    torch.cuda.empty_cache()
    module, _ = make()
    with warnings.catch_warnings(), context():
        warnings.simplefilter("ignore")
        known = hapx.plan(module.cuda(), calibrated, batch)
        model = hapx.HAP(module, named, example_inputs=batch)
    ours = train(lambda: loss_of(model, batch), list(model.parameters()))
    return plain, ours, model.plan, known.iteration_time


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.one_gpu needs a GPU")
    torch.cuda.set_device(0)
    named = cluster_of(this_gpu())
    table = Table("model", "dtype", "plain ms", "hapx ms", "hapx / plain", "catalogue ms", "calibrated ms", "peak GiB", "plain GiB", "predicted GiB")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(str(Path(folder, "store")), 1), rank=0, world_size=1)
        for dtype in (None, torch.bfloat16):
            calibrated = calibrate(named, device="cuda", precision="bfloat16" if dtype else "float32")
            print(f"{torch.cuda.get_device_name(0)}, {'bf16' if dtype else 'fp32'}: {calibrated.type_of(0)}", flush=True)
            for name in args.models:
                plain, ours, plan, predicted = row(MODELS[name], dtype, named, calibrated)
                times = [f"{seconds * 1e3:.1f}" for seconds in (plain.seconds, ours.seconds, plan.iteration_time, predicted)]
                sizes = [f"{size / GIB:.2f}" for size in (ours.peak, plain.peak, plan.memory[0])]
                table.add_row(name, "bf16" if dtype else "fp32", *times[:2], f"{ours.seconds / plain.seconds:.2f}", *times[2:], *sizes)
                gc.collect()
                torch.cuda.empty_cache()
        dist.destroy_process_group()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
