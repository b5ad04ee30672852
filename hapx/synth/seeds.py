"""Where a search begins: the plain programs that people write by hand, one for every way to use the axes.

In: a problem. Out: for each assignment of "batch" or "model" to the mesh axes, which choices of every step class are in its spirit: what they split
along an axis is the batch, or is not. A search that starts from the best program of each is never worse than data parallelism or tensor
parallelism, or one of them inside of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import numpy.typing as npt

from hapx.plan import Triple
from hapx.states import Sharded
from hapx.synth.problem import Problem

Mask = npt.NDArray[np.bool_]


def seeds(problem: Problem) -> list[Mapping[int, Mask]]:
    """By id of a step class, the choices that belong to a seed, found once. None where the restriction says what is split."""
    if problem.seeds is None:
        problem.seeds = _seeds(problem)
    return problem.seeds


def _seeds(problem: Problem) -> list[Mapping[int, Mask]]:
    if problem.restriction.split != "auto":
        return []
    axes = len(problem.theory.mesh.axes)
    found: list[dict[int, Mask]] = [{} for _ in range(2**axes)]
    for k in range(problem.num_nodes):
        kind = problem.steps[k].kind
        if id(kind) in found[0]:
            continue
        split = [_split(problem, triple) for triple in problem.triples[k]]
        for seed, wanted in zip(found, product((True, False), repeat=axes), strict=True):
            fitting = np.array([all(is_batch == wanted[axis] for axis, is_batch in s) for s in split])
            most = max((len({a for a, _ in s}) for s, fits in zip(split, fitting, strict=True) if fits), default=0)
            seed[id(kind)] = fitting & np.array([len({a for a, _ in s}) == most for s in split])
    return list(found)


def _split(problem: Problem, triple: Triple) -> frozenset[tuple[int, bool]]:
    """(axis, whether it is the batch) of everything that a triple splits."""
    batch = problem.theory.batch
    return frozenset(
        (axis, (p.tensor, s) in batch) for p in (*triple.pre, *triple.post) for axis, s in enumerate(p.placement.states) if isinstance(s, Sharded)
    )
