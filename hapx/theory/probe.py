"""Executes one call on pretended devices, to see which Hoare triples are true of it.

In: a `Sample`, a mesh, placements of operands and outputs, a local body. Out: what is wrong with the triple, or nothing.

The test is the definition of the states. Operands are dealt out by their placements: whole, in slices, or as random
summands of both signs. The body runs on every device, and the outputs must be, in their placements, those of one device. Then
cotangents are dealt out by the dual placements of the outputs, and the gradients of the operands must be, in the dual placements of
the operands, those of one device. An operand that the call changes must have changed as on one device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hapx.collectives.communicator import Communicator
from hapx.collectives.composites import COMPOSITES
from hapx.collectives.rng import Rng
from hapx.collectives.threads import ThreadCommunicator, run_threads
from hapx.ir import CONVOLUTIONS, Graph, Kind, Node, OpCall, Output, Ref, TensorRef, TorchConst
from hapx.layout import block, local_indices, local_offset, local_shape
from hapx.operators import find_overload
from hapx.plan import Axes, Axis, LocalBlock, LocalIndices, LocalOffset, LocalShape, LocalSize, Mesh
from hapx.states import REPLICATED, Partial, Placement, Sharded, dual
from hapx.theory.registry import LocalCall, lookup
from hapx.theory.samples import Draw, Sample, Values
from hapx.theory.settings import Dealt, Setting

Communicators = Mapping[tuple[int, ...], Communicator]
Locals = list[Tensor]  # one local tensor per device of the mesh
SEED = 5  # of the masks of random operators


# --- the call on one device --------------------------------------------------------------------------------------------------


def complete(call: OpCall) -> OpCall:
    """The call with the schema's defaults for arguments that were left out, in the schema's order."""
    given, values = dict(call.args), []
    for argument in find_overload(call.target)._schema.arguments:
        if argument.name in given:
            values.append((argument.name, given.pop(argument.name)))
        elif "MemoryFormat" in str(argument.type):
            values.append((argument.name, None if "Optional" in str(argument.type) else TorchConst("memory_format", "contiguous_format")))
        elif str(argument.type) != "Optional[Device]":
            assert argument.has_default_value(), f"a sample of {call.target} needs {argument.name}"
            default = argument.default_value
            values.append((argument.name, tuple(default) if isinstance(default, list) else default))
    assert not given, f"{call.target} has no argument {', '.join(given)}"
    return OpCall(call.target, tuple(values))


@dataclass(frozen=True)
class Truth:
    """A call and what it does on one device. `operands`: per occurrence; `changed`: the operands after the call; `gradients`: per
    occurrence, None for an operand without gradient. `magnitude`: numbers as large have the absolute error `tolerance`."""

    graph: Graph
    operands: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    changed: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    magnitude: float = 1.0

    @property
    def node(self) -> Node:
        return self.graph.nodes[0]

    @property
    def tolerance(self) -> float:
        """Relative and absolute error that rounding explains."""
        return 1e-4 if any(t.dtype == torch.float32 for t in (*self.operands, *self.outputs)) else 1e-9

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return tuple(self.graph.refs[name] for name in self.node.call.refs())


@lru_cache(maxsize=4096)
def truth(sample: Sample, seed: int = 0) -> Truth:
    """Draw the operands and run the call."""
    return run_alone(sample, seed)


def run_alone(sample: Sample, seed: int = 0) -> Truth:
    """`truth` that is not kept."""
    generator = torch.Generator().manual_seed(seed)
    draws = dict(sample.draws)
    drawn = {name: _draw(d, generator) for name, d in sample.draws}
    call = complete(sample.call)
    names = call.refs()
    leaves = [drawn[n].clone().requires_grad_(draws[n].requires_grad) for n in names]
    refs = {n: TensorRef(n, d.shape, d.dtype, Kind.BUFFER if d.mutated else Kind.INPUT, d.requires_grad, d.mutated) for n, d in sample.draws}
    alone = Setting(Mesh("alone", (Axis("d", 1, "devices"),), (0,), 0), Dealt(1, None, 1))
    whole = Placement((REPLICATED,))

    def run(body: OpCall) -> tuple[Tensor, ...]:
        # an operand that is changed in place must not be a leaf
        return _call(body, [x.view_as(x) if x.requires_grad else x for x in leaves], alone, (0,), {})

    entry = lookup(call)
    body = call
    if entry is not None and entry.body is not None and torch.Tag.nondeterministic_seeded in find_overload(call.target).tags:
        (like,) = run(call)  # the numbers are those of the composite on one device; shapes and dtypes are those of the operator
        outputs = (TensorRef("out0", tuple(like.shape), str(like.dtype).removeprefix("torch."), Kind.VALUE, like.requires_grad),)
        node = Node(call, outputs, "", "", (None,))
        body = entry.body(LocalCall(node, 0, tuple(refs[n] for n in names), (whole,) * len(names), (whole,), ("",))) or call
    outputs = run(body)
    values = tuple(
        TensorRef(f"out{i}", tuple(o.shape), str(o.dtype).removeprefix("torch."), Kind.VALUE, o.requires_grad) for i, o in enumerate(outputs)
    )
    cotangents = tuple(_normal(o.shape, o.dtype, generator) if o.requires_grad else None for o in outputs)
    gradients = _gradients(outputs, leaves, cotangents)
    node = Node(call, values, "", f"sample of {call.target}", (None,) * len(values))
    graph = Graph(
        refs | {v.name: v for v in values}, (node,), tuple(Output(v.name, "boundary") for v in values), (), (), (0,), (None,),
        tuple(refs), 0, "train", {}, "",
    )  # fmt: skip
    return Truth(graph, tuple(drawn[n] for n in names), tuple(o.detach() for o in outputs), tuple(x.detach() for x in leaves), cotangents, gradients)


def _draw(draw: Draw, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, draw.dtype)
    if draw.values is Values.IDS:
        return torch.randint(0, draw.limit, draw.shape, generator=generator, dtype=dtype)
    if draw.values is Values.DISTINCT:
        return torch.rand(draw.shape, generator=generator).argsort(draw.limit)
    if draw.values is Values.BOOL:
        return torch.randint(0, 2, draw.shape, generator=generator).to(dtype)
    x = _normal(draw.shape, dtype, generator) * draw.scale
    if draw.values is Values.POSITIVE:
        return torch.complex(x.real.abs() + 0.1, x.imag) if dtype.is_complex else x.abs() + 0.1
    if draw.values is Values.ABOVE_ONE:
        return x.abs() + 1.1
    if draw.values is Values.ORDERED:
        return x.sort().values
    if draw.values is Values.SIGNS:
        return x.sign()
    if draw.values is Values.UNIT:
        return x.sigmoid()
    if draw.values is Values.SHARES:
        return x.softmax(1)
    if draw.values is Values.DEFINITE:
        return x @ x.mT + torch.eye(draw.shape[-1], dtype=dtype)
    if draw.values is Values.SPECIAL:
        flat = x.view(-1)
        for start, value in enumerate((math.inf, -math.inf, math.nan)):
            flat[start::5] = value
    return x


def _normal(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Per leaf; zeros where no cotangent arrives, None for a leaf without gradient."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    if not pairs or not wanted:
        return tuple(torch.zeros_like(x) if x.requires_grad else None for x in leaves)
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True, retain_graph=True))
    return tuple((g if (g := next(found)) is not None else torch.zeros_like(x)) if x.requires_grad else None for x in leaves)


# --- one device of many -------------------------------------------------------------------------------------------------------


def _call(
    body: OpCall, operands: Sequence[Tensor], setting: Setting, coordinates: tuple[int, ...], communicators: Communicators
) -> tuple[Tensor, ...]:
    remaining = iter(operands)
    composite = body.target in COMPOSITES
    values = {name: _resolve(name, value, remaining, setting, coordinates, communicators) for name, value in body.args}
    if composite:
        result = COMPOSITES[body.target](**values)
    else:
        function = find_overload(body.target)
        for argument in function._schema.arguments:
            if str(argument.type) == "Device":
                values[argument.name] = torch.device("cpu")
        result = function(**values)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _resolve(name: str, value: Any, operands: Iterator[Tensor], setting: Setting, at: tuple[int, ...], communicators: Communicators) -> Any:
    """An argument as one device sees it."""
    sizes, lengths = setting.mesh.sizes, setting.lengths
    match value:
        case Ref():
            return next(operands)
        case tuple():
            return [_resolve("", v, operands, setting, at, communicators) for v in value]
        case TorchConst(name=const):
            return getattr(torch, const)
        case LocalShape(shape=shape, placement=placement):
            return list(local_shape(shape, placement, sizes, lengths, at))
        case LocalSize(size=size, placement=placement):
            return local_shape((size,), placement, sizes, lengths, at)[0]
        case LocalOffset(dim=dim, placement=placement):
            return local_offset(dim, placement, sizes, lengths, at)
        case LocalBlock(axis=axis, placement=placement):
            return block(placement, axis, sizes, lengths, at)
        case LocalIndices(shape=shape, placement=placement):
            return tuple(torch.from_numpy(i) if i is not None else None for i in indices(shape, placement, setting, at))
        case Axes(axes=axes):
            return communicators[axes] if axes else None
        case None if name == "rng":
            return Rng(SEED)
        case None if name == "local_device":
            return torch.device("cpu")
    return value


def indices(shape: Sequence[int], placement: Placement, setting: Setting, at: tuple[int, ...]) -> tuple[Any, ...]:
    """Per dim the global indices that the device holds, None where the dim is whole."""
    cut = {s.dim for s in placement.states if isinstance(s, Sharded)}
    return tuple(local_indices(n, d, placement, setting.mesh.sizes, setting.lengths, at) if d in cut else None for d, n in enumerate(shape))


def piece(whole: Tensor, placement: Placement, setting: Setting, at: tuple[int, ...]) -> Tensor:
    """The slice of a device (of what is Sharded)."""
    for dim, index in enumerate(indices(whole.shape, placement, setting, at)):
        if index is not None:
            whole = whole.index_select(dim, torch.from_numpy(index))
    return whole


def deal(whole: Tensor, placement: Placement, setting: Setting, generator: torch.Generator) -> Locals:
    """Local tensors of all devices: random summands for Partial, then slices for Sharded."""
    summands = {(): whole}
    for axis, state in enumerate(placement.states):
        size = setting.mesh.sizes[axis]
        summands = {
            (*at, c): part
            for at, x in summands.items()
            for c, part in enumerate(_summands(x, size, generator) if isinstance(state, Partial) else [x] * size)
        }
    return [piece(x, placement, setting, at).clone() for at, x in summands.items()]


def _summands(x: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    """Random tensors, of both signs, whose sum is `x`."""
    if is_continuous(x):
        parts = [_normal(x.shape, x.dtype, generator) for _ in range(count - 1)]
    else:
        parts = [torch.randint(-9, 10, x.shape, generator=generator, dtype=x.dtype) for _ in range(count - 1)]
    return [*parts, x - sum(parts[1:], parts[0])]


def in_placement(
    found: Sequence[Tensor], placement: Placement, whole: Tensor, setting: Setting, tolerance: float = 1e-9, magnitude: float = 1.0
) -> bool:
    """Whether local tensors are `whole` in `placement`. `tolerance`: relative; absolute, of numbers as large as `magnitude`."""
    at_of = setting.devices
    partial = [a for a, s in enumerate(placement.states) if isinstance(s, Partial)]
    if partial and whole.dtype == torch.bool:
        return False
    groups: dict[tuple[int, ...], list[int]] = {}
    for d, at in enumerate(at_of):
        groups.setdefault(tuple(c for a, c in enumerate(at) if a not in partial), []).append(d)
    for members in groups.values():
        expected = piece(whole, placement, setting, at_of[members[0]])
        if any(found[d].shape != expected.shape or found[d].dtype != expected.dtype for d in members):
            return False
        total = sum((found[d] for d in members[1:]), found[members[0]])
        if not torch.allclose(total, expected, rtol=tolerance, atol=tolerance * magnitude, equal_nan=True):
            return False
    return True


# --- a triple ------------------------------------------------------------------------------------------------------------------


def duals(placement: Placement) -> Placement:
    return Placement(tuple(map(dual, placement.states)), placement.nest)


def is_empty(truth: Truth, post: Sequence[Placement], setting: Setting, at: tuple[int, ...]) -> bool:
    """Whether no output has an element on a device: the call is then left out (as in `hapx.runtime.empty`)."""
    sizes = setting.mesh.sizes
    return bool(truth.operands) and all(0 in local_shape(o.shape, p, sizes, setting.lengths, at) for o, p in zip(truth.outputs, post, strict=True))


@dataclass(frozen=True)
class Run:
    """Of one device: outputs, gradients per operand, operands after the call."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    changed: tuple[Tensor, ...]


def run_device(
    body: OpCall, truth: Truth, operands: Sequence[Tensor], cotangents: Sequence[Tensor | None], post: Sequence[Placement], setting: Setting,
    at: tuple[int, ...], communicators: Communicators,
) -> Run:  # fmt: skip
    """Forward and backward on one device. `operands` may be changed, if the call changes them."""
    leaves = [x.requires_grad_(r.requires_grad) for x, r in zip(operands, truth.refs, strict=True)]
    if not body.target.startswith("hapx.") and is_empty(truth, post, setting, at):
        shapes = [local_shape(o.shape, p, setting.mesh.sizes, setting.lengths, at) for o, p in zip(truth.outputs, post, strict=True)]
        nothing = tuple(torch.zeros(s, dtype=o.dtype) for s, o in zip(shapes, truth.outputs, strict=True))
        return Run(nothing, tuple(torch.zeros_like(x) if x.requires_grad else None for x in leaves), tuple(leaves))
    if body.op in CONVOLUTIONS and 0 in leaves[1].shape:
        shape = local_shape(truth.outputs[0].shape, post[0], setting.mesh.sizes, setting.lengths, at)
        outputs: tuple[Tensor, ...] = (torch.zeros(shape, dtype=leaves[0].dtype) + sum(x.sum() * 0 for x in leaves[:2]),)
        if len(leaves) > 2:
            outputs = (outputs[0] + leaves[2].reshape(-1, *[1] * (leaves[1].dim() - 2)),)
    else:
        outputs = _call(body, [x.view_as(x) if x.requires_grad else x for x in leaves], setting, at, communicators)
    ready = [c if c is None or c.shape == o.shape else None for c, o in zip(cotangents, outputs, strict=True)]
    gradients = _gradients(outputs, leaves, ready)
    return Run(tuple(o.detach() for o in outputs), gradients, tuple(x.detach() for x in leaves))


def communicates(body: OpCall) -> bool:
    return any(isinstance(v, Axes) and v.axes for _, v in body.args)


def run_all(
    body: OpCall, truth: Truth, operands: Sequence[Locals], cotangents: Sequence[Locals | None], post: Sequence[Placement], setting: Setting
) -> list[Run]:
    """All devices: in threads if the body communicates, else one after another."""
    where = setting.devices

    def one(d: int, communicators: Communicators) -> Run:
        mine = [c[d] if c is not None else None for c in cotangents]
        return run_device(body, truth, [o[d] for o in operands], mine, post, setting, where[d], communicators)

    if not communicates(body):
        return [one(d, {}) for d in range(len(where))]

    def in_thread(comm: ThreadCommunicator) -> Run:
        sets = {v.axes for _, v in body.args if isinstance(v, Axes) and v.axes}
        return one(comm.rank, {axes: comm.subgroup(setting.mesh.group(comm.rank, axes)) for axes in sets})

    return run_threads(len(where), in_thread, timeout=20.0)


def failure(body: OpCall, truth: Truth, pre: Sequence[Placement], post: Sequence[Placement], setting: Setting, seed: int = 0) -> str | None:
    """What is wrong with {pre} body {post}, in one line; None if nothing is."""
    if any(x.dtype == torch.bool and any(isinstance(s, Partial) for s in p.states) for x, p in zip(truth.operands, pre, strict=True)):
        return "booleans have no summands"
    generator = torch.Generator().manual_seed(seed)
    operands = [deal(x, p, setting, generator) for x, p in zip(truth.operands, pre, strict=True)]
    cotangents = [deal(c, duals(p), setting, generator) if c is not None else None for c, p in zip(truth.cotangents, post, strict=True)]
    try:
        runs = run_all(body, truth, operands, cotangents, post, setting)
    except Exception as error:  # whatever a kernel says: the body does not run where the triple says it does
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return next(_differences(truth, runs, pre, post, setting), None)


def _differences(truth: Truth, runs: Sequence[Run], pre: Sequence[Placement], post: Sequence[Placement], setting: Setting) -> Iterator[str]:
    close = {"tolerance": truth.tolerance, "magnitude": truth.magnitude}
    for i, (whole, placement) in enumerate(zip(truth.outputs, post, strict=True)):
        if not in_placement([r.outputs[i] for r in runs], placement, whole, setting, **close):
            yield f"output {i} is not {placement}"
    for ref, i, placement in ((r, i, p) for i, (r, p) in enumerate(zip(truth.refs, pre, strict=True))):
        gradient = truth.gradients[i]
        if gradient is not None and not in_placement([_present(r.gradients[i]) for r in runs], duals(placement), gradient, setting, **close):
            yield f"gradient of {ref.name} is not {duals(placement)}"
        if not ref.requires_grad and not same(truth.operands[i], truth.changed[i]):
            if not in_placement([r.changed[i] for r in runs], placement, truth.changed[i], setting, **close):
                yield f"{ref.name} is not changed as on one device"
            elif not ref.mutated and any(isinstance(s, Sharded | Partial) for s in placement.states):
                yield f"{ref.name} is changed in a copy that is thrown away"


def is_continuous(x: Tensor) -> bool:
    """Whether its dtype is one of `hapx.ir.CONTINUOUS`."""
    return x.is_floating_point() or x.is_complex()


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, not-a-numbers included."""
    if a.is_complex() and b.is_complex():
        return same(torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj()))
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def _present(t: Tensor | None) -> Tensor:
    assert t is not None
    return t
