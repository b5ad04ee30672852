"""The oracle of the runtime: training on many devices equals training on one.

In: a model, inputs, a plan. Out: `Uses`, what the plan uses, so that a test can ask that it is not trivial. Runs `steps` optimizer
steps in float64 on a single device and on all ranks, and compares the loss, every gradient, every parameter and every buffer:

    |a - b| <= tolerance * max(max|b|, s),   s = the model's largest gradient for gradients, 1 for parameters and buffers

(some true gradients are 0, a key bias for one). Ranks are threads of this process, or processes of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hapx.collectives.communicator import create_groups
from hapx.collectives.threads import ThreadCommunicator, run_threads
from hapx.graph.capture_inputs import bind_inputs
from hapx.graph.capture_outputs import split_output
from hapx.ir import Graph, Node, OpCall
from hapx.plan import Form, Plan
from hapx.runtime.executor import Executor
from hapx.states import Sharded
from hapx.theory.factors import gathered
from support.devices import ON_GPU, brought, device, placed
from support.pool import pool

ModelFactory = Callable[[], nn.Module]
InputsFactory = Callable[[int], tuple[Tensor, ...] | Mapping[str, Tensor]]
Mode = Literal["threads", "processes"]
MAKING = Lock()
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Trace:
    """What a run left: losses and gradients of every step, then parameters and buffers."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Uses:
    """What a plan uses. `sharded_flops`: share of the FLOPs that some axis divides."""

    sharded_flops: float
    unequal: bool
    zero_length: bool
    forms: frozenset[Form]
    stored_sharded: int
    freed: int
    sfb: int
    targets: frozenset[str]

    def __str__(self) -> str:
        forms = ", ".join(sorted(f.value for f in self.forms)) or "none"
        return (
            f"{self.sharded_flops:.0%} of the FLOPs divided, lengths {'unequal' if self.unequal else 'equal'}"
            f"{', one of them 0' if self.zero_length else ''}, forms: {forms}, {self.stored_sharded} parameters stored in shards, "
            f"{self.freed} freed and gathered again, {self.sfb} by sufficient factors"
        )


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    assert name == "adamw", name
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def train_single(model_factory: ModelFactory, inputs_factory: InputsFactory, steps: int, optimizer: str) -> Trace:
    """On one device (of the ranks' kind), with plain PyTorch."""
    model = model_factory().to(device())
    steps_of = make_optimizer(optimizer, model.parameters())
    trace = Trace()
    for step in range(steps):
        steps_of.zero_grad()
        inputs = inputs_factory(step)
        output = model(**placed(inputs)) if isinstance(inputs, Mapping) else model(*(t.to(device()) for t in inputs))
        loss, _ = split_output(output)
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.gradients.append(brought({n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}))
        steps_of.step()
    trace.state.update(brought({n: t.clone() for n, t in model.state_dict().items()}))
    return trace


def train_rank(
    plan: Plan, model_factory: ModelFactory, inputs_factory: InputsFactory, steps: int, optimizer: str, threads: ThreadCommunicator | None = None
) -> Trace:
    """On this rank of a plan. Single-device tensors are gathered for the trace."""
    rank = threads.rank if threads is not None else torch.distributed.get_rank()
    with MAKING:  # threads share the generator that a model seeds and draws from
        model = model_factory()
    executor = Executor(plan, rank, model, create_groups(plan.stages[0].mesh, threads), device=device())
    steps_of = make_optimizer(optimizer, executor.module.parameters())
    trace = Trace()
    graph = plan.graphs[plan.first]
    for step in range(steps):
        steps_of.zero_grad()
        inputs = placed(dict(zip(graph.input_names, bind_inputs(executor.module, inputs_factory(step)).tensors, strict=True)))
        loss = executor.run(plan.first, inputs)[graph.loss]
        loss.backward()
        trace.losses.append(float(loss.detach()))
        trace.gradients.append(brought(executor.store.full_gradients()))
        steps_of.step()
    trace.state.update(brought(executor.store.full_state_dict()))
    return trace


def run_ranks(plan: Plan, function: Callable[..., Any], *args: Any, mode: Mode = "threads") -> list[Any]:
    """`function(*args, threads=communicator or None)` on every rank of the plan."""
    size = plan.cluster.num_devices
    if mode == "threads":
        return run_threads(size, lambda communicator: _in_this_thread(function, *args, threads=communicator))
    return pool(size).run(partial(function, *args))


def _in_this_thread(function: Callable[..., Any], *args: Any, threads: ThreadCommunicator) -> Any:
    """Backward too, which on a GPU runs in one thread of its own for all ranks, where they would wait for each other."""
    with torch.autograd.set_multithreading_enabled(not ON_GPU):
        return function(*args, threads=threads)


def assert_equivalent(
    model_factory: ModelFactory,
    inputs_factory: InputsFactory,
    plan: Plan,
    *,
    steps: int = 3,
    optimizer: str = "sgd",
    mode: Mode = "threads",
    tolerance: float = TOLERANCE,
) -> Uses:
    """Raises AssertionError, naming the tensor, unless all ranks of the plan do what one device does. Prints and returns what the
    plan uses."""
    expected = train_single(model_factory, inputs_factory, steps, optimizer)
    traces = run_ranks(plan, train_rank, plan, model_factory, inputs_factory, steps, optimizer, mode=mode)
    for rank, trace in enumerate(traces):
        compare(trace, expected, f"rank {rank}", tolerance)
    uses = uses_of(plan)
    print(uses)
    return uses


def compare(found: Trace, expected: Trace, where: str, tolerance: float = TOLERANCE) -> None:
    """Raises AssertionError at the first difference."""
    assert len(found.losses) == len(expected.losses)
    steps = zip(found.losses, expected.losses, found.gradients, expected.gradients, strict=True)
    for step, (a, b, got, want) in enumerate(steps):
        assert abs(a - b) <= tolerance * max(abs(b), 1e-300), f"{where}, step {step}: loss {a!r} instead of {b!r}"
        assert set(got) == set(want), f"{where}, step {step}: gradients of {sorted(set(got) ^ set(want))} on one side only"
        largest = max((float(g.abs().max()) for g in want.values() if g.numel()), default=1.0)
        for name, g in want.items():
            _close(got[name], g, largest, tolerance, f"{where}, step {step}: gradient of {name}")
    assert set(found.state) == set(expected.state), f"{where}: state of {sorted(set(found.state) ^ set(expected.state))} on one side only"
    for name, t in expected.state.items():
        _close(found.state[name], t, 1.0, tolerance, f"{where}: {name} after training")


def _close(a: Tensor, b: Tensor, scale: float, tolerance: float, what: str) -> None:
    assert a.shape == b.shape, f"{what} has shape {list(a.shape)} instead of {list(b.shape)}"
    if not b.numel():
        return
    a, b = (t.to(torch.promote_types(t.dtype, torch.float64)) for t in (a, b))
    assert bool(a.isfinite().all()) or not bool(b.isfinite().all()), f"{what} is not finite"
    error, bound = float((a - b).abs().max()), tolerance * max(float(b.abs().max()), scale)
    assert error <= bound, f"{what} is off by {error:.3g}, allowed {bound:.3g}"


# ---- what a plan uses ------------------------------------------------------------------------------------------------------


def uses_of(plan: Plan) -> Uses:
    """Of the first training program."""
    stage, graph = plan.stages[0], plan.graphs[plan.first]
    program, lengths = stage.programs[plan.first], stage.lengths[plan.first]
    total = divided = 0
    forms, targets, freed, cuts = set(), set(), set(), set()
    for triple in (i.triple for i in program.instructions):
        for p in (*triple.pre, *triple.post):
            cuts |= {s.cut for s in p.placement.states if isinstance(s, Sharded)}
        if not isinstance(triple.body, OpCall):
            forms |= {c.form for c in triple.body if c.form is not Form.NONE}
            freed |= {triple.pre[0].tensor for c in triple.body if c.free}
            continue
        assert triple.node is not None
        targets.add(triple.body.target)
        cost = flops(graph, graph.nodes[triple.node])
        total += cost
        divided += cost if any(w is not None for w in triple.work) else 0
    used = [lengths[c] for c in cuts if c in lengths]
    stored = sum(any(isinstance(s, Sharded) for s in copy.placement.states) for st in plan.storage for copy in st.copies)
    return Uses(
        divided / max(total, 1), any(len(set(n)) > 1 for n in used), any(0 in n for n in used), frozenset(forms), stored, len(freed),
        sum(gathered(i.triple.body) is not None for i in program.instructions), frozenset(targets),
    )  # fmt: skip


def flops(graph: Graph, node: Node) -> int:
    """Floating-point operations of a node, roughly: two per multiplication of a product, one per element of anything else."""
    call, out = node.call, node.outputs[0].size
    shapes = [graph.refs[n].shape for n in call.refs()]
    if call.op in ("aten.linear", "aten.mm", "aten.bmm", "aten.matmul", "aten.einsum"):
        return 2 * out * shapes[0][-1]
    if call.op == "aten.addmm":
        return 2 * out * shapes[1][-1]
    if call.op in ("aten.conv1d", "aten.conv2d", "aten.conv3d"):
        weight = graph.refs[call.refs()[1]]
        return 2 * out * weight.size // weight.shape[0]
    if call.op.startswith("aten.conv_transpose"):
        weight = graph.refs[call.refs()[1]]
        return 2 * graph.refs[call.refs()[0]].size * weight.size // weight.shape[0]
    if call.op == "aten.scaled_dot_product_attention":
        return 4 * out * shapes[1][-2]
    return out
