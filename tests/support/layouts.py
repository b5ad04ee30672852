"""Random layouts for property tests, and what they mean, element by element.

Meshes of one to three axes on any devices, whole and cut axes, blocks, grains, several axes in one dim (the same factor, in both nest orders, or
different ones), uneven and zero lengths, empty dims.
"""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import strategies as st

from hapx.layout import compatible, local_indices
from hapx.pieces import Layout
from hapx.plan import Axis, Mesh
from hapx.states import INVARIANT, Cut, Placement, Row, Sharded

MESHES = [s for n in (1, 2, 3) for s in product(range(1, 7), repeat=n) if prod(s) <= 6]
SIZES = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)


def mesh_of(sizes: tuple[int, ...], devices: tuple[int, ...]) -> Mesh:
    return Mesh("x".join(map(str, sizes)), tuple(Axis(f"axis{a}", n, "devices") for a, n in enumerate(sizes)), devices, 0)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.sampled_from(SIZES), max_size=3)))


@st.composite
def meshes(draw: st.DrawFn, num_devices: int = 8, disjoint_from: tuple[int, ...] = ()) -> Mesh:
    """A mesh of some of `num_devices` devices."""
    free = [d for d in range(num_devices) if d not in disjoint_from]
    sizes = draw(st.sampled_from([s for s in MESHES if prod(s) <= len(free)]))
    return mesh_of(sizes, tuple(draw(st.permutations(free))[: prod(sizes)]))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], mesh: Mesh) -> Layout:
    """A layout on a mesh."""
    sizes = mesh.sizes
    states: list = []
    for axis in range(len(sizes)):
        choices = [INVARIANT, *(s for s in splits(shape, axis) if compatible([*states, s]))]
        again = [Sharded(s.dim, s.outer, s.inner, Cut(Row("compute", 0, axis), s.cut.units)) for s in states if isinstance(s, Sharded)]
        states.append(draw(st.sampled_from(again + choices[: len(again)] if again and draw(st.booleans()) else choices)))
    nest = tuple(draw(st.permutations(range(len(sizes))))) if draw(st.booleans()) else ()
    lengths = {s.cut: draw(parts(s.cut.units, n)) for s, n in zip(states, sizes, strict=True) if isinstance(s, Sharded)}
    return Layout(mesh, Placement(tuple(states), nest), lengths)


def splits(shape: tuple[int, ...], axis: int) -> list[Sharded]:
    """Every way to cut a dim."""
    result = []
    for dim, size in enumerate(shape):
        if not size:
            result.append(Sharded(dim, 1, 1, Cut(Row("compute", 0, axis), 0)))
        for outer in (o for o in range(1, size + 1) if size % o == 0):
            for units in (u for u in range(1, size // outer + 1) if size // outer % u == 0):
                kind = "even" if units % 2 else "compute"
                result.append(Sharded(dim, outer, size // outer // units, Cut(Row(kind, 0, axis), units)))
    return result


@st.composite
def parts(draw: st.DrawFn, units: int, count: int) -> tuple[int, ...]:
    """`units` dealt out at random, some may get nothing."""
    borders = sorted(draw(st.lists(st.integers(0, units), min_size=count - 1, max_size=count - 1)))
    return tuple(b - a for a, b in zip([0, *borders], [*borders, units], strict=True))


def local_array(whole: np.ndarray, layout: Layout, device: int) -> np.ndarray:
    """The elements of a device."""
    at = layout.mesh.coordinates(device)
    result = whole
    for dim, size in enumerate(whole.shape):
        result = np.take(result, local_indices(size, dim, layout.placement, layout.mesh.sizes, layout.lengths, at), dim)
    return result
