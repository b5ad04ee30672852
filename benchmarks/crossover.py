"""Where one way to communicate becomes better than another, from the cost model and from plans.

In: sizes, shares, bandwidths. Out: seconds. The formulas are those of `hapx.cost.network`; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, log2

import torch
from torch import Tensor, nn

from benchmarks.workloads import machines
from hapx.cluster.spec import ClusterSpec
from hapx.cost.network import Network
from hapx.cost.view import View
from hapx.graph.capture import capture
from hapx.ir import Graph, Kind, OpCall
from hapx.plan import Form, Plan
from hapx.planner import plan_graphs, views
from hapx.restriction import Restriction
from hapx.states import Cut, Invariant, Placement, Replicated, Sharded
from hapx.theory.factors import gathered

FORMS = (Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT)
UNITS = 10_000

# --- forms of a gather over the skew (HAP, Figure 4) --------------------------------------------------------------------------


def equal_devices(count: int, each: int = 1, inter: str = "10.4 Gbit/s", latency: str = "50 us") -> ClusterSpec:
    """Machines of equal devices."""
    return machines((count, "V100-SXM2-16GB", each), inter=inter, latency=latency)


def gather_seconds(cluster: ClusterSpec, size: float, share: float, form: Form) -> float:
    """An all_gather of `size` bytes, of which the first device has `share` and the others the same each."""
    mesh = views(cluster, Restriction(mesh="flat"))[0]
    cut = Cut(mesh.row(0), UNITS)
    rest, more = divmod(UNITS - round(share * UNITS), cluster.num_devices - 1)
    lengths = (round(share * UNITS), *(rest + (i < more) for i in range(cluster.num_devices - 1)))
    view = View(mesh, cluster, {cut: lengths})
    shard = view.fraction(Placement((Sharded(0, 1, 1, cut),))).scaled((size,) * view.size)
    term = Network(view).axes[0].all_gather(form, shard, view.constant(size))
    return 0.0 if term is None else float(term.at({}).max())


def crossing(left: Callable[[float], float], right: Callable[[float], float], low: float, high: float) -> float | None:
    """Where `left` becomes larger than `right` between low and high, None if it does not."""
    if left(low) >= right(low) or left(high) <= right(high):
        return None
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) < right(middle) else (low, middle)
    return high


def skew_where_grouped_wins(cluster: ClusterSpec, size: float) -> float | None:
    """The share of the largest shard from which grouped broadcasts are faster than padding, from the terms."""
    seconds = (lambda share, form=form: gather_seconds(cluster, size, share, form) for form in (Form.PADDED, Form.GROUPED))
    return crossing(*seconds, 1 / cluster.num_devices, 0.95)


def skew_by_formula(devices: int, size: float, bandwidth: float, latency: float) -> float:
    """The same on paper:  (m-1) s N/b + ceil(log2 m) a = N/b + m a."""
    return (1 + (devices - ceil(log2(devices))) * latency * bandwidth / size) / (devices - 1)


# --- computation and communication (HAP, Figure 2) ----------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Square layers, each behind a norm, which needs whole rows: activations that are split by columns are gathered after every layer."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, target)


@cache
def perceptron(batch: int, width: int = 2048, layers: int = 4) -> Graph:
    """Captured without weights."""
    with torch.device("meta"):
        x = torch.zeros(batch, width)
        return capture(Perceptron(width, layers), (x, torch.zeros_like(x)))


def mixed_devices(gigabits: float) -> ClusterSpec:
    """Two V100 and two P100, each in a machine of its own."""
    return machines((2, "V100-SXM2-16GB", 1), (2, "P100-SXM2-16GB", 1), inter=f"{gigabits} Gbit/s", latency="20 us")


def _split(name: str, what: str, ratios: str) -> Restriction:
    """One axis, products split by `what`, shards padded."""
    options = {"mesh": "flat", "split": what, "ratios": ratios, "sfb": "never", "storage": "as-used", "forms": frozenset({"padded"})}
    return Restriction(name, **options)  # type: ignore[arg-type]


STRATEGIES: Mapping[str, Restriction] = {
    r.name: r
    for r in (
        _split("data, even", "batch", "even"),
        _split("data, proportional", "batch", "speed"),
        _split("tensor, even", "model", "even"),
        _split("tensor, proportional", "model", "speed"),
        _split("tensor, balanced", "model", "balanced"),
        Restriction("planner", mesh="flat"),
    )
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Plans at one bandwidth: predicted seconds by strategy; `fast`: share of each fast device in "tensor, balanced"; `ratio`: computation over
    communication of "tensor, even" (what it takes on a network without limits, over what is added to that)."""

    gigabits: float
    seconds: Mapping[str, float]
    fast: float
    ratio: float

    @property
    def best(self) -> str:
        """The best strategy of the plain ones."""
        return min((s for s in self.seconds if s != "planner"), key=self.seconds.__getitem__)


def at_bandwidth(gigabits: float, batch: int = 2048) -> Ratio:
    """Plans of the perceptron for one bandwidth between machines."""
    plans = {name: plan_graphs([perceptron(batch)], mixed_devices(gigabits), strategy=rule, optimizer="sgd") for name, rule in STRATEGIES.items()}
    free = plan_graphs([perceptron(batch)], mixed_devices(1e7), strategy=STRATEGIES["tensor, even"], optimizer="sgd").iteration_time
    moved = plans["tensor, even"].iteration_time - free
    fast = largest_share(plans["tensor, balanced"])
    return Ratio(gigabits, {name: plan.iteration_time for name, plan in plans.items()}, fast, free / max(moved, 1e-12))


def largest_share(plan: Plan) -> float:
    """The largest share of a device, of what is cut by the ratios of computing."""
    rows = [shares for row, shares in plan.stages[0].shares.items() if row.kind == "compute"]
    return max(rows[0]) if rows else 1 / plan.cluster.num_devices


# --- what the planner chooses -------------------------------------------------------------------------------------------------


class Words(nn.Module):
    """A large table, two layers, and a head of its own."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(vocabulary, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.second(nn.functional.gelu(self.first(self.table(ids)))), target)


@cache
def words(batch: int, vocabulary: int = 32768, width: int = 1024) -> Graph:
    """Captured without weights."""
    with torch.device("meta"):
        return capture(Words(vocabulary, width), (torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, width)))


def choices(batch: int, gigabits: float, largest: float) -> Mapping[str, str]:
    """How a data-parallel plan for four equal devices, of which the first has `largest` of the batch, gets the gradient of each matrix."""
    rest = (1 - largest) / 3
    rule = Restriction("data", mesh="flat", split="batch", ratios=(largest, rest, rest, rest))
    plan = plan_graphs([words(batch)], equal_devices(4, inter=f"{gigabits} Gbit/s"), strategy=rule, optimizer="sgd")
    return {name.split(".")[0]: how for name, how in gradients(plan).items() if name.endswith("weight")}


def gradients(plan: Plan) -> dict[str, str]:
    """Per parameter, how its gradient comes about."""
    graph = plan.graphs[plan.first]
    found: dict[str, str] = {}
    for triple in (i.triple for i in plan.stages[0].program.instructions):
        for p in triple.pre:
            if graph.refs[p.tensor].kind is not Kind.PARAMETER:
                continue
            if isinstance(triple.body, OpCall):
                if gathered(triple.body) is not None:
                    found[p.tensor] = f"factors, {_form(str(triple.body['form']))}"
                elif all(isinstance(s, Sharded) for s in p.placement.states):
                    found.setdefault(p.tensor, "in shards of its own")
                continue
            for c in triple.body:
                if isinstance(c.source, Invariant) and isinstance(c.target, Replicated):
                    found[p.tensor] = "all-reduce"
                elif isinstance(c.source, Sharded):
                    found[p.tensor] = f"gathered, {_form(c.form.value)}"
    return found


def _form(name: str) -> str:
    return name.replace("_", "-")


def sweep(low: float, high: float, count: int) -> Sequence[float]:
    """Numbers from low to high, evenly on a logarithmic scale, to two digits."""
    return [float(f"{low * (high / low) ** (i / (count - 1)):.2g}") for i in range(count)]
