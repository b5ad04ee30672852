"""From a flat list of calls to the nodes of a `Graph`: functional, with named and complete arguments.

In: the `Call`s of an exported program and the tensors it is given. Out: `Normal`: nodes, their marks, all tensors.

Invariant: the nodes, run in order, compute the same values and, by local autograd, the same gradients as the module. Every tensor has
one producer (static single assignment). To know which in-place write is seen where, each call is also run on fake tensors: those that
share a storage are aliases; a write is accepted if no other view of its storage is read later. The same run says what requires a
gradient. Values that enter a no_grad context are detached there, so nothing inside or after it sends a gradient back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hapx.errors import CaptureError, UnsupportedOperatorError
from hapx.graph import normalize_args as arguments
from hapx.graph.capture_inputs import unique_name
from hapx.graph.normalize_args import name_of
from hapx.graph.normalize_flatten import Call, Slot, slots_in
from hapx.graph.regions import Mark
from hapx.ir import DTYPE_BYTES, FLOATING, Kind, Node, OpCall, Ref, TensorRef


@dataclass
class Normal:
    """The normal form, before dead code is removed. `tensors`: every tensor by name."""

    nodes: list[Node] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    tensors: dict[str, TensorRef] = field(default_factory=dict)


class Emitter:
    """Emits the nodes of a list of calls. `used`: names that are taken; `roots`: parameters, buffers, inputs and constants."""

    def __init__(self, used: set[str], device: torch.device):
        self.normal = Normal()
        self._used = used
        self._autocast_device = "cuda" if device.type == "cuda" else "cpu"
        self._alive: list[Tensor] = []  # fakes are kept: a freed storage's address could come again
        self._alias: dict[int, int] = {}
        self._group: dict[int, list[Slot]] = {}
        self._root_kind: dict[int, tuple[Kind, str]] = {}
        self._written: dict[str, str] = {}
        self._detached: dict[str, Slot] = {}
        self._last_use: dict[int, int] = {}

    def root(self, slot: Slot, ref: TensorRef, fake: Tensor) -> None:
        """Declare a tensor that the program is given."""
        self.normal.tensors[ref.name] = ref
        self._assign(slot, ref.name, fake)
        self._root_kind[slot.storage] = (ref.kind, ref.name)

    def run(self, calls: Sequence[Call], results: Sequence[Slot]) -> None:
        """Emit all calls. `results`: slots that are read after the last one."""
        self._last_use = {id(slot): i for i, call in enumerate(calls) for slot in call.slots()}
        self._last_use |= {id(slot): len(calls) for slot in results}
        with torch.autocast(self._autocast_device, enabled=False):
            for i, call in enumerate(calls):
                if call.mark.grad:
                    self._detached.clear()
                self._emit(i, call)

    def _emit(self, i: int, call: Call) -> None:
        bound = arguments.bind(call.op, call.args, call.kwargs)
        name = name_of(call.op)
        if arguments.ASSERTIONS.match(name):
            return
        if name == "aten.detach_.default":
            self._detach_in_place(call, bound["self"])
        elif arguments.is_identity(call.op, bound):
            self._identity(call, bound)
        elif call.written is not None:
            self._write(i, call, bound)
        elif name == "aten.detach.default" and not bound["self"].fake.requires_grad:
            self._identity(call, bound)
        elif name == "aten.broadcast_tensors.default":
            self._broadcast(call, bound["tensors"])
        elif name == "aten.view.default":
            self._compute(call, torch.ops.aten.reshape.default, {"self": bound["self"], "shape": bound["size"]}, call.out)
        elif (dtype := arguments.target_dtype(call.op, bound)) is not None:
            extra = {k: bound.get(k) for k in ("non_blocking", "copy", "memory_format")} if "copy" in bound else {}
            options = {"non_blocking": False, "copy": False, "memory_format": None} | extra
            self._compute(call, torch.ops.aten.to.dtype, {"self": bound["self"], "dtype": dtype, **options}, call.out)
        else:
            if name in arguments.STATEFUL:
                self._note_statistics(call, bound)
            self._compute(call, call.op, bound, call.out)

    # one call -> one node

    def _compute(self, call: Call, op: torch._ops.OpOverload, bound: Mapping[str, Any], out: Any) -> None:
        """Run `op` on fakes, append its node, fill the slots `out`."""
        if not call.mark.grad:
            bound = {k: self._without_grad(v, call) for k, v in bound.items()}
        bound = self._pin_dtype(op, bound, call)
        result = self._run(op, bound, call.mark)
        slots = [out] if isinstance(out, Slot) else list(out)
        results = [result] if isinstance(result, Tensor) else list(result)
        assert len(slots) == len(results), (name_of(op), len(slots), len(results))
        base = call.base.rstrip("_0123456789") or call.base if call.written else call.base
        kind = self._kind(op, bound)
        outputs = []
        for k, (slot, fake) in enumerate(zip(slots, results, strict=True)):
            name = unique_name(base if len(slots) == 1 else f"{base}_{k}", self._used)
            ref = self._tensor(name, fake, kind, call)
            outputs.append(ref)
            self._assign(slot, name, fake)
        plain = tuple((k, arguments.plain_value(v, call.where, _to_ref)) for k, v in bound.items())
        devices = arguments.device_arguments(op)
        plain = tuple((k, None if k in devices else v) for k, v in plain)
        tags = ("random",) if arguments.is_random(op) else ("dependent on strides",) if name_of(op) in arguments.STRIDED else ()
        node = Node(OpCall(name_of(op), plain), tuple(outputs), call.module, call.mark.source, (None,) * len(outputs), tags)
        self.normal.nodes.append(node)
        self.normal.marks.append(call.mark)

    def _run(self, op: torch._ops.OpOverload, bound: Mapping[str, Any], mark: Mark) -> Any:
        """The operator on fake tensors, under autocast where the call was."""
        with ExitStack() as stack:
            if mark.autocast is not None:
                stack.enter_context(torch.autocast(self._autocast_device, dtype=getattr(torch, mark.autocast), cache_enabled=False))
            keyword_only = {a.name for a in op._schema.arguments if a.kwarg_only}
            values = {k: _to_fake(v) for k, v in bound.items()}
            return op(*(v for k, v in values.items() if k not in keyword_only), **{k: v for k, v in values.items() if k in keyword_only})

    def _pin_dtype(self, op: torch._ops.OpOverload, bound: Mapping[str, Any], call: Call) -> Mapping[str, Any]:
        """Write down the dtype that a factory took from torch's default."""
        if "dtype" not in bound or bound["dtype"] is not None or any(slots_in(tuple(bound.values()))):
            return bound
        result = self._run(op, bound, call.mark)
        return {**bound, "dtype": result.dtype} if isinstance(result, Tensor) else bound

    def _tensor(self, name: str, fake: Tensor, kind: Kind, call: Call) -> TensorRef:
        if any(not isinstance(n, int) for n in fake.shape):
            raise CaptureError(
                f"{name_of(call.op)} makes a tensor whose shape depends on values",
                where=call.where,
                hint="use torch.where or a mask instead of nonzero() or boolean indexing",
            )
        ref = tensor_ref(name, fake, kind, call.where)
        self.normal.tensors[name] = ref
        return ref

    def _kind(self, op: torch._ops.OpOverload, bound: Mapping[str, Any]) -> Kind:
        """CONSTANT if nothing but constants goes in, and no chance."""
        tensors = self.normal.tensors
        fixed = all(tensors[s.name].kind is Kind.CONSTANT for s in slots_in(tuple(bound.values())))
        return Kind.CONSTANT if fixed and not arguments.is_random(op) else Kind.VALUE

    def _without_grad(self, value: Any, call: Call) -> Any:
        """In a no_grad context: the detached twin of every tensor that requires a gradient."""
        if isinstance(value, tuple | list):
            return type(value)(self._without_grad(v, call) for v in value)
        if not isinstance(value, Slot) or value.fake is None or not value.fake.requires_grad:
            return value
        if value.name not in self._detached:
            twin = self._detached[value.name] = Slot()
            outside = replace(call, mark=replace(call.mark, grad=True), base="detach", written=None)
            self._compute(outside, torch.ops.aten.detach.default, {"self": value}, twin)
            self.normal.marks[-1] = call.mark
        return self._detached[value.name]

    # calls that are rewritten

    def _identity(self, call: Call, bound: Mapping[str, Any]) -> None:
        source = next(iter(bound.values()))
        if call.out is not source:
            self._assign(call.out, source.name, self._run(call.op, bound, call.mark))

    def _detach_in_place(self, call: Call, slot: Slot) -> None:
        assert slot.fake is not None
        if slot.fake.requires_grad:
            storage = slot.storage
            self._compute(call, torch.ops.aten.detach.default, {"self": slot}, slot)
            assert slot.storage == storage

    def _broadcast(self, call: Call, tensors: Sequence[Slot]) -> None:
        shape = torch.broadcast_shapes(*(s.fake.shape for s in tensors if s.fake is not None))
        for slot, out in zip(tensors, call.out, strict=True):
            assert slot.fake is not None
            if slot.fake.shape == shape:
                self._assign(out, slot.name, slot.fake)
            else:
                bound = {"self": slot, "size": list(shape), "implicit": False}
                self._compute(replace(call, base="expand"), torch.ops.aten.expand.default, bound, out)

    # writes in place

    def _write(self, i: int, call: Call, bound: dict[str, Any]) -> None:
        """The write as a new value, which all names of the written tensor mean from here on."""
        assert call.written is not None
        target: Slot = bound[call.written]
        assert target.fake is not None
        self._refuse_write(i, call, target)
        new = Slot()
        if call.op._schema.name == "aten::copy_":
            self._copy(call, bound["src"], target.fake, new)
        else:
            twin = arguments.functional_twin(call.op, call.where)
            self._compute(call, twin, arguments.rebind(call.op, twin, bound), new)
            self._convert(call, new, target.fake)
        assert new.fake is not None and new.fake.shape == target.fake.shape
        kind, name = self._root_kind.get(target.storage, (Kind.VALUE, ""))
        if kind is Kind.BUFFER:
            self._note_write(name, "an in-place operator", call)
        self._alive.append(new.fake)
        self._alias[_storage(new.fake)] = target.storage
        old = target.name
        for slot in self._group[target.storage]:
            if slot.name == old:
                slot.name, slot.fake = new.name, new.fake

    def _copy(self, call: Call, source: Any, like: Tensor, new: Slot) -> None:
        """`like.copy_(source)`: the source, in the target's dtype and shape."""
        assert isinstance(source, Slot) and source.fake is not None
        current = source
        if not call.mark.grad:
            current = self._without_grad(current, call)
        if current.fake is not None and current.fake.dtype != like.dtype:
            cast = Slot()
            bound = {"self": current, "dtype": like.dtype, "non_blocking": False, "copy": False, "memory_format": None}
            self._compute(call, torch.ops.aten.to.dtype, bound, cast)
            current = cast
        if current.fake is not None and current.fake.shape != like.shape:
            wide = Slot()
            self._compute(call, torch.ops.aten.expand.default, {"self": current, "size": list(like.shape), "implicit": False}, wide)
            current = wide
        assert current.fake is not None
        new.name, new.fake = current.name, current.fake.clone()  # a storage of its own: no alias of the source

    def _convert(self, call: Call, new: Slot, like: Tensor) -> None:
        """In place, the result keeps the target's dtype."""
        assert new.fake is not None
        if new.fake.dtype != like.dtype:
            bound = {"self": new, "dtype": like.dtype, "non_blocking": False, "copy": False, "memory_format": None}
            cast = Slot()
            self._compute(call, torch.ops.aten.to.dtype, bound, cast)
            new.name, new.fake = cast.name, cast.fake

    def _refuse_write(self, i: int, call: Call, target: Slot) -> None:
        kind, name = self._root_kind.get(target.storage, (Kind.VALUE, ""))
        what = f"{name_of(call.op)} changes"
        assert target.fake is not None
        if kind is Kind.PARAMETER:
            raise CaptureError(f"{what} the parameter {name!r} in forward", where=call.where, hint="use a new tensor, or a buffer")
        if kind is Kind.INPUT:
            raise CaptureError(
                f"{what} the input {name!r} in place", where=call.where, hint=f"{name} = {name}.clone() before, or the operator without _"
            )
        if not call.mark.grad and target.fake.requires_grad:
            raise CaptureError(f"{what} a value that needs a gradient, under no_grad", where=call.where, hint="use a new tensor")
        seen = [s for s in self._group[target.storage] if s.name != target.name and self._last_use.get(id(s), -1) > i]
        if seen or (kind is Kind.BUFFER and self.normal.tensors[name].shape != tuple(target.fake.shape)):
            raise UnsupportedOperatorError(
                f"{name_of(call.op)} writes into a tensor of which another view is read later",
                where=call.where,
                allowed="in-place operators on whole tensors",
                hint="make a new tensor with torch.where, torch.cat or the operator without _",
            )

    def _note_statistics(self, call: Call, bound: Mapping[str, Any]) -> None:
        flag, buffers = arguments.STATEFUL[name_of(call.op)]
        for buffer in buffers if bound[flag] else ():
            if isinstance(slot := bound[buffer], Slot):
                kind, name = self._root_kind.get(slot.storage, (Kind.VALUE, ""))
                if kind is not Kind.BUFFER or slot.name != name:
                    raise CaptureError(f"{name_of(call.op)} has running statistics that are no buffer", where=call.where, hint="use register_buffer")
                self._note_write(name, name_of(call.op), call)

    def _note_write(self, buffer: str, writer: str, call: Call) -> None:
        """One buffer may be updated by its normalisation or by in-place operators, not by both."""
        if self._written.setdefault(buffer, writer) != writer:
            raise CaptureError(f"buffer {buffer!r} is updated by {self._written[buffer]} and by {writer}", where=call.where, hint="use two buffers")

    # slots

    def _assign(self, slot: Slot, name: str, fake: Tensor) -> None:
        self._alive.append(fake)
        key = _storage(fake)
        slot.name, slot.fake, slot.storage = name, fake, self._alias.get(key, key)
        group = self._group.setdefault(slot.storage, [])
        if slot not in group:
            group.append(slot)

    @property
    def mutated(self) -> frozenset[str]:
        """Buffers that an operator updates inside."""
        return frozenset(buffer for buffer, writer in self._written.items() if writer in arguments.STATEFUL)

    def detach_result(self, slot: Slot) -> str:
        """The name of the slot's value without gradient (for buffers at the end of forward)."""
        assert slot.fake is not None
        if not slot.fake.requires_grad:
            return slot.name
        out = Slot()
        call = Call(torch.ops.aten.detach.default, (slot,), {}, out, "detach", Mark(), "")
        self._compute(call, call.op, {"self": slot}, out)
        return out.name


def tensor_ref(name: str, fake: Tensor, kind: Kind, where: str) -> TensorRef:
    """The description of a tensor. Raises CaptureError for dtypes and layouts that cannot be distributed."""
    dtype = str(fake.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES or fake.layout is not torch.strided:
        what = dtype if dtype not in DTYPE_BYTES else str(fake.layout).removeprefix("torch.")
        raise CaptureError(f"a {what} tensor", where=where, allowed=f"dense tensors of {', '.join(DTYPE_BYTES)}")
    return TensorRef(name, tuple(int(n) for n in fake.shape), dtype, kind, bool(fake.requires_grad) and dtype in FLOATING)


def _storage(fake: Tensor) -> int:
    return int(fake.untyped_storage()._cdata)


def _to_fake(value: Any) -> Any:
    if isinstance(value, Slot):
        return value.fake
    if isinstance(value, tuple | list):
        return type(value)(_to_fake(v) for v in value)
    return value


def _to_ref(value: Any) -> Ref | None:
    return Ref(value.name) if isinstance(value, Slot) else None


def live_nodes(nodes: Sequence[Node], outputs: Sequence[str]) -> list[bool]:
    """Which nodes the outputs need; those that update running statistics are always live."""
    needed = set(outputs)
    live = [False] * len(nodes)
    for i in range(len(nodes) - 1, -1, -1):
        call = nodes[i].call
        flag, buffers = arguments.STATEFUL.get(call.target, ("", ()))
        stateful = bool(flag) and bool(call[flag]) and any(call[b] is not None for b in buffers)
        if stateful or any(o.name in needed for o in nodes[i].outputs):
            live[i] = True
            needed.update(call.refs())
    return live
