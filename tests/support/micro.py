"""A batch in micro-batches on one device: the oracle of exact losses.

In: a model, a whole batch, a number of micro-batches. Out: the sum of their losses, and its gradients, from the rewritten graph; and what the module
itself gives on the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hapx.graph.capture import capture
from hapx.graph.capture_outputs import split_output
from hapx.ir import Graph
from hapx.runtime.counts import Counter
from hapx.runtime.micro_batches import cut_batch, join, split
from hapx.theory.normalise import normalised
from support.interpret import run_module

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Outcome:
    """`results`: by place in what the module returns."""

    loss: Tensor
    gradients: Mapping[str, Tensor]
    results: Mapping[str, Tensor]


def graph_of_parts(model: Callable[[], nn.Module], inputs: Sequence[Tensor], number: int, whole: Graph | None = None) -> Graph:
    """The rewritten graph of one of `number` micro-batches. `whole`: that of the whole batch, if it is there."""
    return normalised(capture(model(), cut_batch(inputs, number)[0]), whole or capture(model(), tuple(inputs)))


def in_parts(graph: Graph, model: Callable[[], nn.Module], inputs: Sequence[Tensor]) -> Outcome:
    """Runs the graph on every micro-batch."""
    module, micro = model(), graph.micro_batches
    assert micro is not None
    named = dict(zip(graph.input_names, inputs, strict=False))
    counts = Counter(graph, torch.device("cpu")).counts(named, dict(module.named_buffers()))
    assert set(graph.input_names) == set(named) | set(counts)
    done = []
    for part in split(named, micro):
        values = run_module(graph, module, [{**part, **counts}[name] for name in graph.input_names])
        values[graph.loss].backward()
        done.append({o.tensor: values[o.tensor].detach() for o in graph.outputs})
    joined = join(graph, done)
    places = {str(o.target): joined[o.tensor] for o in graph.outputs if o.role == "result"}
    return Outcome(joined[graph.loss], gradients(module), places)


def at_once(model: Callable[[], nn.Module], inputs: Sequence[Tensor]) -> Outcome:
    """Runs the module on the whole batch."""
    module = model()
    output = module(*inputs)
    loss, _ = split_output(output)
    loss.backward()
    results = {k: v.detach() for k, v in output.items() if v is not loss} if isinstance(output, dict) else {}
    return Outcome(loss.detach(), gradients(module), results)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def assert_same(found: Outcome, expected: Outcome, tolerance: float = TOLERANCE) -> None:
    """Raises AssertionError at the first difference, relative to the loss and to the largest gradient."""
    assert abs(found.loss - expected.loss) <= tolerance * abs(expected.loss), f"loss {float(found.loss)} instead of {float(expected.loss)}"
    assert set(found.gradients) == set(expected.gradients)
    largest = max(float(g.abs().max()) for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = float((found.gradients[name] - gradient).abs().max())
        assert error <= tolerance * largest, f"the gradient of {name} is off by {error / largest:.3g}"
    for name, result in expected.results.items():
        torch.testing.assert_close(found.results[name], result, rtol=tolerance, atol=tolerance, msg=f"result {name}")


def assert_exact(model: Callable[[], nn.Module], inputs: Sequence[Tensor], *numbers: int) -> Graph:
    """So many micro-batches together give what the whole batch gives; nothing mixes samples. Returns the graph of the last number."""
    whole, expected = capture(model(), tuple(inputs)), at_once(model, inputs)
    for number in numbers:
        graph = graph_of_parts(model, inputs, number, whole)
        assert graph.micro_batches is not None and graph.micro_batches.mixing == ()
        assert_same(in_parts(graph, model, inputs), expected)
    return graph
