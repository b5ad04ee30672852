"""Exact losses over micro-batches: the graph of one part of a batch, rewritten so that the losses of all parts sum up to that of the whole.

In: a graph captured at the shapes of one of n equal parts of a batch, and the graph of the same model captured at the whole batch. Out: a graph for
the parts, with `Graph.micro_batches`. Invariant (n parts of the whole batch W, parameters p; gradients follow, since every part adds its own):

    sum over parts m of loss(m, p) = loss of the whole(W, p)        where no operator mixes samples

The parts are an axis of a mesh whose coordinates run one after another. So the proof is the theory's: each value of the whole batch's graph gets the
states that the one-axis rules of its operator give it: a Site (the parts have pieces of it), Replicated (all parts have it), Partial (it is the sum
over the parts). The value itself, as captured, is its state *own* where it is none of these: a mean over the part's samples, say. Then

- a mean over samples becomes Partial when it is divided by n; a mean over a count that is data (`ignore_index`, weights of classes) becomes a sum
  over the part's rows, divided by the count of the whole batch, which depends on inputs only and is computed before (`hapx.theory.counts`):
  a part without a single target then adds zero, where its mean would be nan;
- whatever depends on inputs only and is needed as a whole (`mask.sum()` as a divisor) is computed before, likewise;
- numbers that depend on the size of the batch (`/ x.shape[0]`) are those of the whole batch;
- what mixes samples (batch norm, every sample against every other) sees those of its part; a term of the loss that depends on it and is in no other
  state is divided by n. Such a program equals one device that runs the same parts, and `mixing` names what mixes.

A value has several versions, one per state; those that nothing reads are dropped. `cost` prefers versions that are there already to those that are
computed before (10), and both to terms that are divided by n because they mix samples (1000).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hapx.errors import PlanError
from hapx.graph.segments import graph_hash
from hapx.ir import CONTINUOUS, Graph, Kind, MicroBatches, OpCall, Output, Ref, TensorRef, TorchConst
from hapx.rules import Rule, Site, Slot
from hapx.states import INVARIANT, PARTIAL, REPLICATED
from hapx.theory.counts import Count, Whole, calling, casting, counts_graph, from_inputs
from hapx.theory.grains import Grains, find_grains
from hapx.theory.micro_calls import Cutting, PartCall, Way, without_size
from hapx.theory.ops.losses import SUM
from hapx.theory.rewriting import Rewriting
from hapx.warnings import HapWarning, warn

SHARED, COUNTED, MIXED = 1, 10, 1000
MAX_COUNTED = 1 << 20  # elements of a value that is computed from the whole batch before
FILLS = frozenset(f"aten.{name}" for name in ("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"))
NONE = 0


class MixedSamplesWarning(HapWarning):
    """An operator mixes the samples of a batch: with micro-batches it sees only those of one."""


def normalised(graph: Graph, whole: Graph, grains: Grains | None = None) -> Graph:
    """`graph`, captured at the shapes of a part of the batch of `whole`, for parts whose losses sum up to that of the whole.

    `grains`: of `whole`. Raises PlanError where the parts are not equal, or a result cannot be put together from those of the parts."""
    number, rest = divmod(whole.batch, graph.batch) if graph.batch else (0, 1)
    if rest or number < 1:
        raise PlanError(f"a batch of {whole.batch} is not cut into equal parts of {graph.batch}", allowed="a number of micro-batches that divides it")
    if number == 1:
        results = tuple((o.tensor, REPLICATED) for o in graph.outputs if o.role == "result")
        return _hashed(replace(graph, micro_batches=MicroBatches(1, (), None, results)))
    return _Walk(graph, whole, grains or find_grains(whole), number).graph()


def batch_inputs(whole: Graph, grains: Grains) -> tuple[bool, ...]:
    """Which of the inputs have their samples along dim 0: those as long as the batch, but for tables that are as long by chance, which rules join to
    another dim of an input and not to the batch."""
    refs = [whole.refs[n] for n in whole.input_names]
    long = [bool(r.shape) and r.shape[0] == whole.batch for r in refs]
    first = next((grains.classes.get((r.name, Site(0))) for r, is_long in zip(refs, long, strict=True) if is_long), None)
    others = {grains.classes.get((r.name, Site(d))) for r in refs for d in range(1, len(r.shape))} - {None, first}
    return tuple(is_long and grains.classes.get((r.name, Site(0))) not in others for r, is_long in zip(refs, long, strict=True))


def warn_of_mixing(graph: Graph) -> None:
    """A MixedSamplesWarning that names what mixes samples, if anything does."""
    micro = graph.micro_batches
    if micro is None or not micro.mixing:
        return
    named = "; ".join(f"{target} ({source})" for target, source in micro.mixing)
    warn(
        f"samples are mixed by {named}: with {micro.number} micro-batches training equals one device that runs the same micro-batches, "
        "not the whole batch at once",
        MixedSamplesWarning,
    )


@dataclass(frozen=True, slots=True)
class _Own:
    """The value as captured, in no known relation to that of the whole batch."""


@dataclass(frozen=True, slots=True)
class _Positions:
    """The numbers of the part's own samples, from 0."""


OWN, POSITIONS = _Own(), _Positions()
State = Slot | _Own | _Positions


@dataclass(frozen=True, slots=True)
class Version:
    """A value in some state, by its name in the new graph."""

    name: str
    cost: int = 0


class _Walk:
    """The new graph under way. Names of tensors are those of `graph`, which are those of `whole`."""

    def __init__(self, graph: Graph, whole: Graph, grains: Grains, number: int):
        self.small, self.whole, self.grains, self.number = graph, whole, grains, number
        self.cutting, self.inputs_only = Cutting(whole, grains, number), from_inputs(whole)
        self.versions: dict[str, dict[State, Version]] = {}
        self.out = Rewriting(graph, whole.refs)
        self.shared: set[str] = set()  # tensors that are Partial only because they were divided
        self.counted: dict[Whole | Count, str] = {}
        self.alike = _alike(graph, whole)

    # ---- versions -----------------------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        self._given()
        for i in range(len(self.small.nodes)):
            self._node(i)
        return self._finish()

    def _given(self) -> None:
        """Parameters and the like are the same for all parts; inputs are cut or whole."""
        self.cut = []
        for name in self.out.refs:
            own, whole = self.small.refs[name], self.whole.refs.get(name)
            found: dict[State, Version] = {OWN: Version(name)}
            self.versions[name] = found
            if own.kind is Kind.INPUT and whole is not None and own.shape != whole.shape:
                if not whole.shape or own.shape != (whole.shape[0] // self.number, *whole.shape[1:]):
                    raise PlanError(f"input {name!r} has shape {list(own.shape)} in a part of {list(whole.shape)}", allowed="parts of its first dim")
                self.cut.append(name)
                if self.cutting.placement(whole, Site(0)) is not None:
                    found[Site(0)] = Version(name)
            elif whole is not None and own.shape == whole.shape and self.small.constants.get(name) == self.whole.constants.get(name):
                found[REPLICATED] = Version(name)

    def _node(self, i: int) -> None:
        own = self.small.nodes[i]
        names = own.call.refs()
        exact = all(self._exact(n) for n in names)
        self.out.add(own, i)
        for ref in own.outputs:
            self.versions[ref.name] = {OWN: Version(ref.name)}
        if i < self.alike:
            self._made_from_numbers(i)
            best: dict[tuple[Slot, ...], tuple[int, Rule, tuple[Version, ...], PartCall]] = {}
            for rule in self.grains.rules[i]:
                found = self.by_rule(i, rule)
                if found is not None and (rule.outputs not in best or found[0] < best[rule.outputs][0]):
                    best[rule.outputs] = (found[0], rule, found[1], found[2])
            for cost, rule, operands, call in best.values():
                self._make(i, rule, operands, call, cost)
            self._computed_before(i)
        if exact and not any(self._exact(o.name) for o in own.outputs):
            self.out.mix(own.outputs[0].name)

    def by_rule(self, i: int, rule: Rule) -> tuple[int, tuple[Version, ...], PartCall] | None:
        """What it costs to follow a rule, the versions of the operands, the call. None if it cannot be followed."""
        if INVARIANT in rule.operands or INVARIANT in rule.outputs:
            return None
        names = self.small.nodes[i].call.refs()
        found = [self.versions[n].get(s) for n, s in zip(names, rule.operands, strict=True)]
        if None in found:
            sums = any(v is not None and s == PARTIAL and n not in self.shared for n, s, v in zip(names, rule.operands, found, strict=True))
            found = [v or self.find(n, s, i) if sums else v for n, s, v in zip(names, rule.operands, found, strict=True)]
        versions = tuple(v for v in found if v is not None)
        if len(versions) < len(found):
            return None
        call = self.cutting.call(i, rule, self.small.nodes[i])
        return None if call is None else (sum(v.cost for v in versions), versions, call)

    def _exact(self, name: str) -> bool:
        """Whether something is known of a tensor but what its part has."""
        return any(s != OWN and not (s == PARTIAL and name in self.shared) for s in self.versions[name])

    def find(self, name: str, slot: Slot, i: int) -> Version | None:
        """A tensor as a term of a sum over the parts: divided by their number where they all have it, or each its own."""
        found = self.versions[name]
        if slot == PARTIAL and PARTIAL not in found and (source := self._divisible(name)) is not None:
            cost = source.cost + (SHARED if REPLICATED in found else MIXED)
            found[PARTIAL] = Version(self._divided(source.name, i), cost)
            self.shared.add(name)
        return found.get(slot)

    def _divisible(self, name: str) -> Version | None:
        found = self.versions[name]
        same = name in self.whole.refs and self.small.refs[name].shape == self.whole.refs[name].shape
        own = found[OWN] if same and not any(isinstance(s, Site) for s in found) else None
        return found.get(REPLICATED, own) if self.small.refs[name].dtype in CONTINUOUS else None

    def _made_from_numbers(self, i: int) -> None:
        """Tensors filled with one number have no positions: the part's is a piece of the whole's. Numbers 0, 1, ... of samples are kept apart."""
        own, whole = self.small.nodes[i], self.whole.nodes[i]
        (small, *_), (big, *_) = own.outputs, whole.outputs
        if own.call.op in FILLS and without_size(own.call) == without_size(whole.call):
            for dim in (d for d, (a, b) in enumerate(zip(small.shape, big.shape, strict=True)) if a * self.number == b):
                for site, _ in self.grains.sites_of.get(big.name, ()):
                    if site.dim == dim and self.cutting.placement(big, site) and self.cutting.shape(big, site) == small.shape:
                        self.versions[small.name][site] = Version(small.name)
        counts_samples = own.call.op == "aten.arange" and (small.shape, big.shape) == ((self.small.batch,), (self.whole.batch,))
        if counts_samples and own.call.get("start", 0) == 0 and own.call.get("step", 1) == 1:
            self.versions[small.name][POSITIONS] = Version(small.name)
        if own.call.target == "aten.index.Tensor" and self._each_at_its_own(own.call, big):
            self.versions[small.name][Site(0)] = Version(small.name)

    def _each_at_its_own(self, call: OpCall, big: TensorRef) -> bool:
        """Whether the call is x[arange(batch), where]: sample number k is read with index number k."""
        source, indices = call["self"], call["indices"]
        assert isinstance(source, Ref)
        if not all(isinstance(v, Ref) for v in indices) or self.whole.refs[source.name].shape[0] != self.whole.batch:
            return False
        names = [v.name for v in indices]
        raw = all(self.versions[n].get(s) == self.versions[n][OWN] for n, s in [(source.name, Site(0)), *((n, Site(0)) for n in names[1:])])
        vectors = all(self.whole.refs[n].shape == (self.whole.batch,) for n in names)
        return raw and vectors and POSITIONS in self.versions[names[0]] and self.cutting.placement(big, Site(0)) is not None

    def _computed_before(self, i: int) -> None:
        """Values that depend on inputs only can be had whole."""
        for ref in self.whole.nodes[i].outputs:
            found = self.versions[ref.name]
            there = found.get(REPLICATED)
            split = any(isinstance(s, Site) for s in found)
            if ref.name in self.inputs_only and ref.size <= MAX_COUNTED and not split and (there is None or there.cost):
                found[REPLICATED] = Version(self._count(Whole(ref.name), f"{ref.name}_of_all", ref.shape, ref.dtype), COUNTED)

    # ---- steps --------------------------------------------------------------------------------------------------------

    def _make(self, i: int, rule: Rule, operands: tuple[Version, ...], made: PartCall, cost: int) -> None:
        """The versions that a rule gives the outputs of a node."""
        own = self.small.nodes[i]
        names = tuple(v.name for v in operands)
        once = made.way is Way.DRAWS or any(self.small.refs[n].mutated for n in own.call.refs())
        if once and (names != own.call.refs() or made.call != own.call):
            return  # the call as captured may be there, too
        if made.way is Way.COUNTS:
            over = self._over_count(i, names)
            outputs = [over] if over is not None else []
        elif made.way is Way.SHARES:
            (mean,) = self.out.call(i, made.call, names, [o.shape for o in own.outputs])
            outputs = [self._divided(mean, i)]
        else:
            shapes = [self.cutting.shape(o, s) for o, s in zip(self.whole.nodes[i].outputs, rule.outputs, strict=True)]
            outputs = self.out.call(i, made.call, names, shapes)
            if made.way is Way.MIXES:
                self.out.mix(outputs[0])
        for ref, slot, name in zip(own.outputs, rule.outputs, outputs, strict=False):
            found = self.versions[ref.name]
            if slot not in found or cost < found[slot].cost:
                found[slot] = Version(name, cost)

    def _divided(self, name: str, i: int) -> str:
        """A tensor over the number of parts."""
        return self.out.after(i, calling("aten.div.Tensor", self=Ref(name), other=self.number), self.out.refs[name], "share")

    def _over_count(self, i: int, names: tuple[str, ...]) -> str | None:
        """A mean loss as the sum over the part's rows, divided by the count of the whole batch; None where the count is not known before."""
        own = self.small.nodes[i]
        of = {k: v.name for k, v in own.call.args if isinstance(v, Ref)}
        target, weight = of["target"], of.get("weight")
        if target not in self.inputs_only or (weight is not None and weight not in self.inputs_only):
            return None
        dtype = own.outputs[0].dtype
        half = dtype not in ("float32", "float64")
        wide = "float32" if half else dtype  # sums overflow half precision where means do not, and counts are rounded
        name = self._count(Count(target, weight, own.call["ignore_index"], wide), f"{own.outputs[0].name}_count", (), wide)
        reduced = own.call.replace(reduction=NONE if half else SUM)
        (total,) = self.out.call(i, reduced, names, [self.small.refs[target].shape if half else ()])
        if half:
            added = calling("aten.sum.default", self=Ref(total), dtype=TorchConst("dtype", wide))
            total = self.out.after(i, added, replace(own.outputs[0], dtype=wide), "sum")
        total = self.out.after(i, calling("aten.div.Tensor", self=Ref(total), other=Ref(name)), self.out.refs[total], "share")
        return self.out.after(i, casting(total, dtype), own.outputs[0], "share") if half else total

    def _count(self, what: Whole | Count, name: str, shape: tuple[int, ...], dtype: str) -> str:
        """The input that brings a value of the whole batch."""
        if what not in self.counted:
            self.counted[what] = self.out.input(name, shape, dtype)
        return self.counted[what]

    # ---- the graph ----------------------------------------------------------------------------------------------------

    def _finish(self) -> Graph:
        outputs, results = [], []
        for output in self.small.outputs:
            version, slot = self._output(output)
            outputs.append(replace(output, tensor=version.name))
            if output.role == "result":
                results.append((version.name, slot))
        made, mixing = self.out.graph(outputs)
        counted = {name: what for what, name in self.counted.items() if name in made.refs}
        micro = MicroBatches(self.number, tuple(self.cut), counts_graph(self.whole, counted), tuple(results), mixing)
        return _hashed(replace(made, micro_batches=micro))

    def _output(self, output: Output) -> tuple[Version, Slot]:
        """The version in which an output leaves a part."""
        found, last = self.versions[output.tensor], len(self.small.nodes) - 1
        if output.role == "loss":
            version = self.find(output.tensor, PARTIAL, last)
            assert version is not None, "a loss is a floating scalar"
            return version, PARTIAL
        if output.role == "buffer":  # written by one part after the other
            return found[OWN], REPLICATED
        order: list[Slot] = [*(s for s in found if isinstance(s, Site)), *(s for s in (REPLICATED, PARTIAL) if s in found)]
        free = [s for s in order if found[s].cost == 0] + order
        version = found[free[0]] if free else self.find(output.tensor, PARTIAL, last)
        if version is None:
            made = self.small.nodes[self.small.producer[output.tensor]]
            raise PlanError(
                f"the result {output.target or output.tensor!r} depends on all samples and is not the sum of those of micro-batches",
                where=made.source, hint="return it per sample, or plan without micro-batches",
            )  # fmt: skip
        return version, free[0] if free else PARTIAL


def _alike(graph: Graph, whole: Graph) -> int:
    """How many nodes, from the first one, make the same tensors from the same ones in both graphs."""
    for i, (a, b) in enumerate(zip(graph.nodes, whole.nodes, strict=False)):
        same = (a.call.target, a.call.refs(), a.casts) == (b.call.target, b.call.refs(), b.casts)
        if not same or [o.name for o in a.outputs] != [o.name for o in b.outputs]:
            return i
    return min(len(graph.nodes), len(whole.nodes))


def _hashed(graph: Graph) -> Graph:
    return replace(graph, hash=graph_hash(graph))
