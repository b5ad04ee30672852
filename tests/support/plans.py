"""Plans written by hand, for tests of the runtime that must not depend on the planner.

In: a graph, a mesh, lengths and how parameters are stored; then one call per instruction, in placements given as text or states.
Out: a `Plan`. Nothing is checked here but names: a plan may be wrong on purpose.

    draft = Draft(mlp_graph((4, 6, 3), batch=8), flat(2), {}, storage={})
    w = draft.convert("layers.0.weight", "I", "R")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from hapx.cluster.spec import ClusterSpec
from hapx.graph.segments import graph_hash
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, TensorRef
from hapx.plan import VERSION, Axis, Communication, Copy, Form, Instruction, Mesh, Plan, Program, ProgramKey, Stage, Storage, Triple
from hapx.predict import predictions
from hapx.restriction import Restriction
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Placement, Property, Row, Sharded, State
from hapx.transposes import TRANSPOSES

LETTERS: Mapping[str, State] = {"R": REPLICATED, "I": INVARIANT, "P": PARTIAL}
FORMED = {"all_gather", "reduce_scatter"}


def cluster(machines: Sequence[int]) -> ClusterSpec:
    """Machines with that many devices each."""
    return ClusterSpec.load(
        {
            "name": "by-hand",
            "machines": [{"name": f"m{i}", "device": "thing", "devices": n} for i, n in enumerate(machines)],
            "device_types": {"thing": {"flops": 1e10, "memory": "4 GiB", "memory_bandwidth": "10 GB/s"}},
            "network": {"inter": {"bandwidth": "1 Gbit/s", "latency": "100 us"}, "intra": {"bandwidth": "10 Gbit/s", "latency": "10 us"}},
        }
    )


def flat(size: int) -> Mesh:
    """All devices on one uneven axis."""
    return Mesh("flat", (Axis("devices", size, "devices"),), tuple(range(size)), 0)


def two_level(machines: int, devices: int) -> Mesh:
    """Machines (uneven) x devices."""
    axes = (Axis("machines", machines, "machines"), Axis("devices", devices, "devices"))
    return Mesh("two-level", axes, tuple(range(machines * devices)), 0)


def cut(mesh: Mesh, axis: int, units: int) -> Cut:
    return Cut(mesh.row(axis), units)


def sharded(mesh: Mesh, dim: int, units: int, *, axis: int = 0, outer: int = 1, inner: int = 1) -> Sharded:
    """Split along `dim` in `units` grains."""
    return Sharded(dim, outer, inner, cut(mesh, axis, units))


def place(*states: State | str) -> Placement:
    """A placement from one state (or its letter) per axis."""
    return Placement(tuple(LETTERS[s] if isinstance(s, str) else s for s in states))


class Draft:
    """A plan under construction. `at`: the placement in which each tensor was made last."""

    def __init__(self, graph: Graph, mesh: Mesh, lengths: Mapping[Cut, tuple[int, ...]], storage: Mapping[str, Placement] | None = None):
        self.graph, self.mesh, self.lengths = graph, mesh, dict(lengths)
        whole = Placement((INVARIANT,) * len(mesh.axes))
        stored = [r for r in graph.refs.values() if r.kind in (Kind.PARAMETER, Kind.BUFFER)]
        self.storage = {r.name: (storage or {}).get(r.name, whole) for r in stored}
        replicated = Placement((REPLICATED,) * len(mesh.axes))
        self.needs = [Property(n, p) for n, p in self.storage.items()] + [Property(n, replicated) for n in graph.input_names]
        self.at = {p.tensor: p.placement for p in self.needs}
        self.instructions: list[Instruction] = []

    def convert(
        self, tensor: str, target: Placement, *, form: Form = Form.PADDED, order: Sequence[int] | None = None, free: bool = False
    ) -> Placement:
        """From where the tensor is to `target`, axis by axis; returns `target`."""
        source = at = self.at[tensor]
        gradient = self.graph.refs[tensor].requires_grad
        path = []
        for axis in order or range(len(target.states)):
            a, b = at.states[axis], target.states[axis]
            if a == b:
                continue
            used = set(TRANSPOSES[type(a), type(b)][: 1 + gradient])
            path.append(Communication(axis, a, b, form if used & FORMED else Form.NONE, gradient, free and "all_gather" in used))
            at = at.with_state(axis, b)
        assert at.states == target.states, (at, target)
        if path:
            self.instructions.append(Instruction(Triple(None, (Property(tensor, source),), (Property(tensor, target),), tuple(path))))
        self.at[tensor] = target
        return target

    def call(
        self, node: int, *post: Placement, body: OpCall | None = None, work: tuple[Cut | None, ...] = (), pre: Sequence[Placement] | None = None
    ) -> None:
        """Node number `node`, its operands where they are now (or in `pre`)."""
        call = body or self.graph.nodes[node].call
        refs = call.refs()
        placements = pre or [self.at[n] for n in refs]
        outputs = self.graph.nodes[node].outputs
        triple = Triple(
            node,
            tuple(Property(n, p) for n, p in zip(refs, placements, strict=True)),
            tuple(Property(o.name, p) for o, p in zip(outputs, post, strict=True)),
            call,
            work or (None,) * len(self.mesh.axes),
        )
        self.instructions.append(Instruction(triple))
        self.at |= {o.name: p for o, p in zip(outputs, post, strict=True)}

    def plan(self, machines: Sequence[int] | None = None, shares: Sequence[float] | None = None) -> Plan:
        count = prod(self.mesh.sizes)
        key = ProgramKey(self.graph.mode, tuple(self.graph.refs[n].shape for n in self.graph.input_names))
        gives = tuple(Property(o.tensor, self.at[o.tensor]) for o in self.graph.outputs)
        program = Program(key, self.mesh, tuple(self.instructions), tuple(self.needs), gives)
        rows: dict[Row, tuple[float, ...]] = {c.row: tuple(n / c.units for n in ns) for c, ns in self.lengths.items()}
        stage = Stage(tuple(range(count)), {key: (0, len(self.graph.nodes))}, self.mesh, rows, {key: self.lengths}, {key: program})
        tied = {group[0]: group[1:] for group in self.graph.tied}
        storage = tuple(Storage(n, tied.get(n, ()), (Copy(0, p),)) for n, p in self.storage.items())
        plan = Plan(
            VERSION, {key: self.graph}, cluster(machines or [count]), Restriction(), storage, (stage,), {}, 1.0, (0,) * count,
            tuple(shares or [1 / count] * count), "float64", "adamw", {},
        )  # fmt: skip
        return predicted(plan)


def predicted(plan: Plan) -> Plan:
    """The plan with the predictions of the cost model."""
    time, memory, shares = predictions(plan)
    return replace(plan, iteration_time=time, memory=memory, shares=shares)


def make_graph(
    inputs: Mapping[str, tuple[tuple[int, ...], str]],
    parameters: Mapping[str, tuple[int, ...]],
    nodes: Sequence[tuple[OpCall, Sequence[tuple[str, tuple[int, ...]]]]],
    outputs: Sequence[Output],
    *,
    batch: int,
    dtype: str = "float64",
    mode: str = "train",
    buffers: Mapping[str, tuple[int, ...]] | None = None,
    tied: tuple[tuple[str, ...], ...] = (),
) -> Graph:
    """A graph from its parts; a value requires a gradient if any operand does."""
    refs = {n: TensorRef(n, s, d, Kind.INPUT, False) for n, (s, d) in inputs.items()}
    refs |= {n: TensorRef(n, s, dtype, Kind.PARAMETER, True) for n, s in parameters.items()}
    refs |= {n: TensorRef(n, s, dtype, Kind.BUFFER, False) for n, s in (buffers or {}).items()}
    made = []
    for call, results in nodes:
        gradient = any(refs[n].requires_grad for n in call.refs())
        values = tuple(TensorRef(n, s, dtype, Kind.VALUE, gradient) for n, s in results)
        refs |= {v.name: v for v in values}
        made.append(Node(call, values, "", "by hand", (None,) * len(values)))
    none = (None,) * len(made)
    graph = Graph(refs, tuple(made), tuple(outputs), (), tied, (0,) * len(made), none, tuple(inputs), batch, mode, {}, "")  # type: ignore[arg-type]
    return replace(graph, hash=graph_hash(graph))


def mlp_graph(widths: tuple[int, int, int], batch: int, mode: str = "train") -> Graph:
    """`support.models.MLP(widths)` as capture would give it: nodes 0 linear, 1 gelu, 2 linear, 3 mse_loss."""
    a, b, c = widths
    target = "aten.linear.default"

    def dense(x: str, layer: int) -> OpCall:
        return OpCall(target, (("input", Ref(x)), ("weight", Ref(f"layers.{layer}.weight")), ("bias", Ref(f"layers.{layer}.bias"))))

    nodes = [
        (dense("x", 0), [("linear", (batch, b))]),
        (OpCall("aten.gelu.default", (("self", Ref("linear")), ("approximate", "none"))), [("gelu", (batch, b))]),
        (dense("gelu", 1), [("linear_1", (batch, c))]),
        (OpCall("aten.mse_loss.default", (("self", Ref("linear_1")), ("target", Ref("targets")), ("reduction", 1))), [("mse_loss", ())]),
    ]
    parameters = {"layers.0.weight": (b, a), "layers.0.bias": (b,), "layers.1.weight": (c, b), "layers.1.bias": (c,)}
    inputs = {"x": ((batch, a), "float64"), "targets": ((batch, c), "float64")}
    return make_graph(inputs, parameters, nodes, [Output("mse_loss", "loss")], batch=batch, mode=mode)


def mse_sum(graph: Graph) -> OpCall:
    """The body of the loss where samples are split: local sum over the global count."""
    call = graph.nodes[3].call
    return OpCall("hapx.mean_loss", (("operator", call.target), ("count", graph.refs["linear_1"].size), *call.args))


def mlp_batch_split(
    widths: tuple[int, int, int], lengths: tuple[int, ...], *, stored: Mapping[str, Placement] | None = None, free: bool = False, mode: str = "train"
) -> Plan:
    """Every device has lengths[j] samples; parameters whole, or stored in shards and gathered for use."""
    batch, mesh = sum(lengths), flat(len(lengths))
    graph = mlp_graph(widths, batch, mode)
    units = cut(mesh, 0, batch)
    samples = place(sharded(mesh, 0, batch))
    table = {units: lengths}
    for p in (stored or {}).values():
        for s in p.states:
            if isinstance(s, Sharded) and s.cut not in table:
                table[s.cut] = _like(lengths, s.cut.units)
    draft = Draft(graph, mesh, table, stored)
    for name in ("x", "layers.0.weight", "layers.0.bias"):
        draft.convert(name, samples if name == "x" else place("R"), free=free)
    draft.call(0, samples, work=(units,))
    draft.call(1, samples, work=(units,))
    draft.convert("layers.1.weight", place("R"), free=free)
    draft.convert("layers.1.bias", place("R"), free=free)
    draft.call(2, samples, work=(units,))
    draft.convert("targets", samples)
    draft.call(3, place("P"), body=mse_sum(graph), work=(units,))
    draft.convert("mse_loss", place("I"))
    return draft.plan(shares=[n / batch for n in lengths])


def _like(lengths: tuple[int, ...], units: int) -> tuple[int, ...]:
    """`units` dealt out roughly as `lengths`, the rest to the last device that has any."""
    total = sum(lengths)
    result = [units * n // total for n in lengths]
    result[max(i for i, n in enumerate(lengths) if n)] += units - sum(result)
    return tuple(result)


def mlp_tensor_parallel(widths: tuple[int, int, int], lengths: tuple[int, ...], batch: int, mode: str = "train") -> Plan:
    """Hidden units are split: the first layer by columns, the second by rows (Megatron-LM, section 3)."""
    mesh = flat(len(lengths))
    graph = mlp_graph(widths, batch, mode)
    hidden = sum(lengths)
    assert hidden == widths[1]
    units = cut(mesh, 0, hidden)
    rows, columns = place(sharded(mesh, 0, hidden)), place(sharded(mesh, 1, hidden))
    draft = Draft(graph, mesh, {units: lengths}, {"layers.0.weight": rows, "layers.0.bias": rows, "layers.1.weight": columns})
    draft.call(0, columns, work=(units,))
    draft.call(1, columns, work=(units,))
    draft.convert("layers.1.bias", place("P"))
    draft.call(2, place("P"), work=(units,))
    draft.convert("linear_1", place("I"))
    draft.call(3, place("I"))
    return draft.plan()


def mlp_two_level(widths: tuple[int, int, int], lengths: tuple[int, ...], devices: int, mode: str = "train") -> Plan:
    """Samples split over machines (uneven), hidden units over the devices inside (even)."""
    batch, mesh = sum(lengths), two_level(len(lengths), devices)
    graph = mlp_graph(widths, batch, mode)
    units, inner = cut(mesh, 0, batch), cut(mesh, 1, widths[1])
    samples, by = sharded(mesh, 0, batch), widths[1]
    rows, columns = sharded(mesh, 0, by, axis=1), sharded(mesh, 1, by, axis=1)
    storage = {"layers.0.weight": place("I", rows), "layers.0.bias": place("I", rows), "layers.1.weight": place("I", columns)}
    draft = Draft(graph, mesh, {units: lengths}, storage)
    draft.convert("x", place(samples, "R"))
    draft.convert("layers.0.weight", place("R", rows))
    draft.convert("layers.0.bias", place("R", rows))
    draft.call(0, place(samples, columns), work=(units, inner))
    draft.call(1, place(samples, columns), work=(units, inner))
    draft.convert("layers.1.weight", place("R", columns))
    draft.convert("layers.1.bias", place("R", "P"))
    draft.call(2, place(samples, "P"), work=(units, inner))
    draft.convert("linear_1", place(samples, "I"))
    draft.convert("targets", place(samples, "R"))
    draft.call(3, place("P", "I"), body=mse_sum(graph), work=(units, None))
    draft.convert("mse_loss", place("I", "I"))
    return draft.plan(machines=[devices] * len(lengths))
