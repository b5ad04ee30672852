"""Clustering into layers: against all ways to cut small graphs, on models, and by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import hapx
from hapx.errors import HapError
from hapx.graph.capture import capture
from hapx.graph.segments import find_blocks
from hapx.ir import Graph, Kind, Region
from hapx.stages.boundaries import allowed_places, crossing_bytes, received_bytes, settled_places
from hapx.stages.clustering import (
    MORE_CROSSES,
    MOST_LAYERS,
    by_boundaries,
    equal_operators,
    find_layers,
    finer,
    layer_costs,
    natural_number,
    node_flops,
)
from support.layered import Writer, clusterings, flops, random_graph, received
from support.models import GPT
from support.vision import UNet

Layers = tuple[tuple[int, int], ...]


def cover(graph: Graph, layers: Layers) -> bool:
    """Whether the layers are every node once, in order, none of them empty."""
    return [i for a, b in layers for i in range(a, b)] == list(range(len(graph.nodes))) and all(a < b for a, b in layers)


def heaviest(graph: Graph, start: int, stop: int) -> float:
    """FLOPs of the heaviest run of nodes that cannot be cut apart."""
    places = [start, *(p for p in allowed_places(graph) if start < p < stop), stop]
    return max(flops(graph, a, b) for a, b in pairwise(places))


def objective(graph: Graph, layers: Layers) -> tuple[int, float, int]:
    """Bytes of the layer that receives most, sum of the squares of FLOPs, bytes that all receive."""
    got = [received(graph, a, b) for a, b in layers]
    return max(got), round(sum(flops(graph, a, b) ** 2 for a, b in layers), 6), sum(got)


def oracle(graph: Graph, number: int, delta: float) -> tuple[int, float, int]:
    """The best objective of all clusterings that keep the limit, raised to the least that can be kept."""
    rated = []
    for layers in clusterings(graph, number):
        sizes = [(flops(graph, a, b), heaviest(graph, a, b)) for a, b in layers]
        rated.append((max((f for f, h in sizes if f > h), default=0.0), layers))
    limit = max((1 + delta) * flops(graph, 0, len(graph.nodes)) / number, min(r for r, _ in rated))
    return min(objective(graph, layers) for r, layers in rated if r <= limit)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_of_all_ways_to_cut(seed: int) -> None:
    graph, number, delta = random_graph(seed, 9 + seed % 4), 2 + seed % 4, (0.0, 0.3, 1.0)[seed % 3]
    every = find_layers(graph, number, delta)
    assert cover(graph, every)
    assert len(every) == number
    found, best = objective(graph, every), oracle(graph, number, delta)
    assert found[0] == best[0]  # with boundaries away from hills, FLOPs may vary more
    assert found[1] >= best[1]


@pytest.mark.parametrize("seed", range(60))
def test_ties_are_decided_by_variance_and_then_by_the_sum(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hapx.stages.clustering._without_hills", lambda crossing, flops, places, reach: places)
    graph, number, delta = random_graph(seed, 9 + seed % 4), 2 + seed % 4, (0.0, 0.3, 1.0)[seed % 3]
    assert objective(graph, find_layers(graph, number, delta)) == oracle(graph, number, delta)


@pytest.mark.parametrize("seed", range(20))
def test_received_bytes(seed: int) -> None:
    graph = random_graph(seed, 20)
    places = [0, *allowed_places(graph)[seed % 2 :: 2], len(graph.nodes)]
    table = received_bytes(graph, places)
    for i, a in enumerate(places):
        for k, b in enumerate(places):
            assert table[i, k] == (received(graph, a, b) if i < k else 0)
    layers = tuple(pairwise(places))
    assert [(c.start, c.stop, c.flops, c.received) for c in layer_costs(graph, layers)] == [
        (a, b, flops(graph, a, b), received(graph, a, b)) for a, b in layers
    ]


# -- the limit of FLOPs -------------------------------------------------------------------------------------------------------------------


def chain(*sizes: int) -> Graph:
    """Products one after another, as heavy as their sizes; each sends 4 elements."""
    w = Writer()
    x = w.root("x", Kind.INPUT)
    w.root("w")
    for size in sizes:
        w.root(f"x{size}", Kind.INPUT, size)
        x = w.add("add", w.add("mm", f"x{size}", "w"), x)
    return w.graph()


def layer_shares(graph: Graph, number: int) -> list[float]:
    """FLOPs of the layers that exactly keep the mean if they can, in products of size 1 (forward, and backward for the weight)."""
    return [c.flops / 16 for c in layer_costs(graph, find_layers(graph, number, delta=0.0))]


def test_layers_keep_the_limit() -> None:
    w = Writer()
    x = w.root("x", Kind.INPUT)
    w.root("w")
    for k in range(8):
        x = w.add("mm", x, "w", size=4 if k else 1)  # least crosses behind the first product
    graph = w.graph()
    assert find_layers(graph, 2, delta=1.0) == ((0, 1), (1, 8))
    assert find_layers(graph, 2, delta=0.3)[0][1] > 1


def test_what_cannot_be_cut_may_be_heavier_than_the_limit() -> None:
    assert layer_shares(chain(1, 1, 1, 1, 20), 5) == [1, 1, 1, 1, 20]
    assert layer_shares(chain(1, 1, 20, 1, 1), 3) == [2, 20, 2]


def test_a_limit_that_cannot_be_kept_is_raised_as_little_as_possible() -> None:
    assert max(layer_shares(chain(3, 3, 3, 3), 3)) == 6
    assert layer_shares(chain(2, 2, 2, 3, 3), 2) == [6, 6]
    assert layer_shares(chain(1, 2, 2, 2), 2) == [3, 4]


def test_a_graph_without_products_is_balanced_by_bytes() -> None:
    w = Writer()
    x = w.root("x", Kind.INPUT)
    for _ in range(6):
        x = w.add("cos", x)
    assert find_layers(w.graph(), 3) == ((0, 2), (2, 4), (4, 6))


def test_more_layers_than_places() -> None:
    assert len(find_layers(chain(1, 2), 50)) == 4
    assert len(equal_operators(chain(1, 2), 50)) == 4
    assert find_layers(chain(1), 1) == equal_operators(chain(1), 1) == ((0, 2),)


# -- where boundaries may be ----------------------------------------------------------------------------------------------------------------


def line(*operators: str) -> Writer:
    w = Writer()
    x = w.root("x", Kind.INPUT)
    for op in operators:
        x = w.add(op, x)
    return w


def test_checkpoints_stay_whole() -> None:
    graph = line(*["cos"] * 8).graph(regions=[Region("checkpoint", 2, 5), Region("no_grad", 5, 8)])
    assert allowed_places(graph) == (1, 2, 5, 6, 7)
    for number in range(1, 7):
        assert not {3, 4} & {a for a, _ in (*find_layers(graph, number), *equal_operators(graph, number))}


def test_users_of_a_written_buffer_stay_together() -> None:
    w = line("cos", "cos")
    w.root("mean", Kind.BUFFER, mutated=True)
    w.root("count", Kind.BUFFER)
    w.root("table", Kind.BUFFER)  # only read
    h = w.add("norm", "v1", "mean")
    h = w.add("norm", w.add("cos", h), "mean")  # nodes 2 and 4
    old = w.add("add", h, "count")
    new = w.add("add", w.add("cos", "v1"), "count")  # nodes 5 and 7
    w.add("cos", w.add("add", old, "table"))
    w.add("add", "v9", "table")
    assert allowed_places(w.graph(buffers=[(new, "count")])) == (1, 2, 5, 8, 9, 10)


def test_a_cast_stays_with_the_view_it_reads() -> None:
    w = line("cos", "cos")
    view = w.add("t", w.root("weight"))
    h = w.add("cos", "v1")
    w.add("cos", w.add("mm", h, view, casts=(view,)))
    assert allowed_places(w.graph()) == (1, 2, 5)


def test_what_needs_no_input_goes_with_its_first_consumer() -> None:
    w = line("cos", "cos")
    wide = w.add("repeat", w.add("t", w.root("weight")))  # nodes 2 and 3, used by 5
    late = w.add("t", w.root("other"))  # node 4, used at the end
    h = w.add("mm", "v1", wide)
    h = w.add("mm", w.add("cos", h), late)
    graph = w.graph()
    assert allowed_places(graph) == (1, 2, 3, 4, 5, 6, 7)
    assert settled_places(graph) == (1, 2, 6, 7)
    assert by_boundaries(graph, [5]) == ((0, 2), (2, 8))
    held = replace(graph, regions=(Region("checkpoint", 1, 4),))
    assert by_boundaries(held, [5]) == ((0, 4), (4, 8))


def test_marks_inside_of_what_stays_together_are_refused() -> None:
    graph = line(*["cos"] * 8).graph(regions=[Region("checkpoint", 2, 5)], boundaries=(2, 4))
    with pytest.raises(HapError, match=r"model.py:4: a boundary of layers lies inside"):
        find_layers(graph)
    with pytest.raises(HapError, match="before node 8; allowed: 1 to 7"):
        by_boundaries(graph, [8])
    assert by_boundaries(graph, [5, 2]) == ((0, 2), (2, 5), (5, 8))
    assert len(find_layers(graph, 3)) == 3  # a number that is asked for counts


def test_bad_arguments() -> None:
    with pytest.raises(HapError, match="0 layers; allowed: at least 1"):
        find_layers(chain(1, 1), 0)
    with pytest.raises(HapError, match="0 layers; allowed: at least 1"):
        equal_operators(chain(1, 1), 0)
    with pytest.raises(HapError, match="more FLOPs than the mean"):
        find_layers(chain(1, 1), 2, -0.5)


# -- models ---------------------------------------------------------------------------------------------------------------------------------


def modules(graph: Graph, layers: Layers) -> list[set[str]]:
    """The top-level modules that each layer computes."""
    return [{".".join(graph.nodes[i].module.split(".")[:2]) for i in range(a, b)} - {""} for a, b in layers]


def test_the_layers_of_gpt_are_its_blocks() -> None:
    model = GPT(499, 8, 2, 6, 6)
    graph = capture(model, model.example(3))
    layers = find_layers(graph)
    assert cover(graph, layers)
    found = modules(graph, layers)
    assert found[1:-1] == [{f"blocks.{i}"} for i in range(1, 6)]
    assert found[0] & {f"blocks.{i}" for i in range(6)} == {"blocks.0"}
    assert not any(m.startswith("blocks") for m in found[-1])
    costs = layer_costs(graph, layers)
    assert len({c.flops for c in costs[:-1]}) == 1
    assert {c.received for c in costs[1:]} == {3 * 6 * 8 * 8}
    assert [len(m) for m in modules(graph, find_layers(graph, 4))[:3]] == [4, 2, 2]


def test_blocks_are_cut_where_there_are_more_layers_than_blocks() -> None:
    model = GPT(11, 8, 2, 2, 6)
    graph = capture(model, model.example(3))
    layers = find_layers(graph, 4)
    assert [c.flops > 0 for c in layer_costs(graph, layers)] == [True] * 4
    assert any("blocks.0" in a & b for a, b in pairwise(modules(graph, layers)))


def test_skips_are_received_once_and_by_those_who_use_them() -> None:
    model = UNet()
    graph = capture(model, model.example(2))
    layers = find_layers(graph, 5)
    assert cover(graph, layers)
    sent = Counter(n for a, b in layers for n in {n for node in graph.nodes[a:b] for n in node.call.refs() if graph.producer.get(n, a) < a})
    over = [n for n in sent if next(k for k, (a, b) in enumerate(layers) if graph.consumers[n][-1] < b) - layer_of(layers, graph.producer[n]) > 1]
    assert over  # a skip passes a layer that does not use it
    total = sum(graph.refs[n].bytes * times for n, times in sent.items() if graph.refs[n].kind is not Kind.CONSTANT)
    assert sum(c.received for c in layer_costs(graph, layers)) == total


def layer_of(layers: Layers, node: int) -> int:
    return next(k for k, (a, b) in enumerate(layers) if a <= node < b)


class Marked(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
            hapx.mark_layer_boundary()
        return x.square().mean()


def test_marks_of_a_model_are_its_layers() -> None:
    model = Marked(nn.Linear(4, 64), nn.Sequential(nn.Linear(64, 4), nn.ReLU()), nn.Linear(4, 4)).double()
    graph = capture(model, torch.ones(2, 4, dtype=torch.float64))
    assert find_layers(graph) == ((0, 1), (1, 3), (3, 4), (4, 6))
    assert len(find_layers(graph, 2)) == 2


# -- how many, how fast -----------------------------------------------------------------------------------------------------------------------


def deep(blocks: int, head: int = 0, width: int = 2) -> Graph:
    """Blocks of 2 * width products and a residual, and a head as heavy as `head` of them."""
    w = Writer()
    x = w.root("x", Kind.INPUT)
    w.root("w")
    for _ in range(blocks):
        h = x
        for _ in range(2 * width):
            h = w.add("relu", w.add("mm", h, "w"))
        x = w.add("add", x, h)
    if head:
        x = w.add("mm", x, "w", size=4 * 2 * width * head)
    graph = (w.add("mean", x), w.graph())[1]
    return replace(graph, block_of=find_blocks(graph.nodes, graph.refs))


@pytest.mark.parametrize(
    "blocks, head, number",
    [(4, 0, 4), (4, 3, 5), (12, 1, 13), (MOST_LAYERS - 1, 1, MOST_LAYERS), (MOST_LAYERS, 1, MOST_LAYERS // 2), (48, 0, 24), (100, 0, 25)],
)
def test_how_many_layers_a_model_has(blocks: int, head: int, number: int) -> None:
    graph = deep(blocks, head)
    assert natural_number(graph, node_flops(graph)) == len(find_layers(graph)) == number


def test_without_blocks_the_heaviest_node_is_the_measure() -> None:
    for graph, number in ((chain(1, 2, 3, 4, 8), 2), (line("cos").graph(), 1)):
        assert natural_number(graph, node_flops(graph)) == number


@pytest.mark.parametrize("repeated", [True, False])
def test_large_graphs(repeated: bool) -> None:
    graph = deep(100, 1, width=12)
    graph = graph if repeated else replace(graph, block_of=(None,) * len(graph.nodes))
    assert len(graph.nodes) > 4900
    layers = find_layers(graph, 32)
    assert cover(graph, layers) and len(layers) == 32
    costs = layer_costs(graph, layers)
    assert {c.received for c in costs[1:]} == {16}  # nothing but the residual
    assert max(c.flops for c in costs) <= 1.6 * sum(c.flops for c in costs) / 32


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_layers(seed: int) -> None:
    """Every layer begins a part, no layer has more parts than wanted, and at most so many times as much crosses inside as at its ends."""
    graph = random_graph(seed, 24)
    layers = find_layers(graph, 4)
    crossing = crossing_bytes(graph)
    for parts in (1, 2, 4):
        found = finer(graph, layers, parts)
        assert cover(graph, found)
        starts = {a for a, _ in found}
        assert {a for a, _ in layers} <= starts
        for a, b in layers:
            inside = [p for p in starts if a < p < b]
            ends = [crossing[p] for p in (a, b) if 0 < p < len(graph.nodes)]
            assert len(inside) < parts
            assert all(crossing[p] <= MORE_CROSSES * max(ends) and p in settled_places(graph) for p in inside)
            assert all(flops(graph, x, y) > 0 for x, y in pairwise([a, *sorted(inside), b]) if inside)


def test_blocks_of_a_gpt_are_cut_in_halves_and_marked_layers_are_not() -> None:
    model = GPT(vocab=13, width=32, heads=4, layers=3, context=16)
    graph = capture(model, model.example(4))
    layers = find_layers(graph)
    found = finer(graph, layers, 4)
    assert len(found) > len(layers)
    marked = replace(graph, boundaries=tuple(a for a, _ in layers[1:]))
    assert finer(marked, layers, 4) == layers
