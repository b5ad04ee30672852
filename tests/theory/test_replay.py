"""Replay accepts a program written by hand and rejects every change of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hapx.errors import PlanError
from hapx.plan import Instruction, Program, Triple
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Placement, Property, State
from hapx.theory.conversion import paths
from hapx.theory.derive import derive
from hapx.theory.replay import replay
from support.theories import data_parallel, flat, mlp, placed, split, two_level

MESH, GRAPH = flat(2), mlp()
THEORY = derive(GRAPH, MESH)
STORAGE = {name: placed(INVARIANT) for name in ("w1", "w2")}
ROWS = split(MESH, 0, 0, 8)


def converted(name: str, source: Placement, target: Placement) -> Triple:
    """The conversion along the only path in the padded form."""
    (path,) = paths(GRAPH.refs[name], MESH, source, target, frozenset({"padded"}))
    return Triple(None, (Property(name, source),), (Property(name, target),), path)


def legal(program: Program) -> Program:
    """The program with every conversion along its legal path."""
    triples = [i.triple if i.triple.node is not None else _again(i.triple) for i in program.instructions]
    return replace(program, instructions=tuple(map(Instruction, triples)))


def _again(t: Triple) -> Triple:
    return converted(t.pre[0].tensor, t.pre[0].placement, t.post[0].placement)


PROGRAM = legal(data_parallel(GRAPH, MESH))


def test_a_data_parallel_program_is_accepted() -> None:
    replay(PROGRAM, THEORY, STORAGE)


def tensor_parallel() -> Program:
    """w1 by rows, w2 by columns, one sum behind the second."""
    hidden = {"h": 1, "a": 1, "w1": 0, "w2": 1}
    where = {n: placed(split(MESH, 0, d, 32)) for n, d in hidden.items()} | {"x": placed(REPLICATED), "y": placed(PARTIAL)}
    where |= {"s": placed(INVARIANT), "loss": placed(INVARIANT)}
    steps = [_triple(i, where) for i in range(3)]
    steps.append(converted("y", placed(PARTIAL), placed(INVARIANT)))
    steps += [_triple(i, where | {"y": placed(INVARIANT)}) for i in (3, 4)]
    needs = tuple(Property(n, where[n]) for n in ("x", "w1", "w2"))
    return Program(PROGRAM.key, MESH, tuple(map(Instruction, steps)), needs, (Property("loss", placed(INVARIANT)),))


def _triple(node: int, where: dict[str, Placement]) -> Triple:
    names = (*GRAPH.nodes[node].call.refs(), *(o.name for o in GRAPH.nodes[node].outputs))
    (found,) = [t for t in THEORY.triples[node] if all(p.placement == where[p.tensor] for p in (*t.pre, *t.post))]
    assert {p.tensor for p in (*found.pre, *found.post)} == set(names)
    return found


def test_a_tensor_parallel_program_is_accepted_with_its_storage() -> None:
    program = tensor_parallel()
    storage = {p.tensor: p.placement for p in program.needs if p.tensor != "x"}
    replay(program, THEORY, storage)
    with pytest.raises(PlanError):
        replay(program, THEORY, STORAGE)


Change = Callable[[list[Triple]], list[Triple]]


def swap(i: int, j: int) -> Change:
    def change(ts: list[Triple]) -> list[Triple]:
        ts[i], ts[j] = ts[j], ts[i]
        return ts

    return change


def without(i: int) -> Change:
    return lambda ts: ts[:i] + ts[i + 1 :]


def twice(i: int) -> Change:
    return lambda ts: [*ts[: i + 1], ts[i], *ts[i + 1 :]]


def edited(i: int, edit: Callable[[Triple], Triple]) -> Change:
    return lambda ts: [*ts[:i], edit(ts[i]), *ts[i + 1 :]]


def post(state: State) -> Callable[[Triple], Triple]:
    return lambda t: replace(t, post=tuple(Property(p.tensor, placed(state)) for p in t.post))


def pre(state: State) -> Callable[[Triple], Triple]:
    return lambda t: replace(t, pre=(Property(t.pre[0].tensor, placed(state)), *t.pre[1:]))


def body(**changes: object) -> Callable[[Triple], Triple]:
    return lambda t: replace(t, body=t.body.replace(**changes))  # type: ignore[union-attr]


LAST = len(PROGRAM.instructions) - 1
MUTATIONS: dict[str, Change] = {
    "a changed post state": edited(3, post(PARTIAL)),
    "a changed pre state": edited(3, pre(REPLICATED)),
    "a loss that nobody sums": edited(LAST, lambda t: replace(t, pre=(Property("loss", placed(INVARIANT)),))),
    "a sum that is a mere claim": edited(LAST - 1, post(INVARIANT)),
    "another operator": edited(4, lambda t: replace(t, body=replace(t.body, target="aten.gelu.default"))),  # type: ignore[type-var]
    "another argument": edited(7, body(dtype=1)),
    "another node's number": edited(4, lambda t: replace(t, node=5)),
    "a number that is no node": edited(4, lambda t: replace(t, node=17)),
    "another order": swap(3, 4),
    "a missing node": without(4),
    "a missing conversion": without(1),
    "no conversion of the loss": without(LAST),
    "a node twice": twice(4),
    "a conversion twice": twice(1),
    "work that is not its own": edited(3, lambda t: replace(t, work=(None,))),
    "an empty conversion": edited(1, lambda t: replace(t, body=())),
    "a conversion that leads elsewhere": edited(1, lambda t: replace(t, post=(Property("w1", placed(PARTIAL)),))),
    "a conversion of another tensor": edited(1, lambda t: replace(t, post=(Property("w2", placed(REPLICATED)),))),
    "a conversion without transpose": edited(1, lambda t: replace(t, body=(replace(t.body[0], gradient=False),))),  # type: ignore[index]
    "a conversion along no axis": edited(1, lambda t: replace(t, body=(replace(t.body[0], axis=1),))),  # type: ignore[index]
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_change_is_rejected(name: str) -> None:
    changed = MUTATIONS[name]([i.triple for i in PROGRAM.instructions])
    assert changed != [i.triple for i in PROGRAM.instructions]
    with pytest.raises(PlanError):
        replay(replace(PROGRAM, instructions=tuple(map(Instruction, changed))), THEORY, STORAGE)


def test_what_surrounds_the_instructions_is_checked_too() -> None:
    wrong: dict[str, tuple[Program, dict[str, Placement]]] = {
        "another mesh": (replace(PROGRAM, mesh=two_level(2, 1)), STORAGE),
        "an output that is not given": (replace(PROGRAM, gives=()), STORAGE),
        "an output in a placement that is not allowed": (replace(PROGRAM, gives=(Property("loss", placed(PARTIAL)),)), STORAGE),
        "an output that nobody makes": (replace(PROGRAM, gives=(Property("loss", placed(REPLICATED)),)), STORAGE),
        "a need that is not given": (replace(PROGRAM, needs=(*PROGRAM.needs, Property("h", placed(ROWS)))), STORAGE),
        "a parameter that is not stored": (PROGRAM, {"w1": placed(INVARIANT)}),
        "a parameter stored as a sum": (PROGRAM, STORAGE | {"w1": placed(PARTIAL)}),
    }
    accepted = [what for what, (program, storage) in wrong.items() if not _rejected(program, storage)]
    assert not accepted


def _rejected(program: Program, storage: dict[str, Placement]) -> bool:
    try:
        replay(program, THEORY, storage)
    except PlanError:
        return True
    return False
