"""Small graphs, meshes and triples made by hand, with real operators, for tests of costs, simulation and planning without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hapx.cluster.spec import ClusterSpec, DeviceType, Link, Machine
from hapx.ir import Graph, Kind, Node, OpCall, Output, Ref, TensorRef, Value
from hapx.plan import Axis, Communication, Form, Instruction, Mesh, Program, ProgramKey, Triple
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Cut, Placement, Property, Sharded, State
from hapx.theory.triple import Theory

GIGABYTE = 10**9


def device_type(name: str, flops: float, *, memory: int = 16 * GIGABYTE, bandwidth: float = 1e11, latency: float = 0.0) -> DeviceType:
    """A device type whose kernels reach the peak."""
    return DeviceType(name, {"fp32": flops}, memory, bandwidth, 1.0, latency)


INTER, INTRA = Link(1e9, 1e-4), Link(1e10, 1e-5)


def cluster(machines: Sequence[tuple[str, ...]], types: Sequence[DeviceType], *, inter: Link = INTER, intra: Link = INTRA) -> ClusterSpec:
    """Machines given by the type names of their devices."""
    named = tuple(Machine(f"m{i}", devices, intra) for i, devices in enumerate(machines))
    return ClusterSpec("by hand", named, {t.name: t for t in types}, inter)


def flat(devices: int) -> Mesh:
    return Mesh("flat", (Axis("devices", devices, "devices"),), tuple(range(devices)), 0 if devices > 1 else None)


def two_level(machines: int, devices: int) -> Mesh:
    """Uneven over machines, even inside."""
    axes = (Axis("machines", machines, "machines"), Axis("devices", devices, "devices"))
    return Mesh(f"{machines}x{devices}", axes, tuple(range(machines * devices)), 0)


class GraphBuilder:
    """Makes graphs call by call; a node needs a gradient if one of its operands does."""

    def __init__(self) -> None:
        self.refs: dict[str, TensorRef] = {}
        self.nodes: list[Node] = []

    def tensor(self, name: str, shape: tuple[int, ...], kind: Kind = Kind.INPUT, dtype: str = "float32") -> str:
        self.refs[name] = TensorRef(name, shape, dtype, kind, kind is Kind.PARAMETER)
        return name

    def parameter(self, name: str, *shape: int) -> str:
        return self.tensor(name, shape, Kind.PARAMETER)

    def call(self, name: str, target: str, shape: tuple[int, ...], dtype: str = "float32", /, **args: Value) -> str:
        """A node `name` = target(args); names of known tensors among the arguments become references."""
        given = tuple((k, self._value(v)) for k, v in args.items())
        call = OpCall(target, given)
        out = TensorRef(name, shape, dtype, Kind.VALUE, any(self.refs[n].requires_grad for n in call.refs()))
        self.refs[name] = out
        self.nodes.append(Node(call, (out,), "", "", (0 if shape else None,)))
        return name

    def _value(self, value: Value) -> Value:
        if isinstance(value, tuple):
            return tuple(map(self._value, value))
        return Ref(value) if isinstance(value, str) and value in self.refs else value

    def graph_without_inputs(self, loss: str) -> Graph:
        """A graph of parameters only."""
        return self.graph(loss, inputs=False)

    def graph(self, loss: str, mode: str = "train", *, inputs: bool = True) -> Graph:
        names = tuple(r.name for r in self.refs.values() if r.kind is Kind.INPUT)
        assert bool(names) == inputs
        batch, n = self.refs[names[0]].shape[0] if inputs else 1, len(self.nodes)
        return Graph(self.refs, tuple(self.nodes), (Output(loss, "loss"),), (), (), (0,) * n, (None,) * n, names, batch, mode, {}, "by hand")  # type: ignore[arg-type]


def deep(layers: int = 18, kind: str = "plain", rows: int = 16, width: int = 24) -> Graph:
    """Linear layers with ReLU, residual, summed. kind: what else layers read, or what reads them."""
    b = GraphBuilder()
    b.tensor("x", (rows, width))
    b.parameter("m", 1, width)
    for i in range(layers):
        b.parameter(f"w{i}", width, width)
        b.parameter(f"m{i}", 1, width)
    if kind == "a mask for all":
        b.call("mask", "aten.tanh.default", (1, width), self="m")
    if kind == "a mask for each":
        for i in range(layers):
            b.call(f"mask{i}", "aten.tanh.default", (1, width), self=f"m{i}")
    h = "x"
    for i in range(layers):
        b.call(f"h{i}", "aten.linear.default", (rows, width), input=h, weight="w0" if kind == "one weight" else f"w{i}", bias=None)
        b.call(f"r{i}", "aten.relu.default", (rows, width), self=f"h{i}")
        added = f"r{i}"
        if kind.startswith("a mask"):
            b.call(f"k{i}", "aten.mul.Tensor", (rows, width), self=added, other="mask" if kind == "a mask for all" else f"mask{i}")
            added = f"k{i}"
        b.call(f"s{i}", "aten.add.Tensor", (rows, width), self=h, other=added, alpha=1)
        h = f"s{i}"
    for i in {"all are read": range(layers - 1), "some are read": (2, 5, 8, layers - 2)}.get(kind, ()):
        b.call(f"t{i}", "aten.add.Tensor", (rows, width), self=h, other=f"s{i}", alpha=1)
        h = f"t{i}"
    b.call("loss", "aten.sum.default", (), self=h, dtype=None)
    return b.graph("loss")


def mlp(batch: int = 8, width: int = 16, hidden: int = 32) -> Graph:
    """linear, relu, linear, sum of squares."""
    b = GraphBuilder()
    b.tensor("x", (batch, width))
    b.parameter("w1", hidden, width)
    b.parameter("w2", width, hidden)
    b.call("h", "aten.linear.default", (batch, hidden), input="x", weight="w1", bias=None)
    b.call("a", "aten.relu.default", (batch, hidden), self="h")
    b.call("y", "aten.linear.default", (batch, width), input="a", weight="w2", bias=None)
    b.call("s", "aten.mul.Tensor", (batch, width), self="y", other="y")
    b.call("loss", "aten.sum.default", (), self="s", dtype=None)
    return b.graph("loss")


def described(graph: Graph, mesh: Mesh) -> Theory:
    """A theory that only says which graph and which mesh it is about (costs need no more)."""
    return Theory(graph, mesh, (), {}, {}, frozenset())


def placed(*states: State, nest: tuple[int, ...] = ()) -> Placement:
    return Placement(states, nest)


def split(mesh: Mesh, axis: int, dim: int, units: int, inner: int = 1, kind: str = "compute") -> Sharded:
    return Sharded(dim, 1, inner, Cut(mesh.row(axis, kind), units))  # type: ignore[arg-type]


def triple(graph: Graph, node: int, placements: Mapping[str, Placement], work: tuple[Cut | None, ...] = ()) -> Triple:
    """The triple of a node with its own call as body."""
    n = graph.nodes[node]
    pre = tuple(Property(name, placements[name]) for name in n.call.refs())
    return Triple(node, pre, tuple(Property(o.name, placements[o.name]) for o in n.outputs), n.call, work)


def converted(name: str, source: Placement, target: Placement, *, gradient: bool = True, form: Form = Form.PADDED, free: bool = False) -> Triple:
    """A conversion that changes the axes in order."""
    path, at = [], source
    for axis, state in enumerate(target.states):
        if state != at.states[axis]:
            path.append(Communication(axis, at.states[axis], state, form, gradient, free))
            at = at.with_state(axis, state)
    return Triple(None, (Property(name, source),), (Property(name, target),), tuple(path))


def data_parallel(graph: Graph, mesh: Mesh, *, synchronised: bool = True) -> Program:
    """`mlp` on a flat mesh with its batch split and its parameters whole. Without synchronisation the parameters are whole from the start."""
    rows = split(mesh, 0, 0, graph.batch)
    where = {name: placed(rows) for name in ("x", "h", "a", "y", "s")} | {"loss": placed(PARTIAL), "w1": placed(REPLICATED), "w2": placed(REPLICATED)}
    steps = [converted("x", placed(REPLICATED), placed(rows), gradient=False)]
    if synchronised:
        steps += [converted(w, placed(INVARIANT), placed(REPLICATED)) for w in ("w1", "w2")]
    steps += [triple(graph, i, where, (rows.cut,)) for i in range(len(graph.nodes))]
    steps.append(converted("loss", placed(PARTIAL), placed(INVARIANT)))
    start = INVARIANT if synchronised else REPLICATED
    needs = (Property("x", placed(REPLICATED)), Property("w1", placed(start)), Property("w2", placed(start)))
    key = ProgramKey("train", (graph.refs["x"].shape,))
    return Program(key, mesh, tuple(map(Instruction, steps)), needs, (Property("loss", placed(INVARIANT)),))
