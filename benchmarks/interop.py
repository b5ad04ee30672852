"""How the inter-operator program grows with layers and devices, and how often it would ask the planner.

    python -m benchmarks.interop             every row
    python -m benchmarks.interop --quick     up to 16 layers
    python -m benchmarks.interop --prove     8 and 16 layers on small clusters: what asking until the best is proven costs, and how much better it is

The planner is a formula here, so seconds are those of the program alone. A model is a run of equal blocks between an embedding and a head. An answer
on m devices takes the work divided by their speeds, more the more devices share a layer (14 % per doubling inside a machine, 40 % per doubling of
machines, noise of up to 10 %), and a synchronisation of gradients; it either keeps activations or recomputes them. The bound knows FLOPs, speeds and
memory only. "of": pairs of (classes of layers, shape), over all numbers of micro-batches; one call of the planner answers for one pair. Asking ends
where estimates lead to nothing better.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from rich.console import Console
from rich.table import Table

from benchmarks.workloads import machines, paper_cluster
from hapx.cluster.spec import ClusterSpec, Link
from hapx.stages.costs import Answer, Prices, most_in_flight
from hapx.stages.dp import Solution, solve
from hapx.stages.space import space
from hapx.stages.submeshes import Shape

WIDTH, TOKENS, VOCABULARY, BATCH = 8192, 1024, 51200, 1024
MICRO_BATCHES = (32, 64, 128, 256)


@dataclass(frozen=True)
class Synthetic:
    """A GPT of `layers` - 2 blocks of width 8192, with one number of micro-batches."""

    cluster: ClusterSpec
    layers: tuple[str, ...]
    micro_batches: int

    def prices(self) -> Prices:
        return Prices(self.micro_batches, self.ask, self.bound, self.crossing, self.least_crossing)

    def _parameters(self, start: int, stop: int) -> float:
        return sum(12.0 * WIDTH**2 if name == "block" else VOCABULARY * WIDTH for name in self.layers[start:stop])

    def _ideal(self, start: int, stop: int, shape: Shape) -> float:
        """Seconds per micro-batch of products at full speed; an embedding has none."""
        products = sum(12.0 * WIDTH**2 if name == "block" else VOCABULARY * WIDTH for name in self.layers[start:stop] if name != "embedding")
        return 6 * products * TOKENS * BATCH / self.micro_batches / sum(self.cluster.device_types[t].speed("fp16") for t in shape.types)

    def _fit(self, start: int, stop: int, shape: Shape, recompute: bool, temporary: float) -> int:
        devices = shape.num_devices
        kept = (2 if recompute else 34) * (stop - start) * WIDTH * TOKENS * BATCH / self.micro_batches / devices
        memory = min(self.cluster.device_types[t].memory for t in shape.types)
        return most_in_flight([memory], [16 * self._parameters(start, stop) / devices], [kept], [temporary])

    def ask(self, start: int, stop: int, shape: Shape) -> tuple[Answer, ...]:
        inside = max(len(p.types) for p in shape.parts)
        noise = random.Random(f"{self.layers[start:stop]} {shape}").uniform(1, 1.1)
        micro = self._ideal(start, stop, shape) * 1.14 ** log2(inside) * 1.4 ** log2(len(shape.parts)) * noise + 1e-4 * (stop - start)
        link = self.cluster.inter if len(shape.parts) > 1 else shape.parts[0].intra
        sync = 2 * self._parameters(start, stop) / shape.num_devices / link.bandwidth if link else 0.0
        made = [(1.0, self._fit(start, stop, shape, False, 1e9)), (4 / 3, self._fit(start, stop, shape, True, 1e9))]
        fitting = [(slower, most) for i, (slower, most) in enumerate(made) if most > (made[0][1] if i else 0)]
        return tuple(Answer(micro * slower, sync, most) for slower, most in fitting)

    def bound(self, start: int, stop: int, shape: Shape) -> Answer:
        return Answer(self._ideal(start, stop, shape), 0.0, self._fit(start, stop, shape, True, 0.0))

    def crossing(self, boundary: int, front: Shape, back: Shape, link: Link) -> float:
        return self.least_crossing(boundary, front, link)

    def least_crossing(self, _boundary: int, _front: Shape, link: Link) -> float:
        return 2 * (2 * WIDTH * TOKENS * BATCH / self.micro_batches / link.bandwidth + link.latency)


def solved(cluster: ClusterSpec, layers: int, prove: bool = False, micro_batches: tuple[int, ...] = MICRO_BATCHES) -> tuple[Solution, float]:
    """Solution and CPU seconds."""
    names = ("embedding", *["block"] * (layers - 2), "head")
    began = time.process_time()
    found = solve(names, space(cluster), [Synthetic(cluster, names, n).prices() for n in micro_batches], prove=prove)
    return found, time.process_time() - began


def clusters() -> list[tuple[str, ClusterSpec]]:
    h100 = machines((1, "H100-SXM5-80GB", 8), (1, "A100-SXM4-80GB", 8), inter="25 Gbit/s")
    alike = [(f"{n} x 8 V100", machines((n, "V100-SXM2-16GB", 8), inter="25 Gbit/s")) for n in (1, 2, 4, 8, 16)]
    return [*alike, ("paper: 2 x 8 V100, 6 x 8 P100", paper_cluster(64)), ("8 H100, 8 A100", h100)]


def table(depths: Sequence[int]) -> Table:
    """A row per cluster and depth."""
    made = Table(title=f"inter-operator program, {len(MICRO_BATCHES)} numbers of micro-batches")
    for column in ("devices", "layers", "CPU s", "asked", "of", "searches", "suffixes", "n", "stages"):
        made.add_column(column, justify="left" if column == "devices" else "right")
    for name, cluster in clusters():
        for layers in depths:
            found, seconds = solved(cluster, layers)
            best = found.pipelines[0] if found.pipelines else None
            what = (str(best.micro_batches), str(len(best.stages))) if best else ("", "none fits")
            made.add_row(name, str(layers), f"{seconds:.2f}", str(found.asked), str(found.pairs), str(found.searches), str(found.labels), *what)
    return made


def proofs(depths: Sequence[int] = (8, 16)) -> Table:
    """What estimates lead to, beside the proven best."""
    made = Table(title="guided by estimates, and proven")
    for column in ("devices", "layers", "asked", "until proven", "of", "slower by at most", "really"):
        made.add_column(column, justify="left" if column == "devices" else "right")
    for name, cluster in [c for c in clusters() if c[1].num_devices <= 32]:
        for layers in depths:
            guided, proven = solved(cluster, layers)[0], solved(cluster, layers, prove=True)[0]
            if guided.pipelines:
                excess = guided.pipelines[0].time / proven.pipelines[0].time - 1
                made.add_row(name, str(layers), str(guided.asked), str(proven.asked), str(proven.pairs), f"{guided.gap:.1%}", f"{excess:.2%}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to 16 layers")
    parser.add_argument("--prove", action="store_true", help="compare with proven pipelines")
    chosen = parser.parse_args()
    Console(width=130).print(proofs() if chosen.prove else table((8, 16) if chosen.quick else (8, 16, 24, 48, 96)))


if __name__ == "__main__":
    main()
