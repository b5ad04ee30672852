"""What the memory model says an operator keeps for backward is what autograd keeps of it, for samples of image operators."""

from __future__ import annotations

import pytest

import hapx.theory.ops  # noqa: F401  (fills the registry)
from hapx.cost.compute import hidden, is_view
from hapx.cost.memory import saved
from hapx.cost.transients import larger_result
from hapx.theory.probe import truth
from hapx.theory.samples import SAMPLES
from hapx.theory.samples.convolution import convolutions, grouped, transposed
from hapx.theory.samples.normalization import groups
from hapx.theory.samples.pooling import pools, unpools
from hapx.theory.samples.resampling import columns, interpolations, paddings, points, shuffles
from support.saved import kept_by_autograd, storages_of_results

FAMILIES = (convolutions, grouped, transposed, pools, unpools, columns, interpolations, paddings, points, shuffles)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)
def test_kept_operands_are_those_of_autograd(family: object) -> None:
    found = list(family())  # type: ignore[operator]
    assert found
    for sample in found:
        case = truth(sample)
        everything, extra = kept_by_autograd(sample)
        # a product keeps both factors, even if the input's gradient, for which it keeps the weight, is not asked for
        unused = {"weight"} if sample.call.op.startswith("aten.conv") and not case.refs[0].requires_grad else set()
        # padding of which more is behind than in front is done first: what is kept is the padded copy, a little larger than the input
        copied = sample.call.get("padding") == "same" and any(n % 2 == 0 for n in case.refs[1].shape[2:])
        assert (set(saved(case.node, case.graph)) | unused) - ({"input"} if copied else set()) == everything, sample
        assert copied or sum(size for _, size in hidden(case.graph, case.node)) == extra, sample
        assert not is_view(case.graph, case.node) or sample.call.op == "aten.unfold", sample


def test_group_norm_keeps_its_input_and_two_numbers_per_group() -> None:
    for sample in groups():
        case = truth(sample)
        everything, extra = kept_by_autograd(sample)
        assert everything - {"weight"} == set(saved(case.node, case.graph)) == {"input"}
        assert extra == 2 * sum(size for _, size in hidden(case.graph, case.node))  # float32 is assumed


def test_storages_of_results_are_as_large_as_the_results_but_for_those_that_are_known() -> None:
    """Of every sample; left out are windows and col2im, which cut a border off."""
    checked, larger = 0, set()
    for sample in SAMPLES:
        case = truth(sample)
        if sample.call.op.endswith("_window") or sample.call.op == "aten.col2im":
            continue
        known = int(sum(size for _, size in larger_result(case.graph, case.node, case.node.call)))
        for held, size in storages_of_results(sample):
            assert held == (known or size), sample
            larger |= {sample.call.op} if held > size else set()
            checked += 1
    assert checked > 700 and larger == {"aten.mse_loss", "aten.smooth_l1_loss", "aten.binary_cross_entropy", "aten.soft_margin_loss"}
