"""Independent check of a program: it is replayed against the theory, instruction by instruction.

In: a Program, the Theory of its graph on its mesh, the placements in which parameters and buffers are stored. Raises PlanError at
the first instruction that is not a triple of the theory or not a legal conversion, that reads a property nobody made, or if the
program does not compute every output in an allowed placement. Shares nothing with the search but the theory itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from hapx.errors import PlanError
from hapx.ir import Kind
from hapx.plan import Program, Triple
from hapx.states import REPLICATED, Placement, Property
from hapx.theory.conversion import step_is_legal
from hapx.theory.triple import Theory


def replay(program: Program, theory: Theory, storage: Mapping[str, Placement]) -> None:
    """Raise PlanError unless `program` provably computes the graph's outputs."""
    have = _start(program, theory, storage)
    done: list[int] = []
    for k, instruction in enumerate(program.instructions):
        triple = instruction.triple
        where = f"instruction {k}"
        for needed in triple.pre:
            if needed not in have:
                raise PlanError(f"reads {needed}, which nothing before it makes", where=where)
        if triple.node is None:
            _conversion(triple, theory, where)
        elif not 0 <= triple.node < len(theory.triples) or triple not in theory.triples[triple.node]:
            raise PlanError(f"{triple} is not a triple of the theory", where=where)
        else:
            done.append(triple.node)
        for made in triple.post:
            if made in have:
                raise PlanError(f"makes {made} a second time", where=where)
            have.add(made)
    if done != list(range(len(theory.graph.nodes))):
        missing = sorted(set(range(len(theory.graph.nodes))) - set(done))
        raise PlanError(f"runs nodes {done[:5]}... instead of each once in order; missing {missing[:5]}", where="program")
    _finish(program, theory, have)


def _start(program: Program, theory: Theory, storage: Mapping[str, Placement]) -> set[Property]:
    """Properties that hold before the first instruction."""
    whole = Placement((REPLICATED,) * len(theory.mesh.axes))
    if program.mesh != theory.mesh:
        raise PlanError("the program's mesh is not the theory's", where="program")
    have = {Property(ref.name, whole) for ref in theory.graph.sources}
    for ref in theory.graph.refs.values():
        if ref.kind in (Kind.PARAMETER, Kind.BUFFER, Kind.RECEIVED):
            if ref.name not in storage:
                raise PlanError(f"{ref.name} is not {'received' if ref.kind is Kind.RECEIVED else 'stored'}", where="storage")
            if storage[ref.name] not in theory.stored[ref.name]:
                raise PlanError(f"{ref.name} cannot be stored as {storage[ref.name]}", where="storage")
            have.add(Property(ref.name, storage[ref.name]))
    for needed in program.needs:
        if needed not in have:
            raise PlanError(f"needs {needed}, which is not given", where="program")
    return have


def _conversion(triple: Triple, theory: Theory, where: str) -> None:
    if len(triple.pre) != 1 or len(triple.post) != 1 or not isinstance(triple.body, tuple) or not triple.body:
        raise PlanError(f"{triple} is not a conversion of one tensor", where=where)
    (pre,), (post,) = triple.pre, triple.post
    ref = theory.graph.refs.get(pre.tensor)
    if ref is None or pre.tensor != post.tensor:
        raise PlanError(f"{triple} converts one tensor into another", where=where)
    at = pre.placement
    for step in triple.body:
        if not step_is_legal(ref, at, step):
            raise PlanError(f"{step} is not legal for {ref} in placement {at}", where=where)
        at = at.with_state(step.axis, step.target)
    if at != post.placement:
        raise PlanError(f"{triple} leads to {at}", where=where)


def _finish(program: Program, theory: Theory, have: set[Property]) -> None:
    given = {p.tensor: p for p in program.gives}
    for output in theory.graph.outputs:
        if output.tensor not in given:
            raise PlanError(f"output {output.tensor} is not given", where="program")
        made = given[output.tensor]
        if made not in have:
            raise PlanError(f"gives {made}, which nothing makes", where="program")
        if made.placement not in theory.outputs[output.tensor]:
            raise PlanError(f"gives {made}; the {output.role} must be {' or '.join(map(str, theory.outputs[output.tensor]))}", where="program")
