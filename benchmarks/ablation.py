"""Alpa's ablation of intra-operator parallelism (its Figure 8), in kind: equal GPUs in one machine, models that grow with their number.

    python -m benchmarks.ablation                           the table
    python -m benchmarks.ablation --out docs/ablation.md    also as a page

Each model is planned for 1, 4 and 8 V100 of one machine: data parallelism, ZeRO-2, ZeRO-3, shardings propagated from the largest dims, and hapx's
choice among all programs on all mesh views. All times are of the event-driven simulator.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.markdown import markdown
from benchmarks.propagation import largest_dims
from benchmarks.workloads import example_module, machines
from benchmarks.zero2 import zero2
from hapx.cost.memory import usable
from hapx.errors import InsufficientMemoryError
from hapx.graph.capture import capture
from hapx.ir import Graph, Kind
from hapx.planner import Counters, Setting, key_of, plan_spmd, views
from hapx.restriction import AUTO, BASELINES, Restriction, with_remat

DEVICE = "V100-SXM2-16GB"
PRECISION = {"GPT": "fp16", "MoE": "fp16", "Wide-ResNet": "fp32"}  # of products; as in Alpa's experiment
WAYS = ("data parallel", "ZeRO-2", "ZeRO-3", "largest dims", "hapx")
COMMAND = "python -m benchmarks.ablation"
ABOUT = f"""Speed relative to hapx's plan (1.00x: as fast) on one machine of {DEVICE}, 150 GB/s between them, without rematerialisation. All
times are of the event-driven simulator, in which the synchronisation of gradients overlaps with backward; products of GPT and MoE run in fp16, of
Wide-ResNet in fp32, as in Alpa's experiment (Zheng et al. 2022, section 8.2). Models grow with the number of GPUs.

- *data parallel*: the batch is split evenly, gradients are all-reduced.
- *ZeRO-2*: the same with gradients and optimizer states in shards: reduce-scattered in buckets, the parameters gathered after the update.
- *ZeRO-3*: parameters in shards too, gathered for use; kept for backward or gathered again, whichever is faster and fits.
- *largest dims*: every parameter is cut along its largest dim and the operators follow, converting as little as they can; nothing is searched.
- *hapx*: the best program of all mesh views."""


@cache
def gpt(devices: int) -> Graph:
    """Four layers on 8 sequences of 1024 tokens of 51200; wider on more devices, as in Alpa's experiment."""
    width = {1: 1536, 4: 3072, 8: 4096}[devices]
    with torch.device("meta"):
        model = example_module("gpt").GPT(51200, width, width // 128, 4, 1024)
        tokens = torch.zeros(8, 1024, dtype=torch.int64)
    return capture(model, (tokens, torch.zeros_like(tokens)))


@cache
def moe(devices: int) -> Graph:
    """Four layers, every second one with eight experts per device of width 1024, on 32 sequences of 128 tokens per device."""
    module, batch = example_module("bert_moe"), 32 * devices
    with torch.device("meta"):
        model = module.BERTMoE(module.VOCABULARY, 1024, module.CONTEXT, heads=16, layers=4, experts=8 * devices)
        tokens = torch.zeros(batch, module.CONTEXT, dtype=torch.int64)
    return capture(model, (tokens, torch.zeros_like(tokens)))


@cache
def wide_resnet(devices: int) -> Graph:
    """50 layers with 250 million, 1 and 2 billion parameters, on 32 images of 112 x 112."""
    module = example_module("wide_resnet")
    return capture(*module.make(module.SIZES[{1: "250M", 4: "1B", 8: "2B"}[devices]], 32, 112))


MODELS: dict[str, Callable[[int], Graph]] = {"GPT": gpt, "MoE": moe, "Wide-ResNet": wide_resnet}


@dataclass(frozen=True)
class Row:
    """seconds: by way; None where it does not fit. mesh: of hapx's plan."""

    model: str
    devices: int
    parameters: int
    seconds: dict[str, float | None]
    mesh: str

    @property
    def best_other(self) -> float:
        return min((s for way, s in self.seconds.items() if way != "hapx" and s is not None), default=float("inf"))


def compare(model: str, devices: int) -> Row:
    """All ways for one model. Without rematerialisation, which none of the compared has."""
    cluster, graph = machines((1, DEVICE, devices)), MODELS[model](devices)
    setting = Setting(graph, key_of(graph), cluster, AUTO, PRECISION[model], "adamw")
    limit = usable(cluster.device_types[DEVICE])
    rules = {"data parallel": BASELINES["dp-even"], "ZeRO-3": BASELINES["zero"], "hapx": AUTO}
    seconds: dict[str, float | None] = {}
    mesh = "-"
    for way in WAYS:
        if way in rules:
            seconds[way], mesh = _planned(setting, rules[way])
        else:
            found, used = zero2(setting) if way == "ZeRO-2" else largest_dims(setting, views(cluster, BASELINES["zero"])[0])
            seconds[way] = found if used <= limit else None
    return Row(model, devices, sum(r.size for r in graph.of_kind(Kind.PARAMETER)), seconds, mesh)


def _planned(setting: Setting, rule: Restriction) -> tuple[float | None, str]:
    try:
        best = plan_spmd(replace(setting, rule=with_remat(rule, "none")), Counters())[0]
    except InsufficientMemoryError:
        return None, "-"
    return best.time, best.mesh.name


def table(rows: list[Row]) -> Table:
    """Speed relative to hapx's plan."""
    made = Table(title="Intra-operator parallelism on equal GPUs: speed relative to hapx")
    for name in ("model", "GPUs", "parameters", *WAYS[:-1], "hapx", "its mesh"):
        made.add_column(name, justify="left" if name in ("model", "its mesh") else "right")
    for row in rows:
        best = row.seconds["hapx"]
        others = [_relative(row.seconds[way], best) for way in WAYS[:-1]]
        own = "out of memory" if best is None else f"{best * 1e3:.1f} ms"
        made.add_row(row.model, str(row.devices), f"{row.parameters / 1e6:.0f}M", *others, own, row.mesh)
    return made


def _relative(seconds: float | None, best: float | None) -> str:
    return "out of memory" if seconds is None else f"{best / seconds:.2f}x" if best is not None else f"{seconds * 1e3:.1f} ms"


def page(rows: list[Row]) -> str:
    """The table as Markdown, and what is compared."""
    return (
        "\n\n".join(["# Alpa's intra-operator ablation, in kind", ABOUT, f"Made by `{COMMAND} --out docs/ablation.md`.", markdown(table(rows))])
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="also write the table as Markdown")
    parser.add_argument("--model", choices=list(MODELS), action="append")
    parser.add_argument("--devices", type=int, choices=(1, 4, 8), action="append")
    given = parser.parse_args()
    began, console, rows = time.process_time(), Console(width=130), []
    for model in given.model or MODELS:
        for devices in given.devices or (1, 4, 8):
            rows.append(compare(model, devices))
            console.print(f"{model} on {devices}: planned after {time.process_time() - began:.0f} s of CPU time")
    console.print(table(rows))
    console.print(f"{COMMAND}: {time.process_time() - began:.0f} s of CPU time")
    if given.out is not None:
        given.out.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
