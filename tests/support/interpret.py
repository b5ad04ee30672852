"""Runs a captured graph with torch, node by node: the proof that normalisation keeps the model's meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hapx.ir import Graph, Kind, OpCall, Ref, TorchConst


def resolve(target: str) -> Any:
    """ "aten.linear.default" -> the operator."""
    namespace, name, overload = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _argument(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Ref):
        return tensors[value.name]
    if isinstance(value, TorchConst):
        return getattr(torch, value.name)
    if isinstance(value, tuple):
        return [_argument(v, tensors) for v in value]
    return value


def call(op: OpCall, tensors: Mapping[str, Tensor]) -> Any:
    """One operator call on the given tensors."""
    function = resolve(op.target)
    keyword_only = {a.name for a in function._schema.arguments if a.kwarg_only}
    values = {k: _argument(v, tensors) for k, v in op.args}
    return function(*(v for k, v in values.items() if k not in keyword_only), **{k: v for k, v in values.items() if k in keyword_only})


def run_graph(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of the graph by name, given its parameters, buffers and inputs. Asserts the recorded shapes, dtypes and gradients."""
    values = dict(tensors)
    for name, flat in graph.constants.items():
        ref = graph.refs[name]
        values[name] = torch.tensor(flat, dtype=getattr(torch, ref.dtype)).reshape(ref.shape)
    for node in graph.nodes:
        result = call(node.call, {**values, **{name: values[name].to(getattr(torch, dtype)) for name, dtype in node.casts}})
        for ref, value in zip(node.outputs, [result] if isinstance(result, Tensor) else result, strict=True):
            assert tuple(value.shape) == ref.shape and str(value.dtype) == f"torch.{ref.dtype}", f"{node}: {value.shape} {value.dtype}"
            assert value.requires_grad == ref.requires_grad, f"{node}: requires_grad is {value.requires_grad}"
            values[ref.name] = value
    return values


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def run_module(graph: Graph, module: nn.Module, inputs: Iterable[Tensor]) -> dict[str, Tensor]:
    """The graph on a module's own tensors; like forward, it updates the module's buffers."""
    values = run_graph(graph, {**module_tensors(module), **dict(zip(graph.input_names, inputs, strict=True))})
    buffers = dict(module.named_buffers())
    with torch.no_grad():
        for output in graph.outputs:
            if output.role == "buffer":
                buffers[str(output.target)].copy_(values[output.tensor])
    return values


def kinds(graph: Graph) -> dict[str, Kind]:
    return {name: ref.kind for name, ref in graph.refs.items()}
