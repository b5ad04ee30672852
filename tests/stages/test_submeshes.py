"""Submeshes, their shapes, and the space of ways to deal a cluster's devices out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapx.cluster.spec import ClusterSpec
from hapx.stages import exhaustive
from hapx.stages.space import Move, Space, space
from hapx.stages.submeshes import ordered, shape_of, slices, submeshes
from support.stage_prices import cluster_of, random_cluster

SPECS = sorted((Path(__file__).parents[2] / "cluster_specs").glob("*.yaml"))


def test_submeshes_of_a_desk_with_two_cards() -> None:
    desk = ClusterSpec.load(next(p for p in SPECS if p.stem == "rtx4090_rtx3060"))
    assert list(submeshes(desk)) == [(0,), (1,), (0, 1)]
    assert [str(shape_of(desk, s)) for s in submeshes(desk)] == ["1 RTX-4090", "1 RTX-3060", "1 RTX-4090 + 1 RTX-3060"]
    assert _sequences(space(desk)) == {("1 RTX-4090", "1 RTX-3060"), ("1 RTX-3060", "1 RTX-4090"), ("1 RTX-4090 + 1 RTX-3060",)}
    assert _sequences(space(desk, idle=True)) == _sequences(space(desk)) | {("1 RTX-4090",), ("1 RTX-3060",)}


def test_machines_of_one_device() -> None:
    assert _sequences(space(cluster_of(["fast"], ["fast"], ["slow"]))) >= {
        ("1 fast", "1 fast", "1 slow"), ("1 slow", "1 fast", "1 fast"), ("1 fast", "1 slow", "1 fast"), ("1 fast", "1 fast, 1 slow"),
        ("2 x (1 fast), 1 slow",),
    }  # fmt: skip


def test_shapes_are_what_costs_can_tell_apart() -> None:
    cluster = cluster_of(["slow", "fast", "slow", "fast"], ["slow", "fast"], intra=(1e10, 2e10))
    assert shape_of(cluster, (0, 1)) == shape_of(cluster, (2, 3)) != shape_of(cluster, (4, 5))  # another link
    assert shape_of(cluster, (0,)) == shape_of(cluster, (4,)) != shape_of(cluster, (1,))  # one device uses no link
    assert ordered(cluster, (0, 1, 2, 3)) == (0, 2, 1, 3)
    spec = shape_of(cluster, range(6)).spec(cluster)
    assert (
        [d.type for d in spec.devices]
        == ["slow", "slow", "fast", "fast", "slow", "fast"]
        == [cluster.devices[d].type for d in ordered(cluster, range(6))]
    )
    assert spec.machines[1].intra == cluster.machines[1].intra and spec.inter == cluster.inter
    assert ClusterSpec.load(spec.to_dict()) == spec


@given(st.integers(0, 10_000), st.booleans())
def test_the_space_has_every_sequence_of_submeshes(seed: int, idle: bool) -> None:
    """States are fewer than sets of devices, and still allow the same: shapes, and links between neighbours."""
    cluster = random_cluster(seed)
    dealt = space(cluster, idle)
    expected = {(shapes, links) for shapes, links, _ in exhaustive.sequences(cluster, cluster.num_devices, idle)}
    found = set()
    for path in _paths(dealt):
        states = [dealt.start, *(m.target for m in path)]
        links = [dealt.kinds_of_link[dealt.links[s]] for s in states[1:-1]]
        found.add((tuple(dealt.shapes[m.shape] for m in reversed(path)), tuple(reversed(links))))
    assert found == expected


@given(st.integers(0, 10_000), st.booleans(), st.randoms(use_true_random=False))
def test_every_path_can_be_laid_on_devices(seed: int, idle: bool, random) -> None:
    cluster = random_cluster(seed, most=9)
    _check_laid(cluster, space(cluster, idle), idle, random)


@pytest.mark.parametrize("file", SPECS, ids=lambda p: p.stem)
@given(random=st.randoms(use_true_random=False))
def test_clusters_of_the_repository_pack(file: Path, random) -> None:
    cluster = ClusterSpec.load(file)
    _check_laid(cluster, space(cluster), False, random)


def test_alpa_s_cluster() -> None:
    """8 machines of 8 equal devices: Alpa's submeshes, and as many states as devices can be left."""
    dealt = space(cluster_of(*[["fast"] * 8] * 8))
    assert [str(s) for s in dealt.shapes].count("8 fast") == 1
    assert sorted(s.num_devices for s in dealt.shapes) == [1, 2, 4, *range(8, 65, 8)]
    assert len(dealt.states) == 65


def test_a_machine_of_six() -> None:
    assert {s for s in _sequences(space(cluster_of(["fast"] * 6))) if len(s) < 3} == {("6 fast",), ("4 fast", "2 fast"), ("2 fast", "4 fast")}


@pytest.mark.parametrize("machines, most", [([["fast"] * 8] * 128, 30), ([["fast"] * 4] * 40 + [["slow"] * 4] * 40, 400)])
def test_large_clusters_have_few_shapes_and_still_pack(machines: list[list[str]], most: int) -> None:
    cluster = cluster_of(*machines)
    dealt = space(cluster)
    assert len(dealt.shapes) <= most
    assert all(dealt.moves[s] or dealt.ends[s] for s in range(len(dealt.states)))
    assert any(shape.num_devices == cluster.num_devices for shape in dealt.shapes)
    path, state = [], dealt.start
    while not dealt.ends[state]:
        path.append(dealt.moves[state][len(path) * 7 % len(dealt.moves[state])])
        state = path[-1].target
    assert sorted(d for s in dealt.lay(path) for d in s) == list(range(cluster.num_devices))


def test_orders_of_large_clusters_mix_types_both_ways() -> None:
    cluster = cluster_of(*[["fast"]] * 40, *[["slow"]] * 40, *[["medium"]] * 40)
    dealt = space(cluster)
    mixes = {frozenset(s.types) for s in dealt.shapes}
    assert {frozenset(m) for m in (["fast", "slow"], ["slow", "medium"], ["fast", "medium"], ["fast", "slow", "medium"])} <= mixes


def _check_laid(cluster: ClusterSpec, dealt: Space, idle: bool, random) -> None:
    path: list[Move] = []
    state = dealt.start
    while not dealt.ends[state] or not path or (idle and dealt.moves[state] and random.random() < 0.7):
        assert dealt.moves[state]  # no dead end
        path.append(random.choice(dealt.moves[state]))
        assert path[-1].target < state
        state = path[-1].target
    laid = dealt.lay(path)
    used = [d for s in laid for d in s]
    assert len(set(used)) == len(used) and (idle or len(used) == cluster.num_devices)
    small = {frozenset(s) for s in slices(cluster)}
    for submesh, move in zip(laid, path, strict=True):
        assert shape_of(cluster, submesh) == dealt.shapes[move.shape]
        assert tuple(cluster.devices[d].type for d in submesh) == dealt.shapes[move.shape].types
        machines = {cluster.devices[d].machine for d in submesh}
        whole = sum(len(cluster.machines[m].devices) for m in machines) == len(submesh)
        assert frozenset(submesh) in small or whole
    for (back, front), move in zip(pairwise(laid), path, strict=False):
        assert dealt.kinds_of_link[dealt.links[move.target]] == cluster.link((*back, *front))


def _paths(dealt: Space) -> list[tuple[Move, ...]]:
    def walk(state: int, before: tuple[Move, ...]) -> Iterator[tuple[Move, ...]]:
        if before and dealt.ends[state]:
            yield before
        for move in dealt.moves[state]:
            yield from walk(move.target, (*before, move))

    return list(walk(dealt.start, ()))


def _sequences(dealt: Space) -> set[tuple[str, ...]]:
    """Shapes from the front."""
    return {tuple(str(dealt.shapes[m.shape]) for m in reversed(path)) for path in _paths(dealt)}
