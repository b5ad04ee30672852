"""What the memory model says that small operators keep for backward is what autograd keeps of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import hapx.theory.ops  # noqa: F401  (fills the registry)
from hapx.cost.compute import hidden
from hapx.cost.memory import saved
from hapx.cost.saves import KEPT_INSIDE, SAVES_OF_SMALL
from hapx.plan import Axis, Mesh
from hapx.theory.probe import _call, truth
from hapx.theory.registry import REGISTRY
from hapx.theory.samples import Sample
from hapx.theory.samples.indexing import advanced, indexing
from hapx.theory.samples.losses import class_losses, row_by_row
from hapx.theory.samples.pointwise import arithmetic, binary, casts, pointwise, several, with_numbers
from hapx.theory.samples.scans import diagonals, repeats, scans
from hapx.theory.samples.statistics import statistics, vectors
from hapx.theory.settings import Dealt, Setting

ALONE = Setting(Mesh("alone", (Axis("d", 1, "devices"),), (0,), 0), Dealt(1, None, 1))
FAMILIES = (
    pointwise, with_numbers, arithmetic, binary, several, casts, class_losses, row_by_row, indexing, advanced, scans, repeats, diagonals,
    statistics, vectors,
)  # fmt: skip
# what they keep depends on constants (the logarithm of a target, rounding); the model takes the larger
OTHERWISE = {"aten.kl_div", "aten.div", "aten.take_along_dim"}


def kept_by_autograd(sample: Sample) -> tuple[set[str], int]:
    """(operands and outputs that are kept, bytes of other storages that are)."""
    case, kept = truth(sample), []

    def note(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    leaves = [x.clone().requires_grad_(r.requires_grad) for x, r in zip(case.operands, case.refs, strict=True)]
    with saved_tensors_hooks(note, lambda t: t), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = _call(case.node.call, leaves, ALONE, (0,), {})
    names = {storage(x): r.name for x, r in zip(leaves, case.refs, strict=True)}
    for x, r in zip(outputs, case.node.outputs, strict=True):
        names.setdefault(storage(x), r.name)
    others = {storage(t): t.untyped_storage().nbytes() for t in kept if storage(t) not in names}
    return {names[storage(t)] for t in kept if storage(t) in names}, sum(others.values())


def storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_kept_tensors_are_those_of_autograd(family: Callable[[], Iterator[Sample]]) -> None:
    found = [s for s in family() if s.call.op not in OTHERWISE and any(o.requires_grad for o in truth(s).node.outputs)]
    assert found
    for s in found:
        case = truth(s)
        names, extra = kept_by_autograd(s)
        assert set(saved(case.node, case.graph)) == names, s
        if s.call.op in KEPT_INSIDE and len({r.shape for r in case.refs}) == 1:
            assert sum(size for _, size in hidden(case.graph, case.node)) == pytest.approx(extra, rel=0.25), s


def test_every_operator_of_the_table_is_registered() -> None:
    operators = {t if t.count(".") == 1 else t.rsplit(".", 1)[0] for t in REGISTRY}
    for name in (*SAVES_OF_SMALL, *KEPT_INSIDE):
        assert name in REGISTRY or (name if name.count(".") == 1 else name.rsplit(".", 1)[0]) in operators, name
