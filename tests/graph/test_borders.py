"""Where models fall apart into segments, and how segments follow to other graphs of a model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import networkx as nx
import pytest
import torch

from benchmarks.random_graphs import random_graph
from hapx.errors import HapError
from hapx.graph.borders import candidate_segments, carried, crossing_bytes, find_segments, is_coarser, numbered
from hapx.graph.capture import capture
from hapx.ir import Graph, Kind
from support.models import CNN, GPT, MLP


@cache
def gpt(training: bool = True, batch: int = 4) -> Graph:
    model = GPT(vocab=13, width=8, heads=2, layers=4, context=6, dropout=0.1)
    return capture(model, model.example(batch), training=training)


def borders(segments: tuple[int, ...]) -> list[int]:
    return [i + 1 for i, (a, b) in enumerate(pairwise(segments)) if a != b]


def test_a_transformer_is_stem_blocks_and_head() -> None:
    graph = gpt()
    found = find_segments(graph, 16)
    modules = [{n.module.split(".")[0] for n, s in zip(graph.nodes, found, strict=True) if s == k} for k in range(max(found) + 1)]
    (inside,) = [m for m in modules if "blocks" in m and len([n for n, s in zip(graph.nodes, found, strict=True) if s == modules.index(m)]) > 20]
    assert "norm" not in inside and any("tok" in m for m in modules[: modules.index(inside)])
    assert any("head" in m for m in modules[modules.index(inside) + 1 :])
    assert all(graph.block_of[p - 1] is None or graph.block_of[p] is None or graph.block_of[p - 1][0] != graph.block_of[p][0] for p in borders(found))


@pytest.mark.parametrize("seed", range(8))
def test_crossing_bytes_are_those_of_the_values_in_between(seed: int) -> None:
    graph = random_graph(seed, operators=12)
    found = crossing_bytes(graph)
    for p in range(len(graph.nodes) + 1):
        made = {o.name for n in graph.nodes[:p] for o in n.outputs}
        used = {name for n in graph.nodes[p:] for name in n.call.refs()}
        assert found[p] == sum(graph.refs[name].bytes for name in made & used)


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_between_the_ends_of_a_chain_is_smaller_than_the_first_border(seed: int) -> None:
    """networkx finds the least bytes that part the first from the last node that reads a parameter; the best border is among those of a chain."""
    rng = Random(seed)
    model = MLP([rng.choice((3, 5, 8, 13)) for _ in range(6)])
    graph = capture(model, model.example(6))
    readers = [i for i, n in enumerate(graph.nodes) if any(graph.refs[r].kind is Kind.PARAMETER for r in n.call.refs())]
    flow = nx.DiGraph()
    for name, made in graph.producer.items():
        flow.add_edge(("out", made), ("value", name), capacity=graph.refs[name].bytes)
        for user in graph.consumers[name]:
            flow.add_edge(("value", name), ("out", user))  # without capacity: unbounded
    least, _ = nx.minimum_cut(flow, ("out", readers[0]), ("out", readers[-1]))
    (border,) = borders(find_segments(graph, 2))
    assert crossing_bytes(graph)[border] == least


@pytest.mark.parametrize("most", [1, 2, 3, 5, 16])
def test_parts_are_consecutive_few_and_read_parameters(most: int) -> None:
    model = CNN()
    graph = capture(model, model.example(4))
    found = find_segments(graph, most)
    assert list(found) == sorted(found) and set(found) == set(range(max(found) + 1)) and len(set(found)) <= most
    for k in set(found):
        nodes = [n for n, s in zip(graph.nodes, found, strict=True) if s == k]
        assert any(graph.refs[r].kind is Kind.PARAMETER for n in nodes for r in n.call.refs())


def test_what_the_user_names() -> None:
    graph = gpt()
    assert candidate_segments(graph, "none") == candidate_segments(graph, 1) == (0,) * len(graph.nodes)
    assert candidate_segments(graph, "auto") == candidate_segments(graph, 3) == find_segments(graph, 16)
    named = candidate_segments(graph, ("blocks", "blocks.1", "norm"))
    by_module = {n.module: s for n, s in zip(graph.nodes, named, strict=True)}
    assert by_module["blocks.1.norm1"] != by_module["blocks.0.norm1"] == by_module["blocks.3.norm1"] != by_module["norm"]
    assert named == numbered(named)
    with pytest.raises(HapError, match=r"no operator is in a module 'block'.*allowed.*blocks"):
        candidate_segments(graph, ("block",))


def test_coarser() -> None:
    parts = (0, 0, 1, 2, 2)
    assert is_coarser((0, 0, 1, 1, 1), parts) and is_coarser(parts, parts) and is_coarser((0,) * 5, parts)
    assert not is_coarser((0, 1, 1, 1, 1), parts) and not is_coarser((1, 1, 0, 0, 0), parts) and not is_coarser((0, 0, 1, 1), parts)


def test_segments_follow_to_other_graphs() -> None:
    first = gpt()
    first = replace(first, segment_of=find_segments(first, 4))
    assert carried(first, gpt(batch=7)) == first.segment_of
    evaluation = gpt(training=False)
    assert len(evaluation.nodes) < len(first.nodes)
    assert carried(replace(first, segment_of=(0,) * len(first.nodes)), evaluation) == (0,) * len(evaluation.nodes)
    moved = replace(evaluation, segment_of=carried(first, evaluation))
    shared = [n for n in first.refs if first.refs[n].kind is Kind.PARAMETER]
    assert all(set(moved.segments_of[n]) <= set(first.segments_of[n]) for n in shared)
    assert list(moved.segment_of) == sorted(moved.segment_of) and set(moved.segment_of) == set(first.segment_of)


def test_tensors_know_their_segments() -> None:
    graph = gpt()
    graph = replace(graph, segment_of=find_segments(graph, 3))
    assert graph.segments == 3
    assert len(graph.segments_of["tok.weight"]) == 2  # the embedding and the tied head
    crossing = [n for n, own in graph.segments_of.items() if graph.refs[n].kind is Kind.VALUE and len(own) > 1]
    assert crossing and all(n in graph.producer for n in crossing)
    assert torch.tensor(graph.segment_of).diff().ge(0).all()
