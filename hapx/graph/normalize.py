"""From a flat list of calls to the nodes of a `Graph`: functional, with named and complete arguments.

In: the `Call`s of an exported program and the tensors it is given. Out: `Normal`: nodes, their marks, all tensors.

Invariant: the nodes, run in order, compute the same values and, by local autograd, the same gradients as the module. Every tensor has
one producer (static single assignment). To know which in-place write is seen where, each call is also run on fake tensors: those that
share a storage are aliases; a write is accepted if no other view of its storage is read later. The same run says what requires a
gradient. Values that enter a no_grad context are detached there, so nothing inside or after it sends a gradient back. What autocast casts
is cast by nodes of its own, so a call means the same wherever it runs; only parameters are cast by the call that reads them
(`Node.casts`): they are stored, moved and synchronised in their own dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from hapx.errors import CaptureError, UnsupportedOperatorError
from hapx.graph import normalize_args as arguments
from hapx.graph import normalize_bags as bags
from hapx.graph import normalize_random as random
from hapx.graph import normalize_spectra as spectra
from hapx.graph.capture_inputs import unique_name
from hapx.graph.normalize_aliases import ADJOINTS, plain_form
from hapx.graph.normalize_args import name_of
from hapx.graph.normalize_autocast import Caster, call_with, fakes
from hapx.graph.normalize_flatten import Call, Slot, slots_in
from hapx.graph.normalize_views import Step, View, Views, scatter_into
from hapx.graph.regions import Mark
from hapx.ir import CONTINUOUS, DTYPE_BYTES, Kind, Node, OpCall, Ref, TensorRef


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
        self._used, self._device = used, device
        self._caster = Caster("cuda" if device.type == "cuda" else "cpu", self._cast, self._of_parameter)
        self._alive: list[Tensor] = []  # fakes are kept: a freed storage's address could come again
        self._alias: dict[int, int] = {}
        self._group: dict[int, list[Slot]] = {}
        self._root_kind: dict[int, tuple[Kind, str]] = {}
        self._written: dict[str, str] = {}
        self._detached: dict[str, Slot] = {}
        self._last_use: dict[int, int] = {}
        self._views: defaultdict[int, Views] = defaultdict(Views)
        self._fakes: dict[str, Tensor] = {}

    def root(self, slot: Slot, ref: TensorRef, fake: Tensor) -> None:
        """Declare a tensor that the program is given."""
        self.normal.tensors[ref.name] = ref
        self._assign(slot, ref.name, fake)
        self._root_kind[slot.storage] = (ref.kind, ref.name)

    def run(self, calls: Sequence[Call], results: Sequence[Slot]) -> None:
        """Emit all calls. `results`: slots that are read after the last one."""
        self._last_use = {id(slot): i for i, call in enumerate(calls) for slot in call.slots()}
        self._last_use |= {id(slot): len(calls) for slot in results}
        with torch.autocast(self._caster.device, enabled=False):
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
        elif name in ("aten.cat.default", "aten.concat.default") and _skips(bound["tensors"]):
            self._join_some(call, bound)
        elif name == "aten.broadcast_tensors.default":
            self._broadcast(call, bound["tensors"])
        elif (drawn := self._drawn(call, bound)) is not None:
            self._rename(drawn, call.out)
        elif name == spectra.TARGET and not bound["return_complex"]:
            self._rename(spectra.signals(bound, self._computing(call)), call.out)
        elif name in ADJOINTS and arguments.dtype_of(bound["self"]).is_complex:
            self._rename(spectra.adjoint(bound, self._computing(call)), call.out)
        elif (alias := plain_form(call.op, bound)) is not None:
            self._compute(call, *alias, call.out)
        elif (dtype := arguments.target_dtype(call.op, bound)) is not None:
            extra = {k: bound.get(k) for k in ("non_blocking", "copy", "memory_format")} if "copy" in bound else {}
            options = {"non_blocking": False, "copy": False, "memory_format": None} | extra
            self._compute(call, torch.ops.aten.to.dtype, {"self": bound["self"], "dtype": dtype, **options}, call.out)
        elif name in bags.TARGETS and bags.can_be_written_out(bound) and not any(id(slot) in self._last_use for slot in call.out[1:]):
            self._bags(call, bound)
        else:
            if name in arguments.STATEFUL:
                self._note_statistics(call, bound)
            self._compute(call, call.op, bound, call.out)

    # one call -> one node

    def _compute(self, call: Call, op: torch._ops.OpOverload, bound: Mapping[str, Any], out: Any) -> None:
        """Run `op` on fakes, append its node, fill the slots `out`."""
        if not call.mark.grad:
            bound = {k: self._without_grad(v, call) for k, v in bound.items()}
        bound = self._pin_dtype(op, bound)
        bound, casts = self._caster.arguments(op, bound, call)
        try:
            result = call_with(op, fakes(bound, casts))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(
                f"{name_of(op)} looks at values, so the computation depends on the values of a tensor", where=call.where,
                hint="use torch.where or a mask, or operators that do not check what they are given",
            ) from error  # fmt: skip
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
            source = bound.get("self")
            if len(slots) == 1 and isinstance(source, Slot) and source.storage == slot.storage:
                self._views[slot.storage].note(name, View(source.name, op, {k: v for k, v in bound.items() if k != "self"}))
        plain = tuple((k, arguments.plain_value(v, call.where, _to_ref)) for k, v in bound.items())
        devices = arguments.device_arguments(op)
        plain = tuple((k, None if k in devices else v) for k, v in plain)
        tags = ("random",) if arguments.is_random(op) else ("dependent on strides",) if name_of(op) in arguments.STRIDED else ()
        node = Node(OpCall(name_of(op), plain), tuple(outputs), call.module, call.mark.source, (None,) * len(outputs), tags, casts)
        self.normal.nodes.append(node)
        self.normal.marks.append(call.mark)

    def _pin_dtype(self, op: torch._ops.OpOverload, bound: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write down the dtype that a factory took from torch's default."""
        if "dtype" not in bound or bound["dtype"] is not None or any(slots_in(tuple(bound.values()))):
            return bound
        result = call_with(op, fakes(bound))
        return {**bound, "dtype": result.dtype} if isinstance(result, Tensor) else bound

    def _cast(self, call: Call, source: Slot, dtype: torch.dtype, out: Slot) -> None:
        bound = {"self": source, "dtype": dtype, "non_blocking": False, "copy": False, "memory_format": None}
        self._compute(call, torch.ops.aten.to.dtype, bound, out)

    def _of_parameter(self, slot: Slot) -> bool:
        """Whether a slot holds a parameter or a view of one."""
        return self._root_kind.get(slot.storage, (Kind.VALUE, ""))[0] is Kind.PARAMETER

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
            self._assign(call.out, source.name, call_with(call.op, fakes(bound)))

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

    def _join_some(self, call: Call, bound: dict[str, Any]) -> None:
        """`cat` skips tensors of shape (0,), whatever the others are like: an empty cache, say."""
        some = [s for s in bound["tensors"] if tuple(s.fake.shape) != (0,)] or bound["tensors"][:1]
        if len(some) > 1:
            self._compute(call, call.op, {**bound, "tensors": some}, call.out)
        else:
            (only,) = some
            self._compute(call, torch.ops.aten.clone.default, {"self": only, "memory_format": None}, call.out)

    # writes in place

    def _bags(self, call: Call, bound: Mapping[str, Any]) -> None:
        def producer(slot: Slot) -> Node | None:
            return next((n for n in self.normal.nodes if any(o.name == slot.name for o in n.outputs)), None)

        self._rename(bags.embedding_bag(bound, bags.bag_length(bound, producer), self._computing(call)), call.out[0])

    def _drawn(self, call: Call, bound: Mapping[str, Any]) -> Slot | None:
        """The result of a random operator, in the calls of which it is made; None for any other, and where it must stay as it is (and is refused)."""
        return random.drawn(call.op, bound, call.where, self._device, self._computing(call))

    def _computing(self, call: Call) -> bags.Compute:
        """Appends calls in the place of `call`."""

        def compute(op: torch._ops.OpOverload, **given: Any) -> Slot:
            slot = Slot()
            self._compute(call, op, arguments.bind(op, (), given), slot)
            return slot

        return compute

    def _rename(self, result: Slot, out: Slot) -> None:
        """`out` is what was computed for it."""
        assert result.fake is not None
        self._assign(out, result.name, result.fake)

    def _write(self, i: int, call: Call, bound: dict[str, Any]) -> None:
        """The write as a new value, which all names of the written tensor mean from here on."""
        assert call.written is not None
        target: Slot = bound[call.written]
        assert target.fake is not None
        steps = self._refuse_write(i, call, target)
        new = Slot()
        if call.op._schema.name == "aten::copy_":
            self._copy(call, bound["src"], target.fake, new)
        elif (drawn := self._drawn(call, bound)) is not None:
            new = drawn
            self._convert(call, new, target.fake)
        else:
            twin = arguments.functional_twin(call.op, call.where)
            self._compute(call, twin, arguments.rebind(call.op, twin, bound), new)
            self._convert(call, new, target.fake)
        assert new.fake is not None
        if new.fake.shape != target.fake.shape:  # torch would make `out` as large as the result
            raise UnsupportedOperatorError(
                f"{name_of(call.op)} writes a result of shape {list(new.fake.shape)} into a tensor of shape {list(target.fake.shape)}",
                where=call.where, hint="use an operator that makes a new tensor",
            )  # fmt: skip
        kind, name = self._root_kind.get(target.storage, (Kind.VALUE, ""))
        if kind is Kind.BUFFER:
            self._note_write(name, "an in-place operator", call)
        renamed = self._follow(call, target, new, steps)
        for slot in self._group[target.storage]:
            if slot.name in renamed:
                changed = renamed[slot.name]
                slot.name, slot.fake = changed.name, changed.fake

    def _follow(self, call: Call, target: Slot, new: Slot, steps: Sequence[Step]) -> dict[str, Slot]:
        """New values for all names of the memory that are read later, by their old names."""
        views, renamed = self._views[target.storage], {target.name: new}
        self._join(new, target)
        for step in steps:
            view, out = views[step.written or step.name], Slot()
            if step.written is None:
                self._compute(call, view.op, {"self": renamed[view.source], **view.rest}, out)
            else:
                self._scatter(call, view, self._value(step.name), renamed[step.written], out)
            self._join(out, target)
            renamed[step.name] = out
        views.rename({old: slot.name for old, slot in renamed.items()})
        return renamed

    def _scatter(self, call: Call, view: View, base: Slot, value: Slot, out: Slot) -> None:
        """`base` with `value` in the place of a view. Of complex numbers as pairs of real ones: for scatters of others torch has no gradients."""
        scattered = scatter_into(view, base, value)
        assert scattered is not None and base.fake is not None
        op, bound = scattered
        if "src" not in bound or not base.fake.is_complex():
            self._compute(call, op, bound, out)
            return
        compute, rank = self._computing(call), base.fake.dim()
        pairs = {name: compute(torch.ops.aten.view_as_real.default, self=bound[name]) for name in ("self", "src")}
        self._rename(compute(torch.ops.aten.view_as_complex.default, self=compute(op, **bound | pairs | {"dim": bound["dim"] % rank})), out)

    def _join(self, slot: Slot, target: Slot) -> None:
        """The slot's value is on the memory of `target` from now on."""
        assert slot.fake is not None
        self._alive.append(slot.fake)
        self._fakes[slot.name] = slot.fake
        self._alias[_storage(slot.fake)] = slot.storage = target.storage

    def _value(self, name: str) -> Slot:
        slot = Slot()
        slot.name, slot.fake = name, self._fakes[name]
        return slot

    def _copy(self, call: Call, source: Any, like: Tensor, new: Slot) -> None:
        """`like.copy_(source)`: the source, in the target's dtype and shape."""
        assert isinstance(source, Slot) and source.fake is not None
        current = source
        if not call.mark.grad:
            current = self._without_grad(current, call)
        if current.fake is not None and current.fake.dtype != like.dtype:
            cast = Slot()
            self._cast(call, current, like.dtype, cast)
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
            cast = Slot()
            self._cast(call, new, like.dtype, cast)
            new.name, new.fake = cast.name, cast.fake

    def _refuse_write(self, i: int, call: Call, target: Slot) -> Sequence[Step]:
        """What follows from the write for other names of the memory; errors where it cannot be a new value."""
        kind, name = self._root_kind.get(target.storage, (Kind.VALUE, ""))
        what = f"{name_of(call.op)} changes"
        assert target.fake is not None
        if kind is Kind.PARAMETER:
            raise CaptureError(f"{what} the parameter {name!r} in forward", where=call.where, hint="use a new tensor, or a buffer")
        if kind is Kind.INPUT:
            raise CaptureError(
                f"{what} the input {name!r} in place", where=call.where, hint=f"{name} = {name}.clone() before, or the operator without _"
            )
        others = [s.name for s in self._group[target.storage] if s.name != target.name and self._last_use.get(id(s), -1) > i]
        views = self._views[target.storage]
        path = views.path(target.name)
        if not call.mark.grad and any(self._fakes[n].requires_grad for n in path):
            raise CaptureError(f"{what} a value that needs a gradient, under no_grad", where=call.where, hint="use a new tensor")
        if kind is Kind.BUFFER and len(path) > 1:
            others.append(path[-1])  # what it holds at the end is an output
        steps = views.steps(target.name, dict.fromkeys(others))
        if steps is None or any(s.written and scatter_into(views[s.written], *[self._value(s.name)] * 2) is None for s in steps):
            raise UnsupportedOperatorError(
                f"{name_of(call.op)} writes into a tensor of which another view is read later",
                where=call.where,
                allowed="in-place operators on whole tensors, slices, reshaped and transposed tensors",
                hint="make a new tensor with torch.where, torch.cat or the operator without _",
            )
        return steps

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
        self._fakes[name] = fake
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
    return TensorRef(name, tuple(int(n) for n in fake.shape), dtype, kind, bool(fake.requires_grad) and dtype in CONTINUOUS)


def _skips(tensors: Sequence[Slot]) -> bool:
    """Whether some of the tensors that are joined are of shape (0,) and say nothing about the dtype either."""
    fakes = [s.fake for s in tensors if s.fake is not None]
    return any(tuple(f.shape) == (0,) for f in fakes) and len({f.dtype for f in fakes}) == 1


def _storage(fake: Tensor) -> int:
    return int(fake.untyped_storage()._cdata)


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
