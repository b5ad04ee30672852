"""The single-device model as data: a `Graph` of operator calls. No torch here; the graph is stored inside a plan.

Arguments of calls are normalised: every argument of the operator's schema is present under its schema name, tensors are `Ref`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from math import prod
from typing import Any, Literal

from hapx.rules import Probed, Rule, Slot


class Kind(Enum):
    """What a tensor is. CONSTANT: does not depend on inputs; recomputed by the executor or stored as data, never trained. RECEIVED: of a part of a
    larger graph, what another part makes."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    RECEIVED = "received"
    VALUE = "value"

    __hash__ = object.__hash__  # quicker than that of its name: kinds are parts of many keys


@dataclass(frozen=True)
class TensorRef:
    """A tensor of the graph. `name` of parameters and buffers is their fully qualified name in the module. `dtype`: "float32".
    `mutated`: a buffer that an operator of this graph writes in place (running statistics): it is only used as it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    requires_grad: bool
    mutated: bool = False

    @cached_property
    def size(self) -> int:
        return prod(self.shape)

    @cached_property
    def bytes(self) -> int:
        return self.size * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "complex128": 16, "complex64": 8,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip

FLOATING = frozenset({"float64", "float32", "float16", "bfloat16"})
COMPLEX = frozenset({"complex128", "complex64"})
CONTINUOUS = FLOATING | COMPLEX  # what has gradients, and may be a sum of what devices have

# Their first operands are input, weight and bias; a weight without channels is refused, or taken for one that makes no channels.
CONVOLUTIONS = frozenset({f"aten.{name}{n}d" for name in ("conv", "conv_transpose") for n in (1, 2, 3)} | {"aten.convolution"})


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor as an argument."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConst:
    """A torch constant as an argument: dtype, layout, memory_format by name. Devices are never stored."""

    kind: Literal["dtype", "layout", "memory_format"]
    name: str


# Argument values: None, bool, int, float, complex, str, Ref, TorchConst, nested tuples of these; in plans also LocalShape, LocalSize, Axes...
Value = Any


@dataclass(frozen=True)
class OpCall:
    """A call of `target` ("aten.linear.default", or a composite "hapx.<name>") with named arguments."""

    target: str
    args: tuple[tuple[str, Value], ...]

    def __getitem__(self, name: str) -> Value:
        for key, value in self.args:
            if key == name:
                return value
        raise KeyError(f"{self.target} has no argument {name!r}")

    def get(self, name: str, default: Value = None) -> Value:
        for key, value in self.args:
            if key == name:
                return value
        return default

    def replace(self, **changes: Value) -> OpCall:
        """The same call with some arguments changed (they must exist)."""
        assert set(changes) <= {k for k, _ in self.args}, (self.target, changes)
        return OpCall(self.target, tuple((k, changes.get(k, v)) for k, v in self.args))

    @cached_property
    def op(self) -> str:
        """Name without overload: "aten.linear"."""
        return _without_overload(self.target)

    def refs(self) -> tuple[str, ...]:
        """Names of tensor arguments in order of appearance, with repetitions."""
        return self._refs

    @cached_property
    def _refs(self) -> tuple[str, ...]:
        return tuple([r.name for _, value in self.args for r in iter_refs(value)])

    @cached_property
    def constants(self) -> object:
        """The call without names: equal for calls of one operator with the same constants."""
        return self.target, tuple([(k, _without_names(v)) for k, v in self.args])

    def __str__(self) -> str:
        return f"{self.target}({', '.join(f'{k}={_show(v)}' for k, v in self.args)})"


@cache
def _without_overload(target: str) -> str:
    return target.rsplit(".", 1)[0] if target.count(".") == 2 else target


def _without_names(value: Value) -> object:
    if isinstance(value, Ref):
        return Ref
    if isinstance(value, tuple):
        return tuple(map(_without_names, value))
    return type(value), value  # 1, 1.0 and True are equal, but not alike


def iter_refs(value: Value) -> Iterator[Ref]:
    """All tensor references inside an argument value."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for v in value:
            yield from iter_refs(v)


def _show(value: Value) -> str:
    if isinstance(value, Ref):
        return f"%{value.name}"
    if isinstance(value, TorchConst):
        return value.name
    if isinstance(value, tuple):
        return f"[{', '.join(map(_show, value))}]"
    return str(value)


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call. `module`: path of the module that made it; `source`: "file:line: code" of the user's line;
    `batch_dims`: per output, the dim that runs over the batch, if any.
    `tags`: what makes the operator need a rule: "random", "in place", "data-dependent", "dependent on strides".
    `casts`: (parameter or view of one, dtype): operands that the call reads in another dtype than their own, under autocast."""

    call: OpCall
    outputs: tuple[TensorRef, ...]
    module: str
    source: str
    batch_dims: tuple[int | None, ...]
    tags: tuple[str, ...] = ()
    casts: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        reads = f" reading {', '.join(f'%{name} as {dtype}' for name, dtype in self.casts)}" if self.casts else ""
        return f"{', '.join(map(str, self.outputs))} = {self.call}{reads}"

    @property
    def names(self) -> tuple[str, ...]:
        """Of its operands, one per occurrence, and of its outputs."""
        return (*self.call.refs(), *[o.name for o in self.outputs])

    def reads(self, ref: TensorRef) -> str:
        """The dtype in which the call reads an operand."""
        return dict(self.casts).get(ref.name, ref.dtype)


# options of a checkpoint region that the planner has chosen
CHOSEN: tuple[tuple[str, Value], ...] = (("chosen", True),)


@dataclass(frozen=True, slots=True)
class Region:
    """A run of nodes [start, stop) under an activation checkpoint, an autocast or a no_grad context. `chosen`: the planner's checkpoint,
    not the model's."""

    kind: Literal["checkpoint", "autocast", "no_grad"]
    start: int
    stop: int
    options: tuple[tuple[str, Value], ...] = ()

    @property
    def chosen(self) -> bool:
        return self.options == CHOSEN


@dataclass(frozen=True, slots=True)
class Output:
    """What leaves the graph. loss: the scalar; buffer: new value of buffer `target`; result: something the user asked for."""

    tensor: str
    role: Literal["loss", "buffer", "result", "boundary"]
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Container:
    """A container that the module returned. `type`: "tuple", "list", "dict", or "module:name" of a class (ModelOutput, a dataclass, a named
    tuple). `items`: by key, what is there: a Container, `Ref(place)` for the result at that place (`Ref("")`: the loss), or None. Objects of
    other kinds, caches of generation for one, are left out."""

    type: str
    items: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """How a graph is run on `number` equal parts of a batch, one after another, so that the losses sum up to that of the whole batch.

    `cut`: inputs that are cut along dim 0; each part gets the others whole. `counts`: a graph over the whole batch; each of its outputs is the input
    `target` of every part (what sums over all samples are divided by). None: there are none. `results`, per output with role "result": how those of
    the parts become that of the whole batch: joined block by block (a site), summed up (Partial), all the same (Replicated).
    `mixing`: (operator, source line) of what mixes samples: there a part sees only its own."""

    number: int
    cut: tuple[str, ...]
    counts: Graph | None
    results: tuple[tuple[str, Slot], ...]
    mixing: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Graph:
    """A captured model: nodes in one fixed topological order.

    `refs`: every tensor by name. `tied`: groups of module names that share one tensor (the first is the name in `refs`).
    `segment_of`, per node: the part of the model whose ratios it shares. `block_of`, per node: (block kind, repetition) of repeated blocks or None.
    `mode`: train or eval. `input_names`: the user's inputs, flattened, in order. `batch`: size of the batch.
    `constants`: flat values of the small constant tensors that the model makes in forward.
    `returns`: the container that the module returns (None: the loss alone).
    `hash` identifies the computation (no devices, no weights, no boundaries, no segments or regions that the planner has chosen).
    `probed`: what execution showed of operators that have no entry in the table.
    `first`: of a part of a larger graph (`hapx.parts`), what to add to the number of a node to have its number there.
    `boundaries`: nodes before which the model says that a layer begins (`hapx.mark_layer_boundary`), ascending.
    `micro_batches`: the graph is that of a part of the batch (see `hapx.theory.normalise`), and its last inputs are `counts`.
    """

    refs: Mapping[str, TensorRef]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    regions: tuple[Region, ...]
    tied: tuple[tuple[str, ...], ...]
    segment_of: tuple[int, ...]
    block_of: tuple[tuple[int, int] | None, ...]
    input_names: tuple[str, ...]
    batch: int
    mode: Literal["train", "eval"]
    constants: Mapping[str, tuple[float | int | bool | complex, ...]]
    hash: str
    returns: Container | None = None
    probed: tuple[Probed, ...] = ()
    first: int = 0
    boundaries: tuple[int, ...] = ()
    micro_batches: MicroBatches | None = None

    @cached_property
    def probed_rules(self) -> Mapping[int, tuple[Rule, ...]]:
        """Node -> rules that were found by execution."""
        return {i: p.rules for p in self.probed for i in p.nodes}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Tensor name -> index of the node that makes it."""
        return {o.name: i for i, n in enumerate(self.nodes) for o in n.outputs}

    @cached_property
    def written(self) -> Mapping[str, str]:
        """Buffer -> the tensor that is its new value after the pass. (Statistics that an operator changes itself are `TensorRef.mutated`.)"""
        return {o.target: o.tensor for o in self.outputs if o.role == "buffer" and o.target is not None}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> indices of the nodes that use it, ascending, each once."""
        uses: dict[str, list[int]] = {name: [] for name in self.refs}
        for i, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.call.refs()):
                uses[name].append(i)
        return {k: tuple(v) for k, v in uses.items()}

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Per node a number that nodes share which call one operator with the same constants on like tensors, repeated in the same places."""
        numbers: dict[object, int] = {}
        found = []
        for node in self.nodes:
            names = node.names
            tensors = tuple([(r.shape, r.dtype, r.requires_grad, r.mutated) for r in map(self.refs.__getitem__, names)])
            found.append(numbers.setdefault((node.call.constants, tensors, tuple(map(names.index, names))), len(numbers)))
        return tuple(found)

    @cached_property
    def sources(self) -> tuple[TensorRef, ...]:
        """Inputs and stored constants: whole on every device from the start. (Constants that a node makes are values like any other.)"""
        return tuple(r for r in self.refs.values() if r.kind in (Kind.INPUT, Kind.CONSTANT) and r.name not in self.producer)

    @cached_property
    def segments(self) -> int:
        """How many segments the nodes are in."""
        return 1 + max(self.segment_of, default=0)

    @cached_property
    def segments_of(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name -> the segments in which it is made or used, in that order; (0,) if nobody does."""
        if self.segments == 1:
            return dict.fromkeys(self.refs, (0,))
        found = {name: [self.segment_of[self.producer[name]]] if name in self.producer else [] for name in self.refs}
        for name, users in self.consumers.items():
            found[name] += [self.segment_of[i] for i in users]
        return {name: tuple(dict.fromkeys(own)) or (0,) for name, own in found.items()}

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Tensors made by nodes under an activation checkpoint: in training they are made again in backward."""
        inside = [self.nodes[i] for r in self.regions if r.kind == "checkpoint" for i in range(r.start, r.stop)]
        return frozenset(o.name for n in inside for o in n.outputs)

    @cached_property
    def loss(self) -> str:
        return next(o.tensor for o in self.outputs if o.role == "loss")

    @cached_property
    def given(self) -> tuple[str, ...]:
        """The user's inputs, without those that are counted before micro-batches run."""
        counts = self.micro_batches.counts if self.micro_batches is not None else None
        counted = {o.target for o in counts.outputs} if counts is not None else set()
        return tuple(n for n in self.input_names if n not in counted)

    @cached_property
    def roots(self) -> tuple[str, ...]:
        """Outputs at which backward begins: the loss, and what other parts use."""
        return tuple(o.tensor for o in self.outputs if o.role in ("loss", "boundary") and self.refs[o.tensor].requires_grad)

    def of_kind(self, kind: Kind) -> tuple[TensorRef, ...]:
        return tuple(r for r in self.refs.values() if r.kind is kind)

    def __str__(self) -> str:
        return "\n".join(f"{i:4d}  {node}" for i, node in enumerate(self.nodes))
