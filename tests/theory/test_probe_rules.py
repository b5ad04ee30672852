"""Rules that are found by execution: of operators of our own, and of operators of the table as if it did not know them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hapx.errors import UnsupportedOperatorError
from hapx.ir import Kind, Node, OpCall, Ref, TensorRef
from hapx.rules import Rule, Site
from hapx.states import PARTIAL
from hapx.theory.conversion import free
from hapx.theory.derive import derive
from hapx.theory.grains import find_grains
from hapx.theory.probe import truth
from hapx.theory.probe_rules import Unprobed, find_rules, is_registered, recheck
from hapx.theory.probe_trials import Trial
from hapx.theory.registry import Context, implied_rules
from hapx.theory.samples import SAMPLES
from hapx.theory.settings import line
from support import custom_ops

Shape = tuple[int, ...]


def node(name: str, operands: dict[str, Shape], out: Shape, dtype: str = "float32", **constants: Any) -> tuple[Node, list[TensorRef]]:
    """A call of one of our operators in a model."""
    refs = [TensorRef(k, s, dtype, Kind.VALUE, True) for k, s in operands.items()]
    call = OpCall(f"hapx_tests.{name}.default", (*((k, Ref(k)) for k in operands), *constants.items()))
    return Node(call, (TensorRef("out", out, dtype, Kind.VALUE, True),), "net.block", "net.py:7: y = f(x)", (None,)), refs


def rules(name: str, operands: dict[str, Shape], out: Shape, dtype: str = "float32", **constants: Any) -> set[str]:
    return set(map(str, find_rules(*node(name, operands, out, dtype, **constants)).rules))


X = {"x": (32, 768)}
DEEP = (64, 12, 768)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_elementwise(dtype: str) -> None:
    assert rules("squash", {"x": DEEP}, DEEP, dtype, slope=0.5) == {"S0 -> S0", "S1 -> S1", "S2 -> S2"}


def test_a_dim_that_is_whole() -> None:
    assert rules("row_softmax", {"x": DEEP}, DEEP) == {"S0 -> S0", "S1 -> S1"}


def test_linear_in_each_operand_and_a_sum() -> None:
    """The last rule splits the index that is summed."""
    found = rules("bilinear", {"x": (32, 768), "w": (768, 3072), "y": (32, 3072)}, (32, 3072))
    assert found == {"S0 R S0 -> S0", "R S1 S1 -> S1", "P R R -> P", "R P R -> P", "R R P -> P", "S1 S0 R -> P"}


def test_samples_that_depend_on_others() -> None:
    assert rules("running_sum", X, (32, 768)) == {"S1 -> S1", "P -> P"}


def test_a_literal_size_is_probed_at_the_real_shape() -> None:
    assert rules("tile_to", X, (32, 768), rows=32) == {"S1 -> S1", "P -> P"}


def test_a_literal_size_that_is_too_large() -> None:
    with pytest.raises(Unprobed, match=r"does not run on other sizes, and the real ones are too large.*4000 rows"):
        rules("tile_to", {"x": (4000, 768)}, (4000, 768), rows=4000)


@pytest.mark.parametrize("batch", [32, 64_000])
def test_what_changes_with_the_size_is_seen_at_the_real_one(batch: int) -> None:
    """In small shapes the batch may be split. (64000 x 768 is too large: each size is tried in turn.)"""
    assert rules("late_cumsum", {"x": (batch, 768)}, (batch, 768)) == {"P -> P"}
    assert rules("late_cumsum", {"x": (batch, 20)}, (batch, 20)) == {"S0 -> S0", "S1 -> S1", "P -> P"}


def test_what_changes_with_the_numbers_is_seen_beyond_the_constants_of_the_call() -> None:
    assert rules("saturate", X, (32, 768), limit=1e5) == {"S0 -> S0", "S1 -> S1"}


def test_gradients_are_tried() -> None:
    assert rules("wrong_gradient", X, (32, 768)) == {"S1 -> S1", "P -> P"}


def test_without_a_gradient_the_outputs_decide() -> None:
    found = find_rules(*node("quantise", X, (32, 768), steps=8))
    assert not found.differentiable and set(map(str, found.rules)) == {"S0 -> S0", "S1 -> S1"}


def test_random_operators_are_refused() -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(UnsupportedOperatorError, match=r"net\.block \(net\.py:7.*jitter.*other values each time"):
        rules("jitter", X, (32, 768))
    assert torch.equal(state, torch.random.get_rng_state())


def test_changes_in_place_are_refused() -> None:
    with pytest.raises(UnsupportedOperatorError, match="changes its operands without saying so"):
        rules("sly", X, (32, 768))


def test_what_cannot_be_split_has_a_reason() -> None:
    with pytest.raises(Unprobed, match="do not depend on those of its operands"):
        rules("nothing", X, (32, 768))
    with pytest.raises(Unprobed, match="no tensor to split"):
        find_rules(*node("nothing", {}, (32, 768)))
    with pytest.raises(Unprobed, match=r"does not run on other sizes.*only with CUDA"):
        rules("gpu_only", X, (32, 768))
    assert rules("empty_hater", {"x": (768,)}, ()) == {"P -> P"}, "its kernel refuses empty tensors"


def test_recheck() -> None:
    call = node("running_sum", X, (32, 768))
    good, bad = Rule((Site(1),), (Site(1),), divides=True), Rule((Site(0),), (Site(0),), divides=True)
    assert recheck(*call, [good, Rule((PARTIAL,), (PARTIAL,))]) is None
    assert recheck(*call, [good, bad]) == "S0 -> S0: output 0 is not S0[4] (flat 2, uneven)"


def test_is_registered() -> None:
    assert custom_ops and is_registered("hapx_tests.squash.default") and is_registered("aten.mm.default")
    assert not any(map(is_registered, ("hapx_tests.squash.other", "hapx_tests.absent.default", "nobody.x.default", "odd")))


# --- operators of the table, as if it did not know them -----------------------------------------------------------------------------

KNOWN = (
    "gelu.default", "softplus.default", "add.Tensor", "mul.Tensor", "where.self", "clamp.default", "mm.default", "bmm.default", "linear.default",
    "addmm.default", "softmax.int", "cumsum.default", "sum.dim_IntList", "amax.default", "mean.dim", "transpose.int", "permute.default",
    "flip.default", "cat.default", "layer_norm.default", "masked_fill.Scalar", "nan_to_num.default", "log_softmax.int",
)  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_probing_finds_what_the_table_says(name: str) -> None:
    """Nothing that the table does not claim (it is audited: all that is true of these samples), and all of its own."""
    sample = next(s for s in SAMPLES if s.call.target == f"aten.{name}")
    case = truth(sample)
    implied = implied_rules(Context(case.node, case.refs, {}))
    # what only has a meaning beside other nodes (blocks) or where no gradient flows back is not looked for
    known = [r for r in find_grains(case.graph).rules[0] if "I" not in str(r) and "x]" not in str(r)]
    found = find_rules(case.node, case.refs).rules
    trial, setting, count = Trial(case, ()), line(2), len(case.refs)

    def follows(rule: Rule, other: Rule) -> bool:
        a, b = trial.placements(rule, setting), trial.placements(other, setting)
        assert a is not None and b is not None
        outputs = all(map(free, case.node.outputs, b[count:], a[count:]))
        return outputs and all(map(free, case.refs, a[:count], b[:count]))

    assert [str(r) for r in found if not any(follows(r, k) for k in known)] == [], "unsound, or the table misses it"
    assert [str(r) for r in known if not any(follows(r, k) for k in (*found, *implied))] == [], "not found"
    assert derive(case.graph, setting.mesh).triples[0]
