"""The oracle of equivalence can fail: every planted fault turns a named case red, and the same case is green without it.

A fault changes the program behind the back of `replay` (which must refuse it, too), or a part of the runtime. Named cases: a model, a mesh,
and what the program is asked to do; lengths are uneven and nowhere 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from types import MappingProxyType
from typing import Any

import pytest
import torch

from hapx.collectives import conversion, cross_entropy, dropout
from hapx.errors import PlanError
from hapx.ir import OpCall
from hapx.plan import Axes, Communication, Form, Instruction, Plan, Program, Triple
from hapx.runtime.build import Synchronise
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Invariant, Partial, Placement, Property, Sharded
from hapx.theory.factors import gathered
from hapx.transposes import TRANSPOSES
from hapx.verify import verify
from support.cases import CASES, MESHES, assert_case
from support.random_programs import Taste, random_plan

# ---- named cases -----------------------------------------------------------------------------------------------------------


def uneven(cut: Cut, size: int, rng: Random) -> tuple[int, ...]:
    """More for the first, something for everybody where there is enough."""
    rest = [max(cut.units // (size + 1), 1)] * (size - 1)
    return (cut.units - sum(rest), *rest)


def even(cut: Cut, size: int, rng: Random) -> tuple[int, ...]:
    assert cut.units % size == 0
    return (cut.units // size,) * size


def splits_batch(triple: Triple) -> bool:
    """Every axis divides the work, and every operand that is cut is cut along its first dim; parameters are not, and their gradients are summed."""
    states = [s for p in (*triple.pre, *triple.post) for s in p.placement.states]
    parameters = [s for p in triple.pre if is_parameter(p) for s in p.placement.states]
    along_batch = all(s.dim == 0 for s in states if isinstance(s, Sharded)) and not any(isinstance(s, Sharded) for s in parameters)
    return (
        all(triple.work) and along_batch and gathered(triple.body) is None and not any(isinstance(p.placement.states[0], Partial) for p in triple.pre)
    )


def is_parameter(p: Property) -> bool:
    return p.tensor.endswith(("weight", "bias"))


def whole(triple: Triple) -> bool:
    return not any(triple.work) and all(s in (REPLICATED, INVARIANT) for p in (*triple.pre, *triple.post) for s in p.placement.states)


def sums_products(triple: Triple) -> bool:
    """Every linear has its sum split, so that its output is Partial; everything else is whole."""
    if linear(triple):
        return any(isinstance(s, Partial) for s in triple.post[0].placement.states) and all(triple.work)
    return whole(triple)


def linear(triple: Triple) -> bool:
    return isinstance(triple.body, OpCall) and triple.body.target == "aten.linear.default"


def splits_vocabulary(triple: Triple) -> bool:
    return isinstance(triple.body, OpCall) and triple.body.target == "hapx.embedding"


def cuts_blocks(triple: Triple) -> bool:
    """A fused projection is cut in each of its three parts; everything else is whole."""
    if linear(triple) and "qkv" in triple.pre[1].tensor:
        return any(isinstance(s, Sharded) and s.outer == 3 for s in triple.post[0].placement.states)
    return whole(triple)


def all_invariant(triple: Triple) -> bool:
    return whole(triple) and triple.post[0].placement.states[0] == INVARIANT


@dataclass(frozen=True)
class Named:
    """A model, a mesh, and the triples its program prefers."""

    model: str
    mesh: str
    wanted: Callable[[Triple], bool]
    deal: Callable[[Cut, int, Random], tuple[int, ...]] = uneven


NAMED = {
    "mlp, batch split": Named("mlp", "2", splits_batch),
    "mlp, batch of 8 split on 2x2": Named("mlp of 8", "2x2", splits_batch, even),
    "mlp, sums split": Named("mlp", "3", sums_products),
    "mlp, invariant": Named("mlp", "2", all_invariant),
    "gpt, batch split": Named("gpt", "3", splits_batch),
    "gpt, sums split": Named("gpt", "2", sums_products),
    "gpt, vocabulary split": Named("gpt", "3", splits_vocabulary),
    "gpt, fused projection split": Named("gpt", "2", cuts_blocks),
    "gpt with dropout, batch split": Named("gpt with dropout", "2", splits_batch),
    "cnn, batch split": Named("cnn", "3", splits_batch),
    "cross entropy, ignored targets, batch split": Named("cross entropy", "2", splits_batch),
}


@cache
def plan_of(name: str) -> Plan:
    named = NAMED[name]
    theory = CASES[named.model].theory(MESHES[named.mesh])
    return random_plan(theory, Random(7), Taste(lazy=1.0, detour=0.0, freed=0.0, wanted=named.wanted, whole=True), named.deal)


# ---- faults in programs ----------------------------------------------------------------------------------------------------

Edit = Callable[[Program], Program]


def edited(plan: Plan, edit: Edit) -> Plan:
    stage = plan.stages[0]
    changed = replace(stage, programs={plan.first: edit(stage.programs[plan.first])})
    assert changed != stage, "the fault is not planted"
    return replace(plan, stages=(changed,))


def each(change: Callable[[Triple], Triple]) -> Edit:
    """Every triple changed on its own."""
    return lambda program: replace(program, instructions=tuple(replace(i, triple=change(i.triple)) for i in program.instructions))


def without_steps(drop: Callable[[str, Communication], bool]) -> Edit:
    """Conversions without some of their steps."""

    def change(triple: Triple) -> Triple:
        if isinstance(triple.body, OpCall):
            return triple
        return replace(triple, body=tuple(c for c in triple.body if not drop(triple.pre[0].tensor, c)))

    return each(change)


def with_argument(target: str, **changes: Any) -> Edit:
    """Calls of a composite with other arguments."""

    def change(triple: Triple) -> Triple:
        if not isinstance(triple.body, OpCall) or triple.body.target != target:
            return triple
        return replace(triple, body=triple.body.replace(**changes))

    return each(change)


def mean_of_local_means(triple: Triple) -> Triple:
    if isinstance(triple.body, OpCall) and triple.body.target == "hapx.mean_loss":
        return replace(triple, body=OpCall("aten.mse_loss.default", triple.body.args[2:]))
    return triple


def no_gradient_of_the_first_layer(triple: Triple) -> Triple:
    """Its conversions say that no cotangent flows back."""
    if isinstance(triple.body, OpCall) or "conv1" not in triple.pre[0].tensor:
        return triple
    return replace(triple, body=tuple(replace(c, gradient=False) for c in triple.body))


def other_nest(program: Program) -> Program:
    """The first input is cut by the axes in the other order, the rest of the program is not."""

    def nested(p: Property) -> Property:
        return Property("x", Placement(p.placement.states, (1, 0))) if p.tensor == "x" else p

    def change(triple: Triple) -> Triple:
        body = triple.body
        if not isinstance(body, OpCall) and triple.pre[0].tensor == "x":
            body = tuple(sorted(body, key=lambda c: -c.axis))
        return replace(triple, pre=tuple(map(nested, triple.pre)), post=tuple(map(nested, triple.post)), body=body)

    return replace(each(change)(program), needs=tuple(map(nested, program.needs)))


def invariant_as_replicated(program: Program) -> Program:
    """A parameter that all devices use alike goes through the conversion whose transpose sums."""
    name = "layers.0.weight"
    whole, copies = Property(name, Placement((INVARIANT,))), Property(name, Placement((REPLICATED,)))
    added = Instruction(Triple(None, (whole,), (copies,), (Communication(0, INVARIANT, REPLICATED, Form.NONE, True),)))

    def change(triple: Triple) -> Triple:
        return triple if triple.node is None else replace(triple, pre=tuple(copies if p == whole else p for p in triple.pre))

    program = each(change)(program)
    return replace(program, instructions=(added, *program.instructions))


PROGRAM_FAULTS: dict[str, tuple[str, Edit, str]] = {
    "bias added on every device": ("mlp, sums split", without_steps(lambda name, c: name.endswith("bias") and c.target == PARTIAL), "loss"),
    "mean of local means": ("mlp, batch split", each(mean_of_local_means), "loss"),
    "mean over the local count": ("gpt, batch split", with_argument("hapx.cross_entropy", batch=Axes(())), "loss"),
    "synchronisation of a gradient missing": (
        "cnn, batch split",
        each(no_gradient_of_the_first_layer),
        "gradients? of",
    ),
    "all_reduce forgotten": ("gpt, sums split", without_steps(lambda name, c: c.source == PARTIAL and c.target != PARTIAL), "loss"),
    "axes nested in the wrong order": ("mlp, batch of 8 split on 2x2", other_nest, "loss"),
    "statistics of the local batch": ("cnn, batch split", with_argument("hapx.batch_norm", batch=Axes(())), "loss"),
    "offset of the vocabulary shard": ("gpt, vocabulary split", with_argument("hapx.embedding", offset=0), "loss"),
    "Invariant used as Replicated": ("mlp, invariant", invariant_as_replicated, "gradient of layers.0.weight"),
}


@pytest.mark.parametrize("fault", PROGRAM_FAULTS)
def test_faults_in_programs(fault: str) -> None:
    name, edit, message = PROGRAM_FAULTS[fault]
    case, plan = CASES[NAMED[name].model], plan_of(name)
    verify(plan)
    assert_case(case, plan, steps=2)
    wrong = edited(plan, edit)
    with pytest.raises(AssertionError, match=message):
        assert_case(case, wrong, steps=2)
    with pytest.raises(PlanError):
        verify(wrong)


def test_wrong_lengths() -> None:
    """Lengths that do not sum to the units: refused by `verify`; run all the same, they do not go unnoticed."""
    plan = plan_of("mlp, batch split")
    case, stage = CASES["mlp"], plan.stages[0]
    assert_case(case, plan, steps=2)
    lengths = {c: (n[0] - 1, *n[1:]) for c, n in stage.lengths[plan.first].items()}
    wrong = replace(plan, stages=(replace(stage, lengths={plan.first: lengths}),))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert_case(case, wrong, steps=2)
    with pytest.raises(PlanError, match="do not sum to"):
        verify(wrong)


# ---- faults in the runtime -------------------------------------------------------------------------------------------------


def wrong_dual(patch: pytest.MonkeyPatch) -> None:
    """all_reduce is taken to be its own transpose also where what follows is the same on all devices."""
    table = {**TRANSPOSES, (Partial, Invariant): ("all_reduce", "all_reduce")}
    patch.setattr(conversion, "TRANSPOSES", MappingProxyType(table))


def no_synchronisation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Synchronise, "__call__", lambda self, parameter: parameter)


def repeated_mask(patch: pytest.MonkeyPatch) -> None:
    """Every device draws the mask of the first samples."""
    right = dropout.keep_mask

    def wrong(p, call, indices, shape, rng, device):  # type: ignore[no-untyped-def]
        return right(p, call, [i if i is None else torch.arange(len(i)) for i in indices], shape, rng, device)

    patch.setattr(dropout, "keep_mask", wrong)


def no_interleaving(patch: pytest.MonkeyPatch) -> None:
    """Shards are put one behind the other, whatever blocks the dim has."""
    right = conversion.gather_shards
    patch.setattr(conversion, "gather_shards", lambda t, b, comm, form: right(t, replace(b, outer=1, inner=b.outer * b.inner), comm, form))


def ignored_targets_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cross_entropy, "counted", lambda target, weight, ignore_index: torch.tensor(target.numel()))


RUNTIME_FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = {
    "wrong dual": ("mlp, batch split", wrong_dual, "gradient of"),
    "no gradient synchronisation at all": ("gpt, batch split", no_synchronisation, "gradient of"),
    "repeated dropout mask": ("gpt with dropout, batch split", repeated_mask, "loss"),
    "gather without block interleaving": ("gpt, fused projection split", no_interleaving, "loss"),
    "ignored targets counted": ("cross entropy, ignored targets, batch split", ignored_targets_counted, "loss"),
}


@pytest.mark.parametrize("fault", RUNTIME_FAULTS)
def test_faults_in_the_runtime(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant, message = RUNTIME_FAULTS[fault]
    case, plan = CASES[NAMED[name].model], plan_of(name)
    assert_case(case, plan, steps=2)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        assert_case(case, plan, steps=2)
