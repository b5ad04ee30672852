"""Builds the local program of one device: from a `Program` (data) to a `torch.fx.GraphModule` that a person can read.

In: a plan, the device, the program's key, communicators, the random number generator. Out: a `LocalProgram`, whose module takes
parameters, buffers and inputs as this device stores them and returns the graph's outputs. Each property (tensor, placement) is a
local variable; operators are aten calls, conversions and composites are submodules with readable names. Invariant: every device
runs the same instructions in the same order, so the collectives match, forward and backward; a call that has no elements on this
device keeps its place (`hapx.runtime.empty`).

The conversion Invariant -> Replicated of a parameter as it is stored is no collective in its place: the parameter enters the gradient
synchroniser (`hapx.runtime.gradients`) before all other steps of its path. Steps along different axes commute, so this changes nothing.

The instructions of a checkpoint region, conversions included, are a submodule that is computed again in backward (`hapx.runtime.recompute`);
parameters enter the synchroniser before it, so that their gradients are summed in the backward pass proper.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from hapx.collectives.composites import COMPOSITES
from hapx.collectives.conversion import Conversion
from hapx.collectives.rng import Rng
from hapx.errors import PlanError
from hapx.ir import CONVOLUTIONS, Graph, Kind, OpCall, TensorRef
from hapx.layout import Block
from hapx.plan import Communication, Instruction, Plan, ProgramKey, Triple
from hapx.runtime.calls import Arguments, Composite, Reading, fill_all, find_operator, on_operands, returns_several
from hapx.runtime.empty import EmptyCall, EmptyConvolution, accepts, example, kept_operands
from hapx.runtime.gradients import BUCKET_BYTES, Key, Layout, Pass, Use, bucket_layout, summed_in
from hapx.runtime.local import Communicators, Position
from hapx.runtime.names import Names, identifier
from hapx.runtime.recompute import Recomputed
from hapx.runtime.scope import Scope, region_runs
from hapx.states import Invariant, Placement, Property, Replicated, is_recut
from hapx.transposes import TRANSPOSES

# kernels that end the process on some empty tensors instead of refusing them (attention over no heads in half precision, torch 2.11; on GPUs
# backward of an embedding without columns, which writes one)
DANGEROUS = frozenset({"aten.scaled_dot_product_attention", "aten.embedding"})
# cuDNN's kernels keep other operands than PyTorch's own, which run where the batch is empty
RECURRENT = frozenset({"aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"})


@dataclass
class UnderWay:
    """The forward pass under way, if there is one and it keeps a graph."""

    current: Pass | None = None


class Synchronise(nn.Module):
    """The place where a parameter enters the gradient synchroniser of the pass under way."""

    def __init__(self, key: Key, under_way: UnderWay):
        super().__init__()
        self.key, self.under_way = key, under_way

    def forward(self, parameter: Tensor) -> Tensor:
        current = self.under_way.current
        return parameter if current is None else current.enter(self.key)

    __call__ = forward  # there are many of them, and nobody hooks them

    def extra_repr(self) -> str:
        return f"{self.key[0]}: gradients are summed over axes {self.key[1]}"


@dataclass(frozen=True)
class LocalProgram:
    """What one device runs. `parameters`, `buffers`, `inputs`: names of the module's arguments, in order; `input_placements`: in which
    placement each input arrives; `gives`: what it returns. `position`: this device's place under the lengths of this program.
    `layout`: buckets of the parameters that enter the synchroniser of the pass `under_way`. `snapshots`: buffers that get new values after the pass
    although backward may read what they had. `frees`: whether gathered parameters are freed after forward."""

    key: ProgramKey
    graph: Graph
    position: Position
    module: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    input_placements: Mapping[str, Placement]
    gives: tuple[Property, ...]
    layout: Layout
    under_way: UnderWay
    snapshots: frozenset[str]
    frees: bool

    @property
    def code(self) -> str:
        """Python text: the program, then its regions that are computed again in backward."""
        regions = [f"\n\n# {name}\n{m.body.code}" for name, m in self.module.named_modules() if isinstance(m, Recomputed)]
        return "".join([str(self.module.code), *regions])


def build_local(
    plan: Plan,
    rank: int,
    key: ProgramKey,
    communicators: Communicators,
    rng: Rng,
    *,
    stage: int = 0,
    device: torch.device | None = None,
    local_inputs: Mapping[str, Placement] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    gradient_dtype: torch.dtype | None = None,
) -> LocalProgram:
    """The program of `key` for device `rank`'s part of a stage. `local_inputs`: inputs that arrive in the given placement instead of Replicated; the
    program must hold the conversion from Replicated to it. `gradient_dtype`: in which gradients of parameters are summed over devices."""
    builder = _Builder(plan, stage, rank, key, communicators, rng, device or torch.device("cpu"), dict(local_inputs or {}), gradient_dtype)
    return builder.build(bucket_bytes)


def snapshots(graph: Graph) -> frozenset[str]:
    """Buffers that get a new value, and on which, or on a view of which, something depends that has a gradient."""
    counts: dict[str, bool] = {}
    for node in reversed(graph.nodes):
        here = any(o.requires_grad or counts.get(o.name, False) for o in node.outputs)
        counts |= {name: here or counts.get(name, False) for name in node.call.refs()}
    return frozenset(name for name in graph.written if counts.get(name, False))


class _Builder:
    """The program while it is made. `scope`: the graph under way, `top` or that of a region."""

    def __init__(
        self, plan: Plan, number: int, rank: int, key: ProgramKey, communicators: Communicators, rng: Rng, device: torch.device,
        local_inputs: dict[str, Placement], gradient_dtype: torch.dtype | None,
    ):  # fmt: skip
        stage = plan.stages[number]
        self.graph, self.program = plan.part(key, number), stage.programs[key]
        self.stored = frozenset(self.program.needs)
        self.key, self.position, self.communicators, self.rng, self.device = key, Position.of(stage, key, rank), communicators, rng, device
        self.local_inputs, self.gradient_dtype = local_inputs, gradient_dtype
        self.arguments = Arguments(self.position, communicators, rng, device)
        self.root, self.modules = nn.Module(), Names(dir(nn.Module()))
        self.top = self.scope = Scope()
        self.entered: dict[Key, fx.Node] = {}
        self.under_way = UnderWay()
        self.uses: list[Use] = []
        self.frees = False
        self.written = self.graph.written.keys() | {r.name for r in self.graph.refs.values() if r.mutated}

    def build(self, bucket_bytes: int) -> LocalProgram:
        parameters, buffers, inputs = self._placeholders()
        runs = region_runs(self.program, self.graph)
        ends = frozenset(runs.values())
        for k, instruction in enumerate(self.program.instructions):
            if k in runs:
                self.scope = Scope(self.top)
            self._instruction(instruction)
            if self.scope is not self.top and k + 1 in ends:
                self._close_region(k + 1)
        gives = {p.tensor: p for p in self.program.gives}
        ordered = tuple(gives[o.tensor] for o in self.graph.outputs)
        self.top.graph.output(tuple(self.top.read(p) for p in ordered))
        self.top.graph.lint()
        module = fx.GraphModule(self.root, self.top.graph, "LocalProgram")
        placements = {n: self.local_inputs.get(n, self.replicated) for n in inputs}
        layout = bucket_layout(self.uses, self.device, bucket_bytes)
        return LocalProgram(
            self.key, self.graph, self.position, module, parameters, buffers, inputs, placements, ordered, layout, self.under_way,
            snapshots(self.graph), self.frees,
        )  # fmt: skip

    @property
    def replicated(self) -> Placement:
        return Placement((Replicated(),) * len(self.position.mesh.axes))

    # ---- arguments of the program -------------------------------------------------------------------------------------

    def _placeholders(self) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        needs = {p.tensor: p for p in self.program.needs}
        kinds = {n: self.graph.refs[n].kind for n in needs}
        parameters = tuple(n for n in needs if kinds[n] is Kind.PARAMETER)
        buffers = tuple(n for n in needs if kinds[n] is Kind.BUFFER)
        inputs = self.graph.input_names
        for name in (*parameters, *buffers, *inputs):
            placement = self.local_inputs.get(name) or (needs[name].placement if name in needs else self.replicated)
            self.top.made[Property(name, placement)] = self.top.graph.placeholder(self.top.names.fresh(identifier(name)))
        for name, ref in self.graph.refs.items():
            if name in self.graph.constants and self.graph.producer.get(name) is None:
                values = torch.tensor(self.graph.constants[name], dtype=getattr(torch, ref.dtype), device=self.device).reshape(ref.shape)
                self.top.made[Property(name, self.replicated)] = self._constant(identifier(name), values)
        return parameters, buffers, inputs

    def _constant(self, name: str, value: Tensor) -> fx.Node:
        name = self.modules.fresh(name)
        self.root.register_buffer(name, value)
        return self.top.graph.get_attr(name)

    def _submodule(self, name: str, module: nn.Module, *operands: fx.Node, scope: Scope | None = None) -> fx.Node:
        name = self.modules.fresh(name)
        self.root.add_module(name, module)
        return (scope or self.scope).graph.call_module(name, operands)

    # ---- regions ------------------------------------------------------------------------------------------------------

    def _close_region(self, stop: int) -> None:
        """The scope of a region becomes a submodule of the program; what instructions from number `stop` on read are its outputs."""
        region, self.scope = self.scope, self.top
        later = dict.fromkeys([p for i in self.program.instructions[stop:] for p in i.triple.pre] + list(self.program.gives))
        results = [p for p in later if p in region.made and p not in self.top and not region.pass_on(p)]
        region.graph.output(tuple(region.made[p] for p in results))
        region.graph.lint()
        body = fx.GraphModule(self.root, region.graph, "Region")
        written = frozenset(i for i, (_, p) in enumerate(region.taken.values()) if p is not None and p.tensor in self.written)
        grads = [self.graph.refs[p.tensor].requires_grad for p in results]
        node = self._submodule("recomputed", Recomputed(body, written, grads, self.rng), *region.taken)
        for i, p in enumerate(results):
            name = identifier(self.graph.refs[p.tensor].name)
            self.top.made[p] = self.top.graph.create_node("call_function", operator.getitem, (node, i), name=name)

    # ---- instructions -------------------------------------------------------------------------------------------------

    def _instruction(self, instruction: Instruction) -> None:
        triple = instruction.triple
        if instruction.remat is not None:
            raise PlanError("a plan with rematerialisation cannot be run yet", where=str(triple), hint='plan with remat="none"')
        if all(p in self.scope for p in triple.post):  # the first that makes a property stands
            return
        if isinstance(triple.body, OpCall):
            self._call(triple, triple.body)
        else:
            self._conversion(triple, triple.body)

    def _read(self, p: Property) -> fx.Node:
        if p not in self.scope:
            raise PlanError(f"{p} is used before it is made", where=f"program of device {self.position.coordinates}")
        return self.scope.read(p)

    def _conversion(self, triple: Triple, path: tuple[Communication, ...]) -> None:
        """The steps of a path, one submodule each; those that do nothing at all are left out."""
        (source,), (target,) = triple.pre, triple.post
        ref = self.graph.refs[source.tensor]
        if ref.kind is Kind.INPUT and source not in self.scope:
            raise PlanError(f"input {ref.name} arrives cut, but {triple} needs all of it")
        at, axes = source.placement, ()
        if source in self.stored and ref.kind is Kind.PARAMETER:  # not a copy of it, whose cotangent must go on to the parameter
            axes = tuple(sorted(c.axis for c in path if c.gradient and isinstance(c.source, Invariant) and isinstance(c.target, Replicated)))
        if axes:
            node = self.scope.take(self._enter(ref, axes, source))
            path = tuple(c for c in path if c.axis not in axes)
            at = _with_states(at, {a: Replicated() for a in axes})
        else:
            node = self._read(source)
        for c in path:
            after = at.with_state(c.axis, c.target)
            forward, backward = TRANSPOSES[type(c.source), type(c.target)]
            if forward != "none" or (c.gradient and backward != "none"):
                axes, *blocks = self._moved(at, after, c)
                summed = self.gradient_dtype if ref.kind is Kind.PARAMETER else None
                module = Conversion(c, self.communicators[axes], *blocks, ref.name, summed)
                self.frees |= c.free
                verb = forward if forward != "none" else f"backward_{backward}"
                node = self._submodule(f"{verb}_{identifier(ref.name)}", module, node)
            at = after
        self.scope.made[target] = node

    def _moved(self, before: Placement, after: Placement, c: Communication) -> tuple[tuple[int, ...], Block | None, Block | None]:
        """The axes of a communication, and how they cut the tensor before and after."""
        if is_recut(c.source, c.target):
            return self.position.recut(before, after, c.axis)
        return (c.axis,), self.position.block(before, c.axis), self.position.block(after, c.axis)

    def _enter(self, ref: TensorRef, axes: tuple[int, ...], stored: Property) -> fx.Node:
        """The parameter in the synchroniser: a node of the program, outside of all regions."""
        key = (ref.name, axes)
        if key not in self.entered:
            entry = Synchronise(key, self.under_way)
            size = math.prod(self.position.shape(ref.shape, stored.placement))
            self.uses.append(Use(key, size, summed_in(self.gradient_dtype, getattr(torch, ref.dtype))))
            self.entered[key] = self._submodule(f"synchronise_{identifier(ref.name)}", entry, self.top.read(stored), scope=self.top)
        return self.entered[key]

    def _call(self, triple: Triple, call: OpCall) -> None:
        assert triple.node is not None
        made = self.graph.nodes[triple.node]
        outputs, operands = made.outputs, [self._read(p) for p in triple.pre]
        label, casts = identifier(call.op.split(".", 1)[1]), dict(made.casts)
        dtypes = {i: getattr(torch, casts[p.tensor]) for i, p in enumerate(triple.pre) if p.tensor in casts}
        module: nn.Module | None
        if call.target in COMPOSITES:
            arguments = tuple((name, self.arguments.bound(name, value)) for name, value in call.args)
            module, listed = Composite(call.target, COMPOSITES[call.target], arguments), len(outputs) > 1
        else:
            function = find_operator(call.target)
            listed = returns_several(function)
            args, kwargs = self.arguments.of(function, call)
            module = self._stand_in(triple, call, function, args, kwargs, listed)
            label = label if module is None else f"empty_{label}"
        if dtypes:
            module = Reading(call.target, on_operands(function, args, kwargs) if module is None else module, dtypes)
        if module is None:
            args, kwargs = fill_all(args, kwargs, operands)
            node = self.scope.graph.create_node("call_function", function, args, kwargs, name=label if listed else identifier(outputs[0].name))
        else:
            node = self._submodule(label, module, *operands)
        self._bind(node, triple, outputs, listed)

    def _bind(self, node: fx.Node, triple: Triple, outputs: tuple[TensorRef, ...], listed: bool) -> None:
        """Variables for the outputs of a call, named after the tensors."""
        for i, (ref, p) in enumerate(zip(outputs, triple.post, strict=True)):
            value = self.scope.graph.create_node("call_function", operator.getitem, (node, i), name=identifier(ref.name)) if listed else node
            self.scope.made.setdefault(p, value)

    def _stand_in(
        self, triple: Triple, call: OpCall, function: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], listed: bool
    ) -> nn.Module | None:
        """What replaces a call that has no elements on this device and that the kernel refuses, or None."""
        assert triple.node is not None
        outputs = self.graph.nodes[triple.node].outputs
        shapes = [self.position.shape(r.shape, p.placement) for r, p in zip(outputs, triple.post, strict=True)]
        refs = [self.graph.refs[p.tensor] for p in triple.pre]
        local = [self.position.shape(r.shape, p.placement) for r, p in zip(refs, triple.pre, strict=True)]
        if triple.pre and all(0 in s for s in shapes):
            read = self.graph.nodes[triple.node].reads
            examples = [example(s, getattr(torch, read(r)), r.requires_grad, self.device) for s, r in zip(local, refs, strict=True)]
            if not (call.op in DANGEROUS or self._by_cudnn(call)) and accepts(function, *fill_all(args, kwargs, examples), shapes):
                return None
            described = [(s, getattr(torch, r.dtype), r.requires_grad) for s, r in zip(shapes, outputs, strict=True)]
            return EmptyCall(call.target, described, listed, self._kept(triple.node, local))
        if call.op in CONVOLUTIONS and 0 in local[1]:  # input, weight, bias
            return EmptyConvolution(call.target, shapes[0])
        return None

    def _by_cudnn(self, call: OpCall) -> bool:
        """Whether what runs where there are elements is cuDNN's."""
        return call.op in RECURRENT and self.device.type == "cuda"

    def _kept(self, index: int, local: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Which operands (as the call reads them) a node keeps for backward on devices where it has elements. local: their shapes here."""
        node = self.graph.nodes[index]
        function = find_operator(node.call.target)
        call = on_operands(function, *self.arguments.of(function, node.call))
        refs = [self.graph.refs[n] for n in node.call.refs()]
        real = self._by_cudnn(node.call)
        shapes = [tuple(max(n, 1) for n in shape) for shape in local] if real else [r.shape for r in refs]
        operands = [(s, getattr(torch, node.reads(r)), r.requires_grad) for s, r in zip(shapes, refs, strict=True)]
        return kept_operands(call, operands, self.device, real)


def _with_states(placement: Placement, states: Mapping[int, Any]) -> Placement:
    for axis, state in states.items():
        placement = placement.with_state(axis, state)
    return placement
