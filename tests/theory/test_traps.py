"""Mistakes that are easily made in rules of distributed operators, each shown to be avoided (and, where it is made, to be caught)."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from hapx.ir import OpCall
from hapx.plan import LocalIndices, LocalShape, Triple
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Placement, Sharded, State
from hapx.theory.audit import uninitialised_memory_is_nan
from hapx.theory.derive import derive
from hapx.theory.ops import losses
from hapx.theory.probe import deal, failure, piece, run_all, truth
from hapx.theory.samples import SAMPLES, Sample, booleans, ids, positive, sample, t
from hapx.theory.settings import Setting, line
from support.claims import bodies, claims

UNEVEN = line(3, zero=1, first=2)
LINEAR = sample("linear", input=t(4, 6), weight=t(5, 6), bias=t(5))


def fails(s: Sample, pre: tuple[State | str, ...], post: tuple[State | str, ...], setting: Setting = UNEVEN) -> str | None:
    """What is wrong with {pre} the plain call {post}. States may be written S<dim>."""
    case = truth(s)
    triples = derive(case.graph, setting.mesh).triples[0]

    def placement(index: int, state: State | str) -> Placement:
        if not isinstance(state, str):
            return Placement((state,))
        known = {p.placement for tr in triples for k, p in enumerate((*tr.pre, *tr.post)) if k == index}
        return next(p for p in known if str(p).startswith(state))

    placements = [placement(i, s) for i, s in enumerate((*pre, *post))]
    return failure(case.node.call, case, placements[: len(pre)], placements[len(pre) :], setting)


def only_triple(s: Sample, rule: str, setting: Setting = UNEVEN) -> Triple:
    (found,) = [tr for tr in derive(truth(s).graph, setting.mesh).triples[0] if _text(tr) == rule]
    return found


def _text(tr: Triple) -> str:
    from support.claims import text

    return text(tr)


def test_a_replicated_bias_under_a_split_sum_is_added_by_every_device() -> None:
    found = claims(LINEAR)
    assert "S1[6] S1[6] P -> P" in found
    assert not any(r.startswith("S1[6] S1[6] R") for r in found)
    assert "output 0" in str(fails(LINEAR, ("S1", "S1", REPLICATED), (PARTIAL,)))


def test_a_replicated_operand_added_to_a_partial_one_is_added_by_every_device() -> None:
    add = sample("add.Tensor", self=t(4, 6), other=t(4, 6))
    assert "P P -> P" in claims(add) and "P R -> P" not in claims(add)
    assert fails(add, (PARTIAL, REPLICATED), (PARTIAL,)) is not None
    assert "P -> P" not in claims(sample("add.Tensor", self=t(4, 6), other=1.0)), "so is a number"


def test_the_mean_of_local_means_is_wrong_under_uneven_shares() -> None:
    mean = sample("mean", self=t(4, 6))
    assert bodies(mean)["S0[4] -> P"] == "hapx.mean"
    assert bodies(mean)["R -> R"] == "aten.mean.default"
    assert fails(mean, ("S0",), (PARTIAL,), line(2)) is not None


def test_a_mean_loss_counts_what_is_not_ignored_on_all_devices() -> None:
    loss = sample("cross_entropy_loss", self=t(4, 7), target=ids(4, limit=7), ignore_index=2)
    rule = "S0[4] S0[4] -> P"
    assert bodies(loss)[rule] == "hapx.cross_entropy"
    assert fails(loss, ("S0", "S0"), (PARTIAL,), line(2)) is not None
    assert dict(only_triple(loss, rule).body.args)["batch"].axes == (0,)  # type: ignore[union-attr]


CLASS_LOSSES = ("aten.cross_entropy_loss", "aten.nll_loss", "aten.nll_loss2d", "aten.nll_loss_nd")
LABELS = {"multi_margin_loss": ids(4, limit=7), "multilabel_margin_loss": ids(4, 7, limit=7)}


@pytest.mark.parametrize("name", LABELS)
def test_a_kernel_that_sums_no_rows_to_anything_is_not_asked_to(name: str) -> None:
    of = {r: bodies(sample(name, self=t(4, 7), target=LABELS[name], reduction=r)) for r in (0, 1, 2)}
    assert {r: set(found.values()) for r, found in of.items()} == {
        0: {f"aten.{name}.default"}, 1: {f"aten.{name}.default", "hapx.mean_loss"}, 2: {f"aten.{name}.default", "hapx.sum_loss"},
    }  # fmt: skip
    assert of[2]["S0[4] S0[4] -> P"] == "hapx.sum_loss" and of[2]["R R -> R"] == f"aten.{name}.default"


def test_reduced_losses_of_no_rows_are_zero() -> None:
    """Exactly, and so are their gradients, whatever the memory that they are written to holds."""
    setting, ones = line(2, zero=0), [torch.ones((), dtype=torch.float64)] * 2
    seen: Counter[str] = Counter()
    for s in SAMPLES:
        if not (set(CLASS_LOSSES) | set(losses.ROW_BY_ROW)) & {s.call.op} or (case := truth(s)).outputs[0].shape:
            continue
        for triple in derive(case.graph, setting.mesh).triples[0]:
            assert isinstance(triple.body, OpCall)
            pre, post = (tuple(p.placement for p in ps) for ps in (triple.pre, triple.post))
            first = pre[0].states[0]
            if PARTIAL not in post[0].states or not isinstance(first, Sharded) or first.dim != 0 or len(case.refs[0].shape) < 2:
                continue
            dealt = [deal(x, p, setting, torch.Generator().manual_seed(0)) for x, p in zip(case.operands, pre, strict=True)]
            with uninitialised_memory_is_nan():
                run = run_all(triple.body, case, dealt, [ones], post, setting)[0]
            assert run.outputs[0] == 0, f"{s} {triple}"
            assert all(g is None or bool((g == 0).all()) for g in run.gradients), f"{s} {triple}"
            seen[s.call.op] += 1
    assert set(seen) == {*CLASS_LOSSES, *losses.ROW_BY_ROW}, "every loss was seen"


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int"])
def test_softmax_needs_its_dim_whole(name: str) -> None:
    s = sample(name, self=t(3, 4, 6), dim=1)
    assert claims(s) == {"R -> R", "I -> I", "S0[3] -> S0[3]", "S2[6] -> S2[6]"}


def test_norms_need_their_dims_whole() -> None:
    s = sample("layer_norm", input=t(3, 4, 6), normalized_shape=(4, 6), weight=t(4, 6), bias=t(4, 6))
    assert claims(s) == {"R R R -> R", "I I I -> I", "S0[3] R R -> S0[3]", "R P P -> P"}


STATISTICS = {"running_mean": t(6, grad=False), "running_var": positive(6, grad=False), "momentum": 0.3, "eps": 1e-5, "cudnn_enabled": False}
TRAINED = sample("batch_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), training=True, **STATISTICS)


def test_batch_norm_uses_the_statistics_of_all_devices() -> None:
    assert bodies(TRAINED)["S0[4] R R R R -> S0[4]"] == "hapx.batch_norm"
    assert bodies(TRAINED)["S2[5] R R R R -> S2[5]"] == "hapx.batch_norm"
    assert fails(TRAINED, ("S0", REPLICATED, REPLICATED, REPLICATED, REPLICATED), ("S0",), line(2)) is not None


def test_batch_norm_does_not_update_a_slice_of_a_buffer() -> None:
    assert not any(r.startswith("S1") for r in claims(TRAINED))
    frozen = sample("batch_norm", input=t(4, 6, 5), weight=t(6), bias=t(6), training=False, **STATISTICS)
    assert "S1[6] S0[6] S0[6] S0[6] S0[6] -> S1[6]" in claims(frozen)


@pytest.mark.parametrize("s", [
    sample("dropout", input=t(4, 6), p=0.4, train=True),
    sample("scaled_dot_product_attention", query=t(2, 4, 5, 3), key=t(2, 4, 6, 3), value=t(2, 4, 6, 7), dropout_p=0.4),
], ids=lambda s: s.call.op)  # fmt: skip
def test_random_operators_are_never_partial(s: Sample) -> None:
    assert not any("P" in rule.split() for rule in claims(s))
    assert all(target.startswith("hapx.") for target in bodies(s).values())


def test_the_mask_of_a_shard_is_a_slice_of_the_mask() -> None:
    s = sample("dropout", input=t(4, 6), p=0.4, train=True)
    case, rule = truth(s), only_triple(s, "S1[6] -> S1[6]")
    assert isinstance(rule.body, OpCall) and isinstance(rule.body["indices"], LocalIndices)
    ones = torch.ones(4, 6, dtype=torch.float64)
    whole = only_triple(s, "R -> R")
    generator = torch.Generator().manual_seed(0)

    def masks(tr: Triple) -> list[torch.Tensor]:
        placement = tr.pre[0].placement
        runs = run_all(tr.body, case, [deal(ones, placement, UNEVEN, generator)], [None], [placement], UNEVEN)  # type: ignore[arg-type]
        return [r.outputs[0] != 0 for r in runs]

    reference = masks(whole)[0]
    assert 0 < reference.sum() < 24
    for at, mask in zip(UNEVEN.devices, masks(rule), strict=True):
        assert torch.equal(mask, piece(reference, rule.pre[0].placement, UNEVEN, at))


@pytest.mark.parametrize("s, argument", [
    (sample("view", self=t(4, 6), size=(2, 2, 6)), "size"),
    (sample("reshape", self=t(4, 6), shape=(2, 2, 6)), "shape"),
    (sample("expand", self=t(4, 1), size=(4, 6)), "size"),
    (sample("new_zeros", self=t(5), size=(4, 6)), "size"),
], ids=lambda v: v.call.op if isinstance(v, Sample) else "")  # fmt: skip
def test_literal_sizes_become_local(s: Sample, argument: str) -> None:
    for tr in derive(truth(s).graph, UNEVEN.mesh).triples[0]:
        assert isinstance(tr.body, OpCall)
        assert tr.body[argument] == LocalShape(truth(s).graph.refs["out0"].shape, tr.post[0].placement)


def test_integers_are_partial_only_where_a_sum_is_meant() -> None:
    assert "S0[4] -> P" in claims(sample("sum", self=ids(4, 6, limit=9)))
    for s in (
        sample("add.Tensor", self=ids(4, limit=9), other=ids(4, limit=9)),
        sample("neg", self=ids(4, limit=9)),
        sample("bitwise_not", self=booleans(4)),
    ):
        assert not any("P" in rule.split() for rule in claims(s))


def test_invariant_never_meets_another_state_in_operands_with_gradients() -> None:
    for op in ("add.Tensor", "mul.Tensor"):
        both = sample(op, self=t(4, 6), other=t(4, 6))
        assert {r for r in claims(both) if "I" in r.split()} == {"I I -> I"}
        assert fails(both, (REPLICATED, INVARIANT), (REPLICATED,)) is not None
        assert fails(both, (REPLICATED, INVARIANT), (INVARIANT,)) is not None
    assert fails(sample("mul.Tensor", self=t(4, 6), other=t(4, 6)), (PARTIAL, INVARIANT), (PARTIAL,)) is not None
    assert fails(sample("mul.Tensor", self=t(4, 6), other=t(6)), ("S0", INVARIANT), ("S0",)) is not None


def test_an_operand_without_gradient_is_replicated_beside_invariant_ones() -> None:
    assert "I R -> I" in claims(sample("mul.Tensor", self=t(4, 6), other=t(4, 6, grad=False)))


def test_where_no_gradient_flows_back_invariant_is_as_good_as_replicated() -> None:
    assert claims(sample("argmax", self=t(4, 6), dim=1)) == {"R -> R", "I -> R", "S0[4] -> S0[4]"}


def test_gradients_scaled_by_frequency_need_all_ids() -> None:
    """Only sufficient factors bring them together again, for a table that is Invariant."""
    s = sample("embedding", weight=t(7, 6), indices=ids(4, limit=7), scale_grad_by_freq=True)
    assert {r for r in claims(s) if r.split()[1].startswith("S")} == {"I S0[4] -> S0[4]"}


def test_causal_attention_needs_its_queries_whole_unless_their_position_is_known() -> None:
    def call(**constants: object) -> set[str]:
        return claims(sample("scaled_dot_product_attention", query=t(2, 4, 5, 3), key=t(2, 4, 5, 3), value=t(2, 4, 5, 7), **constants))

    rows = "S2[5] R R -> S2[5]"
    assert rows in call() and rows not in call(is_causal=True) and rows in call(is_causal=True, dropout_p=0.4)
    assert not any(r.split()[1].startswith(("S2", "S3")) for r in call()), "keys are whole"


def test_a_fused_dim_is_cut_in_blocks() -> None:
    s = sample("split.Tensor", self=t(4, 12), split_size=4, dim=1)
    found = claims(s)
    assert "S1[3x4] -> S1[4] S1[4] S1[4]" in found
    assert not any(r.startswith("S1[12]") for r in found)
    dims = [p.placement.states[0] for p in only_triple(s, "S1[3x4] -> S1[4] S1[4] S1[4]").pre]
    assert all(isinstance(d, Sharded) and d.outer == 3 for d in dims)
