"""The examples by which HAP explains itself, printed: the rules of a matrix product (Figure 9) and the search on two products (Figure 11).

Our notation: `x:S0[4]` is x in shards along dim 0 of 4 units (the paper's All-Gather(0)), R and I are whole (its Identity), P is a sum that is still
to be made (its All-Reduce).
"""

from __future__ import annotations

import numpy as np
import pytest

from hapx.cluster.spec import Link
from hapx.cost.model import CostModel
from hapx.ir import Graph
from hapx.restriction import Restriction
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Property, State
from hapx.synth.astar import Statistics, search
from hapx.synth.domain import State as PartialProgram
from hapx.synth.domain import Synthesis
from hapx.synth.exhaustive import Enumeration
from hapx.synth.problem import Problem, build
from hapx.synth.search import program_key
from hapx.synth.writer import solution
from hapx.theory.conversion import paths
from hapx.theory.derive import derive
from hapx.theory.replay import replay
from hapx.theory.triple import Theory
from hapx.transposes import backward_collective, forward_collective
from support.theories import GraphBuilder, cluster, device_type, flat, placed, split

PADDED = frozenset({"padded"})


def printed(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


# -- Figure 9 ----------------------------------------------------------------------------------------------------------------------------------------


def product(target: str, **operands: str) -> Theory:
    b = GraphBuilder()
    b.tensor("x", (4, 6))
    b.parameter("w", *((6, 8) if "mat2" in operands else (8, 6)))
    b.call("y", target, (4, 8), **operands)
    b.call("loss", "aten.sum.default", (), self="y", dtype=None)
    return derive(b.graph("loss"), flat(2))


PRODUCT = """
    {{x:R w:R}} {target} {{y:R}}
    {{x:R w:I}} {target} {{y:I}}
    {{x:S0[4] w:R}} {target} {{y:S0[4]}}
    {{x:S1[6] w:S{summed}[6]}} {target} {{y:P}}
    {{x:R w:S{column}[8]}} {target} {{y:S1[8]}}
    {{x:P w:R}} {target} {{y:P}}
    {{x:R w:P}} {target} {{y:P}}
    {{x:S0[4] w:I}} {factors} {{y:S0[4]}}
    {{x:S0[4] w:I}} {factors} {{y:S0[4]}}
    {{x:S0[4] w:I}} {factors} {{y:S0[4]}}
"""
MM = PRODUCT.format(target="aten.mm.default", factors="hapx.matmul_sfb", summed=0, column=1)
LINEAR = PRODUCT.format(target="aten.linear.default", factors="hapx.linear_sfb", summed=1, column=0)
SUM = """
    {y:R} aten.sum.default {loss:R}
    {y:I} aten.sum.default {loss:I}
    {y:S0[4]} aten.sum.default {loss:P}
    {y:S1[8]} aten.sum.default {loss:P}
    {y:P} aten.sum.default {loss:P}
"""


@pytest.mark.parametrize(
    ("theory", "rules"),
    [(product("aten.mm.default", self="x", mat2="w"), MM), (product("aten.linear.default", input="x", weight="w", bias=None), LINEAR)],  # type: ignore[arg-type]
    ids=("mm", "linear"),
)
def test_rules_of_a_product(theory: Theory, rules: str) -> None:
    """Rows of the first factor, columns of the second, or the summed index of both may be split; a sum that is still to be made passes through.
    Sufficient factors are gathered in backward, in one of three forms."""
    assert [str(t) for t in theory.triples[0]] == printed(rules)
    assert [str(t) for t in theory.triples[1]] == printed(SUM)


CONVERSIONS = """
    {y:S0[4]} all_gather, backward reduce_scatter {y:R}
    {y:S1[8]} all_gather, backward reduce_scatter {y:R}
    {y:P} all_reduce {y:I}
    {y:P} reduce_scatter, backward all_gather {y:S0[4]}
    {y:S0[4]} all_to_all, backward all_to_all {y:S1[8]}
    {y:R} nothing, backward nothing {y:S1[8]}
    {y:I} nothing, backward all_reduce {y:R}
"""


def test_rules_of_communication() -> None:
    """What leads from one property of a product to another."""
    theory = product("aten.mm.default", self="x", mat2="w")
    ref, mesh = theory.graph.refs["y"], theory.mesh
    rows, columns = split(mesh, 0, 0, 4), split(mesh, 0, 1, 8)
    pairs: list[tuple[State, State]] = [(rows, REPLICATED), (columns, REPLICATED), (PARTIAL, INVARIANT), (PARTIAL, rows)]
    pairs += [(rows, columns), (REPLICATED, columns), (INVARIANT, REPLICATED)]
    found = []
    for source, target in pairs:
        (path,) = paths(ref, mesh, placed(source), placed(target), PADDED)
        assert [(c.source, c.target) for c in path] == [(source, target)]
        forward, backward = forward_collective(source, target) or "nothing", backward_collective(source, target) or "nothing"
        how = forward if (source, target) == (PARTIAL, INVARIANT) else f"{forward}, backward {backward}"
        found.append(f"{{{Property('y', placed(source))}}} {how} {{{Property('y', placed(target))}}}")
    assert found == printed(CONVERSIONS)


# -- Figure 11 ---------------------------------------------------------------------------------------------------------------------------------------


def two_products() -> Graph:
    """loss = sum((x w1) w2), for 16 samples of width 4; w1 widens to 32, w2 narrows to 4."""
    b = GraphBuilder()
    b.tensor("x", (16, 4))
    b.parameter("w1", 4, 32)
    b.parameter("w2", 32, 4)
    b.call("h", "aten.mm.default", (16, 32), self="x", mat2="w1")
    b.call("y", "aten.mm.default", (16, 4), self="h", mat2="w2")
    b.call("loss", "aten.sum.default", (), self="y", dtype=None)
    return b.graph("loss")


def chain(problem: Problem, last: PartialProgram) -> list[str]:
    """The partial programs that lead to the last one: the values that are live, what is finished, and the pending compute of each device."""
    states = [last]
    while states[-1].parent is not None:
        states.append(states[-1].parent)
    lines = []
    for state in reversed(states):
        live = problem.steps[state.level].live if state.level < len(problem.steps) else ()
        have = sorted(f"{n}:{p}" for n, t, at in live for i, p in enumerate(t.placements) if state.place >> at & 1 << i)
        pending = " and ".join(f"{(f + b) * 1e6:.0f}" for f, b in zip(state.forward, state.backward, strict=True))
        lines.append(f"{state.level}. {{{' '.join(have)}}} {state.cost * 1e6:.0f} us, then {pending} us")
    return lines


# Compute is pending until something is sent; the first product splits the 32 columns of w1 ({h:P} is free from {h:S1}), the second one the sum over
# them. Nothing is moved but the loss, which ends the forward phase; what is then pending is backward.
PARTIAL_PROGRAMS = """
    0. {} 0 us, then 0 and 0 us
    1. {h:P h:S1[32]} 3 us, then 2048 and 2048 us
    2. {y:P} 6 us, then 5120 and 5120 us
    3. {loss:P} 6 us, then 5121 and 5121 us
    4. {} 2078 us, then 3073 and 3073 us
"""
PROGRAM = """
    needs x:R w1:S1[32] w2:S0[32]
    0  {x:R w1:S1[32]} aten.mm.default {h:S1[32]}
    1  {h:S1[32] w2:S0[32]} aten.mm.default {y:P}
    2  {y:P} aten.sum.default {loss:P}
    3  {loss:P} P->I@0 {loss:I}
    gives loss:I
"""


def test_search_on_two_products() -> None:
    """On two devices, the first three times as fast, with shares of 3:1."""
    graph, mesh = two_products(), flat(2)
    types = [device_type("fast", 3e6, bandwidth=1e9), device_type("slow", 1e6, bandwidth=1e9)]
    theory = derive(graph, mesh)
    on = cluster([("fast",), ("slow",)], types, inter=Link(1e6, 1e-5))
    costs = CostModel(theory, on, "fp32", "sgd", "train")
    problem = build(theory, costs, Restriction(forms=PADDED))
    shares = {cut: np.array([0.75, 0.25]) for cut in problem.cuts}
    statistics = Statistics()
    last = search(Synthesis(problem, shares, None), statistics)
    assert last is not None
    found = solution(problem, last, last.estimate, program_key(theory), statistics)
    print("\n".join([*chain(problem, last), str(found.program), str(statistics)]))
    assert chain(problem, last) == printed(PARTIAL_PROGRAMS)
    assert printed(str(found.program)) == printed(PROGRAM)
    replay(found.program, theory, found.storage_of)
    count = Enumeration(theory, costs, shares, forms=PADDED).run()
    assert count.programs == 5749
    assert found.cost == pytest.approx(count.cost, rel=1e-9)
    assert statistics.expansions < 10
