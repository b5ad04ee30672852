"""Random legal programs: the theory and the runtime are right together, whatever a planner would choose.

In: the theory of a graph, a program key, a random generator. Out: a `Program` and how its parameters and buffers are stored; or a whole
`Plan` with random lengths. Invariant: the program passes `replay`. Nodes are visited in order; each takes a random triple, its operands
come by random conversions from wherever they are available; a parameter's or buffer's storage is chosen at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from random import Random

from hapx.cluster.spec import ClusterSpec
from hapx.ir import Graph, Kind, OpCall
from hapx.layout import divide
from hapx.plan import VERSION, Communication, Copy, Instruction, Plan, Program, ProgramKey, Stage, Storage, Triple
from hapx.restriction import Restriction
from hapx.states import REPLICATED, Cut, Partial, Placement, Property, Row, Sharded
from hapx.theory.conversion import ALL_FORMS, paths
from hapx.theory.replay import replay
from hapx.theory.triple import Theory
from hapx.verify import cuts_of
from support.plans import cluster, predicted

Path = tuple[Communication, ...]
TRIES = 400
WANTED = 1e12


@dataclass(frozen=True, slots=True)
class Taste:
    """What a random program is made of. `lazy`: how often operands are taken as they are, if any triple allows it; `detour`: how often a
    conversion goes through another placement; `freed`: how often a gathered parameter is freed; `cut`, `partial`, `composite`: weight of a
    triple that divides the work, that has a Partial in it, or whose body is a composite, beside one that has neither; `wanted`: triples that
    are taken wherever there are any; `whole`: parameters are stored whole where that leads anywhere."""

    lazy: float = 0.6
    detour: float = 0.08
    freed: float = 0.5
    cut: float = 4.0
    partial: float = 3.0
    composite: float = 3.0
    wanted: Callable[[Triple], bool] | None = None
    whole: bool = False


@dataclass
class _Draft:
    """What is available, and the instructions that led to it."""

    theory: Theory
    rng: Random
    taste: Taste
    storage: dict[str, Placement]
    available: dict[str, list[Placement]]
    instructions: list[Instruction] = field(default_factory=list)

    def copy(self) -> _Draft:
        return replace(
            self, storage=dict(self.storage), available={n: list(ps) for n, ps in self.available.items()}, instructions=list(self.instructions)
        )

    def bring(self, tensor: str, target: Placement) -> bool:
        """Make `tensor` available in `target`; False where no conversion leads there."""
        have = self.available[tensor]
        if target in have:
            return True
        if not have:
            return self._store(tensor, target) and self.bring(tensor, target)
        if self.rng.random() < self.taste.detour:
            between = self.rng.choice(placements_of(self.theory, tensor))
            if between not in have and between != target and self._way(tensor, between, have):
                self._convert(tensor, between, have)
        return self._convert(tensor, target, have)

    def _store(self, tensor: str, target: Placement) -> bool:
        """Choose how a parameter or buffer is stored, such that `target` can be reached."""
        options = [p for p in self.theory.stored[tensor] if self._way(tensor, target, [p])]
        if options:
            self.storage[tensor] = options[0] if self.taste.whole else self.rng.choice(options)  # the first is whole
            self.available[tensor].append(self.storage[tensor])
        return bool(options)

    def _way(self, tensor: str, target: Placement, sources: Sequence[Placement]) -> list[tuple[Placement, Path]]:
        ref, mesh = self.theory.graph.refs[tensor], self.theory.mesh
        return [(s, path) for s in sources for path in paths(ref, mesh, s, target, ALL_FORMS)]

    def _convert(self, tensor: str, target: Placement, sources: Sequence[Placement]) -> bool:
        ways = self._way(tensor, target, sources)
        if not ways:
            return False
        # sources first: otherwise those with many paths hide the others
        source = self.rng.choice(list(dict.fromkeys(s for s, _ in ways)))
        path = self.rng.choice([p for s, p in ways if s == source])
        kept = self.theory.graph.mode == "eval" or self.theory.graph.refs[tensor].kind is not Kind.PARAMETER
        if not kept and self.rng.random() < self.taste.freed:
            path = tuple(replace(c, free=isinstance(c.source, Sharded) and c.target == REPLICATED and c.gradient) for c in path)
        triple = Triple(None, (Property(tensor, source),), (Property(tensor, target),), path)
        self.instructions.append(Instruction(triple))
        self.available[tensor].append(target)
        return True

    def run(self, triple: Triple) -> bool:
        """Append a node's triple with the conversions it needs."""
        if not all(self.bring(p.tensor, p.placement) for p in triple.pre):
            return False
        self.instructions.append(Instruction(triple))
        for p in triple.post:
            self.available[p.tensor].append(p.placement)
        return True

    def missing(self, triple: Triple) -> int:
        """How many operands are not available as the triple reads them (those that are stored nowhere yet do not count)."""
        return sum(bool(self.available[p.tensor]) and p.placement not in self.available[p.tensor] for p in triple.pre)


def weight(triple: Triple, taste: Taste) -> float:
    """How likely a triple is among those of its node."""
    result = WANTED if taste.wanted is not None and taste.wanted(triple) else 1.0
    assert isinstance(triple.body, OpCall)
    if triple.body.target.startswith("hapx."):
        result *= taste.composite
    for axis, cut in enumerate(triple.work):
        if cut is not None:
            result *= taste.cut
        elif any(isinstance(p.placement.states[axis], Partial) for p in (*triple.pre, *triple.post)):
            result *= taste.partial
    return result


_PLACEMENTS: dict[int, tuple[Theory, dict[str, list[Placement]]]] = {}


def placements_of(theory: Theory, tensor: str) -> list[Placement]:
    """Every placement in which some triple, the storage or an output has the tensor."""
    if id(theory) not in _PLACEMENTS:
        found: dict[str, dict[Placement, None]] = {n: dict.fromkeys(theory.stored.get(n, ())) for n in theory.graph.refs}
        for triple in (t for ts in theory.triples for t in ts):
            for p in (*triple.pre, *triple.post):
                found[p.tensor][p.placement] = None
        _PLACEMENTS[id(theory)] = theory, {n: list(ps) for n, ps in found.items()}
    return _PLACEMENTS[id(theory)][1][tensor]


def random_program(theory: Theory, key: ProgramKey, rng: Random, taste: Taste | None = None) -> tuple[Program, dict[str, Placement]]:
    """A legal program and how its parameters and buffers are stored. The result passes `replay`."""
    taste = taste or Taste()
    graph, whole = theory.graph, Placement((REPLICATED,) * len(theory.mesh.axes))
    given = {n for n, r in graph.refs.items() if r.kind in (Kind.INPUT, Kind.CONSTANT) and n not in graph.producer}
    draft = _Draft(theory, rng, taste, {}, {n: [whole] if n in given else [] for n in graph.refs})
    for triples in theory.triples:
        draft = _step(draft, triples)
    for name in theory.stored:
        if name not in draft.storage:  # used by no node
            draft.storage[name] = rng.choice(theory.stored[name])
    gives = []
    for output in graph.outputs:
        options = list(theory.outputs[output.tensor])
        rng.shuffle(options)
        target = next(p for p in options if draft.bring(output.tensor, p))
        gives.append(Property(output.tensor, target))
    needs = [Property(n, p) for n, p in draft.storage.items()] + [Property(r.name, whole) for r in graph.sources if r.name not in draft.storage]
    program = Program(key, theory.mesh, tuple(draft.instructions), tuple(needs), tuple(gives))
    replay(program, theory, draft.storage)
    return program, draft.storage


def _step(draft: _Draft, triples: Sequence[Triple]) -> _Draft:
    """The draft with one of the node's triples appended."""
    rng, taste = draft.rng, draft.taste
    weights = [weight(t, taste) for t in triples]
    for _ in range(TRIES):
        drawn = rng.choices(triples, weights, k=24) if rng.random() < taste.lazy else rng.choices(triples, weights)
        triple = min(drawn, key=draft.missing)
        trial = draft.copy()
        if trial.run(triple):
            return trial
    raise AssertionError(f"no way to run {triples[0].body}")


# ---- plans -----------------------------------------------------------------------------------------------------------------


def random_lengths(cut: Cut, size: int, rng: Random) -> tuple[int, ...]:
    """Units dealt out to `size` devices: nearly even, anyhow, or with zeros."""
    kind = rng.random()
    if kind < 0.2:
        return divide(cut.units, size)
    able = [j for j in range(size) if kind < 0.6 or rng.random() < 0.6] or [rng.randrange(size)]
    borders = sorted(rng.randint(0, cut.units) for _ in able[1:])
    shares = dict(zip(able, (b - a for a, b in zip([0, *borders], [*borders, cut.units], strict=True)), strict=True))
    return tuple(shares.get(j, 0) for j in range(size))


def program_key(graph: Graph) -> ProgramKey:
    return ProgramKey(graph.mode, tuple(graph.refs[n].shape for n in graph.input_names))


Deal = Callable[[Cut, int, Random], tuple[int, ...]]


def random_plan(theory: Theory, rng: Random, taste: Taste | None = None, deal: Deal = random_lengths) -> Plan:
    """A plan with one random program on the theory's mesh; `deal` chooses lengths."""
    program, storage = random_program(theory, program_key(theory.graph), rng, taste)
    lengths = {c: deal(c, theory.mesh.sizes[c.row.axis], rng) for c in cuts_of(program, storage) if c.row.kind != "even"}
    return make_plan(theory.graph, program, storage, lengths)


def make_plan(graph: Graph, program: Program, storage: Mapping[str, Placement], lengths: Mapping[Cut, tuple[int, ...]]) -> Plan:
    """A plan of one program."""
    mesh, key = program.mesh, program.key
    count = prod(mesh.sizes)
    rows: dict[Row, tuple[float, ...]] = {c.row: tuple(n / c.units for n in ns) for c, ns in lengths.items()}
    stage = Stage(tuple(range(count)), {key: (0, len(graph.nodes))}, mesh, rows, {key: dict(lengths)}, {key: program})
    tied = {group[0]: group[1:] for group in graph.tied}
    stored = tuple(Storage(n, tied.get(n, ()), (Copy(0, p),)) for n, p in storage.items())
    plan = Plan(
        VERSION, {key: graph}, _cluster(mesh.sizes), Restriction(), stored, (stage,), {},
        1.0, (0,) * count, (1 / count,) * count, "float64", "sgd", {},
    )  # fmt: skip
    return predicted(plan)


@cache
def _cluster(sizes: tuple[int, ...]) -> ClusterSpec:
    return cluster([prod(sizes[1:])] * sizes[0] if len(sizes) > 1 else sizes)
