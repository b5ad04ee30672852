"""The cost model of a theory on a cluster: what each step of a program adds, as terms (HAP section 5.1, generalised).

In: a theory (its graph and mesh), a cluster, precision, optimizer and mode. Out: per triple and per conversion a `StepCost`, per stored
parameter its bytes and the time of its update. For a program Q at shares B, with phases i that begin at a collective which cuts, and kinds k,

    t(Q, B) = sum_i comm_i(B) + sum_i max_k comp_ik(B)      forward and backward each, + synchronisation and update once per iteration.

Invariants: a conversion without communication costs nothing, neither time nor memory (the search's dominance rests on it); nodes that are alike share
their terms; in eval mode there is no backward, no kept activation and no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from hapx.buckets import BUCKET_BYTES
from hapx.cluster.spec import PRECISIONS, ClusterSpec
from hapx.cost import memory
from hapx.cost.compute import Work, hidden, lies, work
from hapx.cost.copies import BUCKET, ENTERED, NO_COPIES, Copies, copied, copies, operations, strided
from hapx.cost.edges import Bundle, EdgePrices
from hapx.cost.memory import UPDATE_PASSES
from hapx.cost.network import SCALAR_BYTES, AxisLinks, Network
from hapx.cost.recut import moved
from hapx.cost.terms import Amounts, Piece, Shares, Term, Vector, maximum, total
from hapx.cost.view import View
from hapx.errors import HapError
from hapx.ir import Graph, Kind, Node, OpCall, TensorRef
from hapx.layout import Lengths, followers
from hapx.numbering import Numbering
from hapx.plan import Axes, Communication, Form, Instruction, Triple
from hapx.states import REPLICATED, Cut, Invariant, Partial, Placement, Replicated, Sharded, State, is_recut
from hapx.theory.factors import gathered as gathered_factor
from hapx.theory.triple import Theory
from hapx.transposes import backward_collective, forward_collective

MEAN = 1
# dtypes that have a speed of their own whatever precision float32 products run at, and whose speed that is
OWN_SPEED = MappingProxyType({**{name: name for name in ("float16", "bfloat16", "float64")}, "complex128": "float64"})

Direction = Literal["forward", "backward", "synchronise"]


@dataclass(frozen=True, slots=True)
class CommunicationCost:
    """Seconds of one collective. cuts: it ends the running phase and takes the maximum over kinds; otherwise (inner axis of two levels) it is added
    to the pending compute of each kind. "synchronise": once per iteration, the maximum over kinds, whatever `cuts` says."""

    direction: Direction
    term: Term
    cuts: bool


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step of a program adds. forward, backward: compute seconds per kind; memory: bytes kept until backward.
    Communications come before the compute, in the order of the forward pass."""

    forward: Term | None
    backward: Term | None
    communication: tuple[CommunicationCost, ...]
    memory: Term | None

    def synchronisation(self, shares: Shares) -> float:
        """Seconds of what is synchronised once per iteration."""
        return sum(float(c.term.at(shares).max()) for c in self.communication if c.direction == "synchronise")


FREE = StepCost(None, None, (), None)


class CostModel:
    """Costs of the triples and conversions of `theory` on `cluster`.

    precision: the one that float32 products run at ("fp32", "tf32", "bf16", ...; other dtypes have their own). optimizer: a name of
    `hapx.cost.memory.STATES`. `kinds`: coordinates along the uneven axis of each kind; `sizes`: how many; `speeds`: relative speed of a coordinate of
    each kind (speeds x sizes sum to 1); `capacity`: bytes that may be used on a device of each kind. With `lengths`, every term is a constant
    at these lengths, exact where even axes cut uneven pieces. repeats: the program runs so often per iteration (on micro-batches): seconds are of one
    run, with its part of what happens once per iteration. in_flight: what is kept until backward is there so many times. Raises HapError for an
    unknown precision or optimizer."""

    def __init__(
        self, theory: Theory, cluster: ClusterSpec, precision: str, optimizer: str, mode: Literal["train", "eval"], *,
        lengths: Lengths | None = None, repeats: int = 1, in_flight: int = 1,
    ):  # fmt: skip
        self.theory, self.cluster, self.precision, self.optimizer, self.mode = theory, cluster, precision, optimizer, mode
        self.graph: Graph = theory.graph
        self.repeats, self.in_flight = repeats, in_flight
        known = dict.fromkeys([*PRECISIONS, *(dtype for kind in cluster.device_types.values() for dtype in kind.flops)])
        if precision not in known:
            raise HapError(f"unknown precision {precision!r}", where="precision", allowed=", ".join(known))
        self._states = memory.states_of(optimizer)
        self._kept = memory.kept(self.graph) if mode == "train" else frozenset()
        self._forgotten = memory.forgotten(self.graph) if mode == "train" else frozenset()
        self._converted_again = memory.converted_again(self.graph) if mode == "train" else frozenset()
        self._signatures: dict[int, int] = {}
        self.number = Numbering()  # of states, communications and the like, for keys of caches
        self._forms: dict[int, tuple[Triple, int]] = {}  # by identity of a triple
        self._every: dict[int, tuple[tuple[Instruction, ...], list[int]]] = {}  # by identity of a program's instructions, their forms
        self._see(View(theory.mesh, cluster, lengths))

    def _see(self, view: View) -> None:
        """Everything that depends on which devices are alike."""
        cluster, precision = self.cluster, self.precision
        self.view = view
        self.links: tuple[AxisLinks, ...] = Network(view).axes
        self.kinds: tuple[tuple[int, ...], ...] = view.kinds
        self.sizes: tuple[int, ...] = tuple(map(len, self.kinds))
        speed = np.array(view.worst(lambda d: cluster.type_of(d).speed(precision), min))
        self.speeds: Vector = speed / (speed * self.sizes).sum()
        self.capacity: Vector = np.array(view.worst(lambda d: memory.usable(cluster.type_of(d)), min))
        self.launch = view.worst(lambda d: cluster.type_of(d).kernel_latency)
        self.per_byte = view.worst(lambda d: 1.0 / cluster.type_of(d).memory_bandwidth)
        self._per_flop: dict[str, tuple[float, ...]] = {}
        self._by_form: dict[int, StepCost] = {}
        self._rooflines: dict[Any, Term | None] = {}
        self._conversions: dict[Any, StepCost] = {}
        self._updates: dict[tuple[float, Placement], Term] = {}
        self._steps: dict[Any, tuple[list[CommunicationCost], Piece, Piece]] = {}

    def at_lengths(self, lengths: Lengths) -> CostModel:
        """The same model at concrete lengths: only coordinates that also have equal lengths are one kind."""
        return self.changed(lengths=lengths)

    def changed(
        self, *, theory: Theory | None = None, cluster: ClusterSpec | None = None, lengths: Lengths | None = None,
        repeats: int | None = None, in_flight: int | None = None,
    ) -> CostModel:  # fmt: skip
        """The same model with some things changed. theory: of the same triples, perhaps on a mesh of other sizes, which is one of the cluster's."""
        twin = copy(self)
        twin.theory, twin.cluster = theory or self.theory, cluster or self.cluster
        assert twin.theory.graph is self.graph, "costs of another graph"
        twin.repeats, twin.in_flight = repeats or self.repeats, in_flight or self.in_flight
        twin._see(View(twin.theory.mesh, twin.cluster, self.view.lengths if lengths is None else lengths))
        return twin

    def lengths_to_shares(self, lengths: Mapping[Cut, tuple[int, ...]]) -> dict[Cut, Vector]:
        """Per kind, the largest share (length / units) of each cut of the uneven axis."""
        return {cut: np.array(own) for cut, own in self.view.shares(lengths).items()}

    @cached_property
    def again(self) -> frozenset[str]:
        """Tensors of the one block whose bytes are counted though it is computed again: while any block is, it takes as much."""
        return self.graph.recomputed - self._forgotten

    # --- storage ------------------------------------------------------------------------------------------------------------------------

    def storage(self, ref: TensorRef, placement: Placement) -> Term:
        """Bytes of a parameter (with gradient and optimizer state) or buffer as it is kept between steps."""
        times = self.in_flight if ref.kind is Kind.RECEIVED else 1
        return self._stored(ref, placement, times * memory.storage_bytes(ref, self._states, self.mode == "train"), bound=True)

    def gradient(self, ref: TensorRef, placement: Placement) -> Term:
        """Bytes of a parameter's gradient as it is kept between micro-batches."""
        training = self.mode == "train" and ref.requires_grad and ref.kind is Kind.PARAMETER
        return self._stored(ref, placement, ref.bytes if training else 0.0, bound=True)

    def update(self, ref: TensorRef, placement: Placement) -> Term:
        """Seconds that the optimizer takes per iteration to update what a device keeps of a parameter."""
        training = self.mode == "train" and ref.requires_grad and ref.kind is Kind.PARAMETER
        moved = UPDATE_PASSES * memory.storage_bytes(ref, self._states, True) if training else 0.0
        key = (moved, placement)
        if key not in self._updates:
            term = self._stored(ref, placement, moved / self.repeats, bound=False)
            self._updates[key] = Term(tuple(p.scaled(self.per_byte) for p in term.pieces))
        return self._updates[key]

    def _stored(self, ref: TensorRef, placement: Placement, size: float, bound: bool) -> Term:
        return Term((self._part(placement, size, bound),))

    def _part(self, placement: Placement, size: float, bound: bool = False) -> Piece:
        """`size` times the part of a tensor in `placement` that a device holds."""
        return self.view.fraction(placement, bound).scaled((size,) * len(self.kinds))

    # --- instructions -------------------------------------------------------------------------------------------------------------------

    def step(self, triple: Triple) -> StepCost:
        """Cost of a node's triple, composites with their communication included, or of a conversion. Alike ones share it."""
        form = self.form(triple)
        found = self._by_form.get(form)
        if found is None:
            found = self._by_form[form] = self._step_of(triple)
        return found

    def steps(self, instructions: tuple[Instruction, ...]) -> list[StepCost]:
        """As `step`, of a program's instructions."""
        known = self._by_form
        return [known.get(form) or self.step(i.triple) for form, i in zip(self.forms(instructions), instructions, strict=True)]

    def forms(self, instructions: tuple[Instruction, ...]) -> list[int]:
        """As `form`, of a program's instructions: looked up once."""
        found = self._every.get(id(instructions))
        if found is None or found[0] is not instructions:  # they are held, so that their identity stays their own
            found = self._every[id(instructions)] = instructions, [self.form(i.triple) for i in instructions]
        return found[1]

    def form(self, triple: Triple) -> int:
        """A number that triples share whose costs, and sizes of what they make and keep, are equal at any lengths."""
        known = self._forms.get(id(triple))
        if known is None or known[0] is not triple:  # it is held, so that its identity stays its own; in another process it is another's
            known = self._forms[id(triple)] = triple, self.number.of_value(self._form(triple))
        return known[1]

    def has_form_of(self, triple: Triple, like: Triple) -> None:
        """Says that a triple has the form of another one, so that it need not be looked at."""
        self._forms[id(triple)] = triple, self.form(like)

    def _step_of(self, triple: Triple) -> StepCost:
        if isinstance(triple.body, OpCall):
            assert triple.node is not None
            return self._instruction(triple, self.graph.nodes[triple.node], triple.body)
        (post,) = triple.post
        return self.conversion(self.graph.refs[post.tensor], triple.body, post.placement)

    def instruction(self, triple: Triple) -> StepCost:
        """As `step`, of a node's triple."""
        assert triple.node is not None, f"not an instruction: {triple}"
        return self.step(triple)

    def _form(self, triple: Triple) -> Any:
        """Equal for triples whose costs are equal at any lengths."""
        if not isinstance(triple.body, OpCall):
            (post,) = triple.post
            return self._route(self.graph.refs[post.tensor], triple.body, post.placement)
        assert triple.node is not None
        signature = self._signatures.get(triple.node)
        if signature is None:
            signature = self._signatures[triple.node] = self.number.of_value(self._signature(triple.node, self.graph.nodes[triple.node]))
        local = tuple(v for n, v in triple.body.args if isinstance(v, Axes) or n == "form") if triple.body.target.startswith("hapx.") else ()
        where = tuple([self.number.of_placement(p.placement) for p in (*triple.pre, *triple.post)])
        return signature, where, tuple([self.number(cut) for cut in triple.work]), local

    def _signature(self, index: int, node: Node) -> Any:
        """Equal for nodes whose costs are equal in equal placements."""
        first = node.outputs[0].name
        again = first in self.graph.recomputed, first in self._forgotten
        tensors = tuple([(self.graph.refs[n].kind, n in self._kept) for n in node.names])
        return self.graph.alike[index], tensors, lies(self.graph, node), again, tuple([dtype for _, dtype in node.casts])

    def _instruction(self, triple: Triple, node: Node, body: OpCall) -> StepCost:
        placements = triple.placements
        does = work(self.graph, node)
        cuts = triple.work or (None,) * len(self.theory.mesh.axes)
        everywhere = list(placements.values())
        done = (self.view.work(cuts, everywhere), does.forward)
        forward = self._roofline(node, [done], self._parts(does.moved, placements), 1) if does.moved else None
        backward = self._backward(node, body, does, cuts, placements) if self.mode == "train" and does.kernels_back else None
        communication = [c for c in self._composite(node, body, placements) if self.mode == "train" or c.direction == "forward"]
        if self.mode == "train" and node.outputs[0].name in self.graph.recomputed:
            communication += [replace(c, direction="backward") for c in communication if c.direction == "forward"]
        return StepCost(forward, backward, tuple(communication), self._activations(node, placements))

    def _roofline(self, node: Node, flops: Amounts, moved: Amounts, kernels: int) -> Term | None:
        """Seconds of an operator that does so many FLOPs and moves so many bytes. Alike ones share it."""
        dtype, number = node.outputs[0].dtype, self.number
        precision = OWN_SPEED.get(dtype, self.precision)
        key = precision, kernels, tuple([(number(p), n) for p, n in flops]), tuple([(number(p), n) for p, n in moved])
        if key not in self._rooflines:
            self._rooflines[key] = self._longest(precision, total(flops, len(self.kinds)), total(moved, len(self.kinds)), kernels)
        return self._rooflines[key]

    def _longest(self, precision: str, flops: Piece, moved: Piece, kernels: int) -> Term | None:
        if precision not in self._per_flop:
            self._per_flop[precision] = self.view.worst(lambda d: 1.0 / self.cluster.type_of(d).speed(precision))
        launch = tuple([kernels * seconds for seconds in self.launch])
        pieces = [moved.line(self.per_byte, launch)]
        return maximum(pieces if flops.zero else [flops.line(self._per_flop[precision], launch), *pieces])

    def _parts(self, sizes: Iterable[tuple[str, float]], placements: Mapping[str, Placement], bound: bool = False) -> Amounts:
        """What a device has of several tensors of so many bytes."""
        return [(self.view.fraction(placements[name], bound), size) for name, size in sizes]

    def _backward(self, node: Node, body: OpCall, does: Work, cuts: tuple[Cut | None, ...], placements: Mapping[str, Placement]) -> Term | None:
        """With sufficient factors, the weight's gradient is made whole on every device of the axes that gather them."""
        everywhere = list(placements.values())
        gathered = _axes(body, "gather")
        mostly = self.view.work(cuts, everywhere)
        of_weight = self.view.work(tuple(None if a in gathered else c for a, c in enumerate(cuts)), everywhere) if gathered else mostly
        flops = (mostly, does.backward - does.of_weight), (of_weight, does.of_weight)
        seen = {name: p.gathered(gathered) for name, p in placements.items()} if gathered else placements
        return self._roofline(node, flops, self._parts(does.moved_back, seen), does.kernels_back)

    def _composite(self, node: Node, body: OpCall, placements: Mapping[str, Placement]) -> list[CommunicationCost]:
        """Communication inside the local bodies of composites (see `hapx.theory.ops`)."""
        found: list[CommunicationCost] = []
        if (factor := gathered_factor(body)) is not None:
            for ref in (self.graph.refs[factor], node.outputs[0]):
                for axis in _axes(body, "gather"):
                    shard, whole = placements[ref.name], placements[ref.name].gathered((axis,))
                    form = Form(body["form"])
                    self._add(found, "backward", axis, self.links[axis].all_gather(form, self._part(shard, ref.bytes), self._part(whole, ref.bytes)))
        elif body.target == "hapx.cross_entropy":
            target = self.graph.refs[node.call["target"].name]
            rows = 4.0 * target.size
            for axis in _axes(body, "classes"):  # the maximum, then exponentials and the target's logit together
                for vectors in (1, 2):
                    self._add(found, "forward", axis, self.links[axis].all_reduce(self._part(placements[target.name], rows * vectors)))
            if node.call["reduction"] == MEAN:
                self._all_reduce(found, "forward", _axes(body, "batch"), 8.0)
        elif body.target == "hapx.nll_loss" and node.call["reduction"] == MEAN:
            self._all_reduce(found, "forward", _axes(body, "batch"), 8.0)
        elif body.target == "hapx.batch_norm":
            channels = 8.0 * self.graph.refs[node.call["input"].name].shape[1]
            self._all_reduce(found, "forward", _axes(body, "batch"), channels)
            self._all_reduce(found, "forward", _axes(body, "batch"), channels)
            if node.outputs[0].requires_grad:
                self._all_reduce(found, "backward", _axes(body, "batch"), 2 * channels)
        elif body.target == "hapx.instance_norm":  # means and variances of the running statistics
            self._all_reduce(found, "forward", _axes(body, "batch"), 16.0 * self.graph.refs[node.call["input"].name].shape[1])
        return found

    def _all_reduce(self, found: list[CommunicationCost], direction: Direction, axes: tuple[int, ...], size: float) -> None:
        for axis in axes:
            self._add(found, direction, axis, self.links[axis].all_reduce(self.view.constant(size), size <= SCALAR_BYTES))

    def _add(self, found: list[CommunicationCost], direction: Direction, axis: int, term: Term | None) -> None:
        if term is not None:
            found.append(CommunicationCost(direction, term, self.links[axis].cuts))

    def _activations(self, node: Node, placements: Mapping[str, Placement]) -> Term | None:
        """Outputs whose storage is kept, and what the operator keeps of its own. A Partial output is on its way to a sum: it counts with the
        instruction that saves it as Partial, or as the result of its conversion."""
        if self.mode != "train":
            return None
        made = [o for o in node.outputs if memory.allocates(self.graph, o.name, self._kept) and not _partial(placements[o.name])]
        forgets = node.outputs[0].name in self._forgotten
        kept = [*((o.name, float(o.bytes)) for o in made), *(() if forgets else hidden(self.graph, node))]
        for name in () if forgets else dict.fromkeys(memory.saved(node, self.graph)):
            ref = self.graph.refs[name]
            if ref.kind is Kind.VALUE and _partial(placements[name]):
                kept.append((name, float(ref.bytes)))
        sizes = [(name, self.in_flight * size) for name, size in kept]
        return maximum([total(self._parts(sizes, placements, bound=True), len(self.kinds))]) if kept else None

    # --- conversions --------------------------------------------------------------------------------------------------------------------

    def conversion(self, ref: TensorRef, path: tuple[Communication, ...], target: Placement) -> StepCost:
        """Cost of a path of communications that ends in `target`. Free paths cost nothing."""
        key = self._route(ref, path, target)
        known = self._conversions.get(key)
        if known is None:
            known = self._conversions[key] = self._conversion(ref, path, target)
        return known

    def _route(self, ref: TensorRef, path: tuple[Communication, ...], target: Placement) -> Any:
        """Equal for conversions whose costs are equal at any lengths."""
        again = ref.name in self._converted_again
        return ref.bytes, ref.kind, ref.name in self._kept, again, tuple([self.number(step) for step in path]), self.number.of_placement(target)

    def _conversion(self, ref: TensorRef, path: tuple[Communication, ...], target: Placement) -> StepCost:
        found: list[CommunicationCost] = []
        after, makes = target, False
        forward = backward = self.view.constant(0.0)
        for step in reversed(path):  # placements on the way follow from the target backwards
            assert after.states[step.axis] == step.target, (path, target)
            before = after.with_state(step.axis, step.source)
            runs, ahead, back = self._priced_step(ref, step, before, after)
            found[:0], forward, backward = runs, forward + ahead, backward + back
            makes |= forward_collective(step.source, step.target) is not None
            after = before
        held = self.held(ref, target) if makes and not any(step.free for step in path) else None
        return StepCost(maximum([forward]), maximum([backward]), tuple(found), held) if found or held is not None else FREE

    def held(self, ref: TensorRef, target: Placement) -> Term | None:
        """Bytes that stay allocated until backward where communication makes a tensor in `target`."""
        keeps = self.mode == "train" and ref.name in self._kept and not _partial(target)
        return maximum([self._part(target, float(self.in_flight * ref.bytes), bound=True)]) if keeps else None

    def _priced_step(self, ref: TensorRef, step: Communication, before: Placement, after: Placement) -> tuple[list[CommunicationCost], Piece, Piece]:
        """`_step` and what devices copy for it forward and backward, once for all that cost the same: of the other axes only how they cut matters."""
        parameter = ref.kind is Kind.PARAMETER  # of which buckets are summed over several axes together
        others = tuple([self.number(s) if parameter or isinstance(s, Sharded) else -1 for a, s in enumerate(after.states) if a != step.axis])
        key = (ref.bytes, parameter, ref.name in self._converted_again, self.number(step), others, after.nest)
        if key not in self._steps:
            found = self._step(ref, step, before, after)
            ways = self.copies(ref, step.axis, before, after, step.form, step.free) if found else (NO_COPIES, NO_COPIES)
            ahead, back = (self._copied(own, ref, step.axis, before, after) for own in ways)
            self._steps[key] = found, ahead, back
        return self._steps[key]

    def _step(self, ref: TensorRef, step: Communication, before: Placement, after: Placement) -> list[CommunicationCost]:
        found: list[CommunicationCost] = []
        if self.links[step.axis].size == 1:
            return found
        terms: dict[str, Term | None] = {}  # what runs in both directions has one
        for direction, name in self.collectives(ref, step.source, step.target, step.free):
            if direction == "synchronise":
                found.append(CommunicationCost(direction, self._in_bucket(ref, step, after), self.links[step.axis].cuts))
                continue
            if name not in terms:
                terms[name] = self._collective(name, ref, step, before, after)
            self._add(found, direction, step.axis, terms[name])
        return found

    def copies(self, ref: TensorRef, axis: int, before: Placement, after: Placement, form: Form, free: bool) -> tuple[Copies, Copies]:
        """What a device copies, forward and backward, when a tensor is converted along one axis by a communication."""
        source, target = before.states[axis], after.states[axis]
        runs = self.collectives(ref, source, target, free)
        if runs and runs[0][0] == "synchronise":  # a bucket is shared by all axes along which the gradient is summed
            shared = any(a != axis and s == REPLICATED for a, s in enumerate(after.states))
            return (NO_COPIES, NO_COPIES) if shared else (ENTERED, BUCKET)
        equal = all(self._equally_long(s.cut) for s in (source, target) if isinstance(s, Sharded))
        ahead, back = (copies(name, form, equal, strided(source, target)) for name in operations(source, target))
        back = back if self.mode == "train" and ref.requires_grad else NO_COPIES
        again = ref.name in self._converted_again or len(runs) > 2 or (free and forward_collective(source, target) is not None)
        return ahead, back + ahead if again and self.mode == "train" else back

    def _equally_long(self, cut: Cut) -> bool:
        """Whether all pieces of a cut are of one length, as far as that is known."""
        if cut.row.kind == "even":
            return True
        return len(self.kinds) == 1 if self.view.lengths is None else len(set(self.view.lengths[cut])) == 1

    def _copied(self, own: Copies, ref: TensorRef, axis: int, before: Placement, after: Placement) -> Piece:
        """Seconds per kind."""
        if own == NO_COPIES:
            return self.view.constant(0.0)
        tensors = before, after, after.gathered((axis,))
        shorter, longer = (tensors[k] for k in copied(before.states[axis], after.states[axis]))
        moved = (self.view.fraction(shorter), own.first * ref.bytes), (self.view.fraction(longer), own.second * ref.bytes)
        return total(moved, len(self.kinds)).line(self.per_byte, tuple([own.kernels * seconds for seconds in self.launch]))

    def collectives(self, ref: TensorRef, source: State, target: State, free: bool) -> list[tuple[Direction, str]]:
        """What runs between devices when a tensor is converted along one axis, always one collective; a reduce_scatter counts as an all_gather, which
        costs the same. free: a gathered parameter is gathered again in backward, as whatever is converted in a block that is computed again."""
        found: list[tuple[Direction, str]] = []
        forward = forward_collective(source, target)
        trains = self.mode == "train" and ref.requires_grad
        if forward is not None:
            found.append(("forward", _PRICED_AS.get(forward, forward)))
            if ref.name in self._converted_again or (trains and free and forward == "all_gather"):
                found.append(("backward", found[0][1]))
        backward = backward_collective(source, target) if trains else None
        if backward is not None:
            synchronises = ref.kind is Kind.PARAMETER and isinstance(source, Invariant) and isinstance(target, Replicated)
            found.append(("synchronise" if synchronises else "backward", _PRICED_AS.get(backward, backward)))
        return found

    def edge_prices(self, bundles: Sequence[Bundle], forms: frozenset[str]) -> EdgePrices:
        """All edges of them, to be priced at once."""
        return EdgePrices(self, bundles, forms)

    def _collective(self, name: str, ref: TensorRef, step: Communication, before: Placement, after: Placement) -> Term | None:
        links, whole = self.links[step.axis], self._part(after.gathered((step.axis,)), float(ref.bytes))
        if name == "all_reduce":
            return links.all_reduce(whole, ref.bytes <= SCALAR_BYTES)
        if is_recut(step.source, step.target):
            return self._recut(ref, before, after, step.axis)
        if name == "all_to_all":
            return links.all_to_all(self._part(before, float(ref.bytes)), self._part(after, float(ref.bytes)))
        shard = before if isinstance(step.source, Sharded) else after
        return links.all_gather(step.form, self._part(shard, float(ref.bytes)), whole)

    def _recut(self, ref: TensorRef, before: Placement, after: Placement, axis: int) -> Term | None:
        """An exchange along the axis and those that divide anew what it cuts anew: inside of these, everything may change places."""
        inner = followers(before, axis)
        links, size = self.links[axis], (float(ref.bytes),) * len(self.kinds)
        term = links.all_to_all(*(p.scaled(size) for p in moved(self.view, before, after, axis)))
        if term is None or not inner:
            return term
        inside = self.links[inner[0]].all_to_all(*(self._part(p, float(ref.bytes)) for p in (before, after)))
        # as many messages to every device of the other groups, and those inside
        more = links.messages((links.size - 1) * (self.links[inner[0]].size - 1))
        return term if inside is None else maximum([*(p + more for p in term.pieces), *inside.pieces])

    def _in_bucket(self, ref: TensorRef, step: Communication, after: Placement) -> Term:
        """A parameter's part of the all_reduce of a bucket of gradients: its volume, and its part of the bucket's latency. Where an axis further
        inside shares the parameter out (it is summed there too, or stored in shards and gathered), each device there sums its part only; what
        they scatter and gather is priced with that axis, as an all_reduce."""
        links = self.links[step.axis]
        volume = links.all_reduce(self._part(after, float(ref.bytes) / self.sharers(step.axis, after)))
        latency = links.all_reduce(self.view.constant(0.0))
        assert volume is not None and latency is not None
        spared = latency.pieces[0].scaled((self.part_of_bucket(ref) - 1.0,) * len(self.kinds))
        return Term(tuple((p + spared).scaled((1.0 / self.repeats,) * len(self.kinds)) for p in volume.pieces))

    def computed_again(self, ref: TensorRef) -> bool:
        """Whether conversions of a tensor are carried out again in backward (see `hapx.cost.memory.converted_again`)."""
        return ref.name in self._converted_again

    def sharers(self, axis: int, placement: Placement) -> int:
        """Devices of axes further inside that share a parameter's gradient out among themselves before it is summed along `axis`."""
        return prod(size for a, size in enumerate(self.theory.mesh.sizes) if a > axis and placement.states[a] == REPLICATED)

    def part_of_bucket(self, ref: TensorRef) -> float:
        """How much of a bucket of gradients a parameter fills, at most all of it."""
        return min(1.0, ref.bytes / BUCKET_BYTES)


_PRICED_AS = {"reduce_scatter": "all_gather"}


def _axes(body: OpCall, argument: str) -> tuple[int, ...]:
    value = body.get(argument)
    return value.axes if isinstance(value, Axes) else ()


def _partial(placement: Placement) -> bool:
    return any(isinstance(s, Partial) for s in placement.states)
