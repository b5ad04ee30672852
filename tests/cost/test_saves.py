"""What the memory model says that small operators keep for backward is what autograd keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import hapx.theory.ops  # noqa: F401  (fills the registry)
from hapx.cost.compute import hidden
from hapx.cost.memory import saved
from hapx.cost.saves import KEPT_INSIDE, SAVES_OF_SMALL
from hapx.cost.transforms import SPECTRAL
from hapx.theory.probe import truth
from hapx.theory.registry import REGISTRY
from hapx.theory.samples import Sample
from hapx.theory.samples.complex_numbers import complex_numbers, transforms
from hapx.theory.samples.indexing import advanced, indexing
from hapx.theory.samples.losses import class_losses, row_by_row
from hapx.theory.samples.matrices import matrices, solutions
from hapx.theory.samples.pointwise import arithmetic, binary, casts, pointwise, several, with_numbers
from hapx.theory.samples.scans import diagonals, repeats, scans
from hapx.theory.samples.statistics import statistics, vectors
from support.saved import kept_by_autograd

FAMILIES = (
    pointwise, with_numbers, arithmetic, binary, several, casts, class_losses, row_by_row, indexing, advanced, scans, repeats, diagonals,
    statistics, vectors, complex_numbers, transforms, matrices, solutions,
)  # fmt: skip
# what they keep depends on constants (the logarithm of a target, rounding); the model takes the larger
OTHERWISE = {"aten.kl_div", "aten.div", "aten.take_along_dim", "aten.linalg_svd"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_kept_tensors_are_those_of_autograd(family: Callable[[], Iterator[Sample]]) -> None:
    found = [s for s in family() if s.call.op not in OTHERWISE and any(o.requires_grad for o in truth(s).node.outputs)]
    assert found
    for s in found:
        case = truth(s)
        names, extra = kept_by_autograd(s)
        assert set(saved(case.node, case.graph)) == names, s
        if s.call.op in SPECTRAL:
            assert sum(size for _, size in hidden(case.graph, case.node)) == extra, s
        if s.call.op in KEPT_INSIDE and len({r.shape for r in case.refs}) == 1:
            assert sum(size for _, size in hidden(case.graph, case.node)) == pytest.approx(extra, rel=0.25), s


def test_every_operator_of_the_table_is_registered() -> None:
    operators = {t if t.count(".") == 1 else t.rsplit(".", 1)[0] for t in REGISTRY}
    for name in (*SAVES_OF_SMALL, *KEPT_INSIDE):
        assert name in REGISTRY or (name if name.count(".") == 1 else name.rsplit(".", 1)[0]) in operators, name
