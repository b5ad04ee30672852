"""Copies around communications: by hand, on a device of 1 GB/s whose kernels take 1 ms to start."""

from __future__ import annotations

import numpy as np
import pytest

from hapx.cost.copies import NO_COPIES, copies
from hapx.cost.model import CostModel
from hapx.ir import Kind, TensorRef
from hapx.plan import Communication, Form, Mesh
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Placement, Row, Sharded, State
from support.theories import cluster, described, device_type, flat, mlp, two_level

GB, LAUNCH = 1e9, 1e-3


def model(*speeds: float, mesh: Mesh | None = None, mode: str = "train") -> CostModel:
    types = [device_type(str(s), s, bandwidth=GB, latency=LAUNCH) for s in dict.fromkeys(speeds)]
    spec = cluster([tuple(map(str, speeds))], types)
    return CostModel(described(mlp(), mesh or flat(len(speeds))), spec, "fp32", "adamw", mode)  # type: ignore[arg-type]


def tensor(kind: Kind = Kind.VALUE) -> TensorRef:
    return TensorRef("t", (1000, 250), "float32", kind, True)  # 1 MB: 1 ms per pass


def compute(costs: CostModel, ref: TensorRef, source: State, target: State, form: Form = Form.NONE, share: float = 0.25) -> tuple[float, ...]:
    """Milliseconds forward and backward on the first kind."""
    cost = costs.conversion(ref, (Communication(0, source, target, form, True),), Placement((target,) + (INVARIANT,) * (len(costs.links) - 1)))
    shares = {s.cut: np.full(len(costs.kinds), share) for s in (source, target) if isinstance(s, Sharded)}
    return tuple(1e3 * float(t.at(shares)[0]) if t is not None else 0.0 for t in (cost.forward, cost.backward))


def cut(costs: CostModel, dim: int = 0) -> Sharded:
    return Sharded(dim, 1, 1, Cut(costs.theory.mesh.row(0), 250))


def test_a_sum_is_of_a_clone() -> None:
    assert compute(model(1e12, 1e12), tensor(), PARTIAL, INVARIANT) == pytest.approx((3.0, 0.0))
    assert compute(model(1e12, 1e12), tensor(), PARTIAL, REPLICATED) == pytest.approx((3.0, 3.0))
    assert compute(model(1e12, 1e12, mode="eval"), tensor(), PARTIAL, REPLICATED) == pytest.approx((3.0, 0.0))


def test_equal_pieces_lie_where_they_belong_and_unequal_ones_are_put_together() -> None:
    equal, unequal = model(1e12, 1e12), model(1e12, 2e12)
    assert compute(equal, tensor(), cut(equal), INVARIANT, Form.PADDED) == pytest.approx((0.0, 1.5))  # back: a slice
    assert compute(unequal, tensor(), cut(unequal), INVARIANT, Form.PADDED) == pytest.approx((3.0, 1.5))
    assert compute(unequal, tensor(), cut(unequal), INVARIANT, Form.GROUPED) == pytest.approx((1.5, 1.5))


def test_at_concrete_lengths_each_cut_has_its_own() -> None:
    """Whatever another cut does: devices are of several kinds because of it, but the pieces of this one are of one length, or are not."""
    unlike, even = model(1e12, 2e12, 1e12, 2e12), model(1e12, 1e12, 1e12, 1e12)
    other = Cut(even.theory.mesh.row(0), 10)
    for costs in (unlike, even):
        equal = costs.at_lengths({cut(costs).cut: (25, 25, 25, 25), other: (3, 3, 2, 2)})
        unequal = costs.at_lengths({cut(costs).cut: (30, 30, 20, 20), other: (3, 3, 2, 2)})
        assert len(equal.kinds) > 1
        assert compute(equal, tensor(), cut(costs), INVARIANT, Form.PADDED)[0] == 0.0
        assert compute(unequal, tensor(), cut(costs), INVARIANT, Form.PADDED)[0] == pytest.approx(3.0)


def test_pieces_of_inner_dims_are_put_in_order() -> None:
    equal = model(1e12, 1e12)
    assert compute(equal, tensor(), cut(equal, 1), INVARIANT, Form.PADDED) == pytest.approx((0.5 + 2.0 + 2.0, 1.5))


def test_what_is_cut_again_lies_in_the_order_of_the_devices() -> None:
    unlike = model(1e12, 2e12)

    def again(dim: int) -> tuple[Sharded, Sharded]:
        return Sharded(dim, 1, 1, Cut(Row("compute", 0, 0), 250)), Sharded(dim, 1, 1, Cut(Row("compute", 1, 0), 250))

    assert compute(unlike, tensor(), *again(0)) == (0.0, 0.0)
    assert compute(unlike, tensor(), *again(1)) == pytest.approx((1.0 + 2.0, 1.0 + 2.0)), "units of inner dims go to the front and back again"
    exchanged = compute(unlike, tensor(), cut(unlike, 0), cut(unlike, 1))
    assert exchanged == pytest.approx((1.5 + 3.0, 1.5 + 3.0)), "from one dim to another, pieces are selected, put together and put in their places"


def test_gradients_pass_a_bucket_once_whatever_the_number_of_axes() -> None:
    assert compute(model(1e12, 1e12), tensor(Kind.PARAMETER), INVARIANT, REPLICATED) == pytest.approx((1.0, 3.0))
    square = model(1e12, 1e12, 1e12, 1e12, mesh=two_level(2, 2))
    path = tuple(Communication(a, INVARIANT, REPLICATED, Form.NONE, True) for a in (0, 1))
    cost = square.conversion(tensor(Kind.PARAMETER), path, Placement((REPLICATED, REPLICATED)))
    assert cost.backward is not None
    assert float(cost.backward.at({}).max()) == pytest.approx(3e-3)


@pytest.mark.parametrize(("source", "target"), [(REPLICATED, INVARIANT), (INVARIANT, PARTIAL), (REPLICATED, PARTIAL)])
def test_what_does_not_communicate_costs_nothing(source: State, target: State) -> None:
    assert compute(model(1e12, 1e12), tensor(), source, target) == (0.0, 0.0)


def test_every_operation_has_copies_in_every_form() -> None:
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "pad", "mask", "none"):
        for form in Form:
            if operation not in ("all_gather", "reduce_scatter") or form is not Form.NONE:
                unequal = copies(operation, form, equal=False, strided=True)
                assert unequal == NO_COPIES or unequal.kernels > 0
                assert min(unequal) >= 0
