"""An unchanged PyTorch module and example inputs go in, a `hapx.ir.Graph` comes out.

The steps: `bind_inputs` (names, empty twins on the module's device), `trace` (torch.export, training IR, no decompositions),
`Flattener` and `Emitter` (one flat functional list of calls), and here: naming by the module's own names, ties, outputs, dead code,
regions, layers, blocks, hash.

Invariant: the nodes, run in order on the module's tensors, give the module's loss, gradients and buffers. The module, which may be
on cpu, a GPU or `meta`, is not changed, and its values are not read (only those of tensors that are neither parameter nor buffer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from hapx.errors import CaptureError
from hapx.graph.capture_inputs import Inputs, bind_inputs, check_targets, device_of, unique_name
from hapx.graph.capture_refusals import check_functions, check_modules
from hapx.graph.capture_trace import MARK, Trace, trace
from hapx.graph.normalize import Emitter, live_nodes, tensor_ref
from hapx.graph.normalize_flatten import Flattener, Slot
from hapx.graph.quiet import quiet
from hapx.graph.regions import Mark, find_boundaries, find_regions
from hapx.graph.segments import find_blocks, graph_hash
from hapx.ir import CONTINUOUS, Graph, Kind, Node, Output, TensorRef

MAX_CONSTANT = 1_000_000  # elements


def capture(module: nn.Module, example_inputs: Any, *, loss_fn: Callable[..., Tensor] | None = None, training: bool | None = None) -> Graph:
    """The computation of `module(*example_inputs)` (of `loss_fn(module(inputs), *targets)` for example_inputs = (inputs, *targets)).

    `training`: train or eval mode, by default the module's. Raises CaptureError or UnsupportedOperatorError, with the user's line.
    """
    _check_module(module, loss_fn)
    check_functions(module, loss_fn)
    training = module.training if training is None else training
    inputs = bind_inputs(module, example_inputs, loss_fn is not None)
    if loss_fn is not None:
        check_targets(loss_fn, len(inputs.args[2]))
    if not inputs.tensors:
        raise CaptureError("example_inputs hold no tensor", where=type(module).__name__, allowed="at least one tensor")
    names = _Names(module)
    traced = trace(module, inputs, device_of(module, inputs), loss_fn, training)
    return _Assembler(module, names, inputs, traced, training).graph()


def _check_module(module: nn.Module, loss_fn: Callable[..., Tensor] | None) -> None:
    if not isinstance(module, nn.Module):
        raise CaptureError(f"the model is a {type(module).__name__}", allowed="a torch.nn.Module")
    wrappers = {
        "OptimizedModule": "torch.compile",
        "DistributedDataParallel": "DDP",
        "DataParallel": "DataParallel",
        "RecursiveScriptModule": "scripting",
    }
    if (kind := type(module).__name__) in wrappers:
        raise CaptureError(f"the model is a {kind}", allowed="a plain single-device module", hint=f"pass the module from before {wrappers[kind]}")
    check_modules(module)
    if isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters()):
        raise CaptureError("loss_fn has parameters", allowed="a loss without parameters", hint="make it a part of the model")


class _Names:
    """Names of parameters and buffers. `canonical`: id of a tensor -> its first name; `aliases`: all names of tensors that have several."""

    def __init__(self, module: nn.Module):
        self.parameters = dict(module.named_parameters())
        self.buffers = dict(module.named_buffers())
        groups: dict[int, list[str]] = {}
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
            groups.setdefault(id(tensor), []).append(name)
        self.canonical = {key: group[0] for key, group in groups.items()}
        self.first = {name: group[0] for group in groups.values() for name in group}
        self.tied = tuple(tuple(group) for group in groups.values() if len(group) > 1)
        _check_memory(self.parameters)
        for _ in self.refs():  # raises for dtypes and layouts that cannot be distributed, before anything is traced
            pass

    def refs(self) -> Iterable[tuple[TensorRef, Tensor]]:
        for name, tensor in self.parameters.items():
            yield tensor_ref(name, tensor, Kind.PARAMETER, f"parameter {name!r}"), tensor
        for name, tensor in self.buffers.items():
            yield tensor_ref(name, tensor, Kind.BUFFER, f"buffer {name!r}"), tensor


def _check_memory(parameters: dict[str, nn.Parameter]) -> None:
    """Two Parameter objects on one memory would be two parameters here and one in the module."""
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, parameter in parameters.items():
        if parameter.device.type == "meta" or parameter.numel() == 0 or parameter.layout is not torch.strided:
            continue
        other = seen.setdefault((parameter.data_ptr(), parameter.stride()), name)
        if other != name:
            raise CaptureError(
                f"parameters {other!r} and {name!r} share memory, but are two Parameter objects",
                allowed="one Parameter under two names",
                hint="tie them by assignment: a.weight = b.weight",
            )


@dataclass
class _Assembler:
    """Puts the graph together."""

    module: nn.Module
    names: _Names
    inputs: Inputs
    traced: Trace
    training: bool

    def graph(self) -> Graph:
        used = set(self.names.first)
        self.input_names = tuple(unique_name(name, used) for name in self.inputs.names)
        self.emitter = Emitter(used, self.traced.device)
        self.constants: dict[str, tuple[float | int | bool | complex, ...]] = {}
        self.buffers: dict[str, Slot] = {}
        flattener = Flattener(self.traced.prefix)
        results = flattener.run(self.traced.program.graph_module, self._roots(used), Mark())
        slots = [s for s in results if isinstance(s, Slot)]
        with quiet(), _fake_mode(self.traced), torch.enable_grad():  # autocast is asked with dtypes that not all operators take
            self.emitter.run(flattener.calls, slots)
            outputs = self._outputs(slots)
        return self._finish(outputs)

    def _roots(self, used: set[str]) -> list[Slot]:
        """A slot per placeholder: parameter, buffer, constant or input."""
        refs = {ref.name: ref for ref, _ in self.names.refs()}
        self.given = dict(refs)
        specs = self.traced.program.graph_signature.input_specs
        placeholders = [n for n in self.traced.program.graph.nodes if n.op == "placeholder"]
        pending = iter(zip(self.input_names, self.inputs.tensors, strict=True))
        roots = []
        for spec, node in zip(specs, placeholders, strict=True):
            slot, fake = Slot(), node.meta.get("val")
            roots.append(slot)
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                name = self.names.first[str(spec.target).removeprefix(self.traced.prefix)]
                ref = refs[name]
                if ref.kind is Kind.BUFFER:
                    self.buffers[name] = slot
            elif spec.kind is InputKind.USER_INPUT:
                name, given = next(pending)
                ref = tensor_ref(name, fake, Kind.INPUT, f"input {node.name!r}")
                # mse_loss on meta leaves a mark on the fake target: what the user passed counts
                ref = replace(ref, requires_grad=given.requires_grad and ref.dtype in CONTINUOUS)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                ref = self._constant(str(spec.target), used)
            else:
                raise CaptureError(
                    f"forward uses an object that is no tensor ({spec.kind.name.lower()})", where=_first_use(node) or str(spec.target),
                    hint="a random generator, a quantized or a scripted module cannot be captured",
                )  # fmt: skip
            self.given[ref.name] = ref
            self.emitter.root(slot, ref, fake.detach().requires_grad_(ref.requires_grad))
        return roots

    def _constant(self, target: str, used: set[str]) -> TensorRef:
        """A tensor that is neither parameter nor buffer nor input: its values become part of the graph."""
        value = self.traced.program.constants[target]
        where = target.removeprefix(self.traced.prefix)
        if value.requires_grad:
            raise CaptureError(f"the tensor {where!r} requires a gradient but is no parameter", hint="make it an nn.Parameter")
        if value.is_meta and value.numel():
            raise CaptureError(f"the tensor {where!r} is on meta and has no values", hint="use register_buffer")
        if value.numel() > MAX_CONSTANT:
            raise CaptureError(
                f"forward uses a tensor of {value.numel()} elements that is neither parameter nor buffer ({where})",
                allowed=f"at most {MAX_CONSTANT} elements",
                hint="use register_buffer (persistent=False keeps it out of the state_dict)",
            )
        ref = tensor_ref(unique_name("constant", used), value, Kind.CONSTANT, where)
        self.constants[ref.name] = tuple(value.detach().flatten().tolist()) if value.numel() else ()
        return ref

    def _outputs(self, slots: Sequence[Slot]) -> list[Output]:
        loss, results = slots[0], slots[1:]
        trainable = any(p.requires_grad for p in self.names.parameters.values())
        if self.training and trainable and (loss.fake is None or not loss.fake.requires_grad):
            raise CaptureError(
                "the loss does not depend on any parameter that requires a gradient",
                where=self._gradient_lost(loss.name) or type(self.module).__name__,
                hint="is forward under no_grad, or the loss detached?",
            )
        outputs = [Output(loss.name, "loss")]
        outputs += [Output(s.name, "result", place) for s, place in zip(results, self.traced.results, strict=True)]
        for name, slot in self.buffers.items():
            if slot.name != name:
                outputs.append(Output(self.emitter.detach_result(slot), "buffer", name))
        return outputs

    def _gradient_lost(self, loss: str) -> str:
        """The user's line at which a value that needs a gradient goes into one that has none, the last one before the loss."""
        normal = self.emitter.normal
        live = live_nodes(normal.nodes, [loss])
        for node, mark, keep in reversed(list(zip(normal.nodes, normal.marks, live, strict=True))):
            if keep and any(normal.tensors[n].requires_grad for n in node.call.refs()) and not any(o.requires_grad for o in node.outputs):
                return mark.where
        return ""

    def _finish(self, outputs: list[Output]) -> Graph:
        normal = self.emitter.normal
        live = live_nodes(normal.nodes, [o.tensor for o in outputs])
        nodes = tuple(n for n, keep in zip(normal.nodes, live, strict=True) if keep)
        marks = [m for m, keep in zip(normal.marks, live, strict=True) if keep]
        refs = self._refs(nodes, outputs)
        graph = Graph(
            refs=refs,
            nodes=nodes,
            outputs=tuple(outputs),
            regions=find_regions(marks),
            tied=self.names.tied,
            segment_of=(0,) * len(nodes),
            block_of=find_blocks(nodes, refs),
            input_names=self.input_names,
            batch=self.inputs.batch,
            mode="train" if self.training else "eval",
            constants={k: v for k, v in self.constants.items() if k in refs},
            hash="",
            returns=self.traced.container,
            boundaries=find_boundaries(marks),
        )
        return replace(graph, hash=graph_hash(graph))

    def _refs(self, nodes: Sequence[Node], outputs: Sequence[Output]) -> dict[str, TensorRef]:
        """Everything the module is given (used or not), the constants that are used, and every value, in order."""
        used = {name for n in nodes for name in n.call.refs()} | {o.tensor for o in outputs}
        refs = {name: ref for name, ref in self.given.items() if ref.kind is not Kind.CONSTANT or name in used}
        refs |= {name: replace(refs[name], mutated=True) for name in self.emitter.mutated}
        refs |= {o.name: o for n in nodes for o in n.outputs}
        return refs


def _first_use(placeholder: Any) -> str:
    """The user's line that uses a placeholder first."""
    marks = ((n.meta.get("custom") or {}).get(MARK) for n in placeholder.users)
    return next((m.where for m in marks if isinstance(m, Mark)), "")


def _fake_mode(traced: Trace) -> Any:
    """The fake tensor mode of the trace, in which operators without tensor arguments are run again."""
    values = (n.meta.get("val") for n in traced.program.graph.nodes if n.op == "placeholder")
    return next(v.fake_mode for v in values if isinstance(v, Tensor) and hasattr(v, "fake_mode"))
