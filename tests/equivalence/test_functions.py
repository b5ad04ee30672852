"""A model with torch.autograd.Functions trains as on one device: with their own backward, whose rules are found by execution."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from hapx.errors import CaptureError, PlanError
from hapx.functions import NAMESPACE
from hapx.graph.capture import capture
from hapx.ir import Graph
from hapx.planner import plan_graphs
from hapx.runtime.calls import find_operator
from hapx.theory.derive import derive
from hapx.theory.discover import ProbedOperatorWarning, discover
from hapx.verify import verify
from support import functions
from support.cases import MESHES
from support.clusters import FOUR
from support.equivalence import assert_equivalent
from support.functions import Net, Projected, Reversed, Rounded, Swish, inputs
from support.random_programs import Taste, random_plan

CLASSES = Swish, Rounded, Projected, Reversed


@cache
def graph() -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProbedOperatorWarning)
        return discover(capture(Net(), inputs(0)))


def operators(graph: Graph) -> list[str]:
    return [t for n in graph.nodes if (t := n.call.target).startswith(NAMESPACE)]


def test_each_is_one_operator() -> None:
    assert [name.split("_s_")[1:] for name in operators(graph())] == [
        ["Swish", "T", "0.default"], ["Rounded", "Ti", "0.default"], ["Projected", "TTN", "2.default"], ["Reversed", "Tf", "0.default"],
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", ["auto", "tensor-parallel", "zero"])
def test_planned(strategy: str) -> None:
    plan = plan_graphs([graph()], FOUR, strategy=strategy)
    verify(plan)
    assert plan.statistics["coverage"]["flops"] == 0
    assert_equivalent(Net, inputs, plan, steps=2, optimizer="adamw")


@pytest.mark.parametrize("mesh, seed", [("2", 1), ("3", 2), ("2x2", 3)])
def test_random_programs(mesh: str, seed: int) -> None:
    plan = random_plan(derive(graph(), MESHES[mesh]), Random(seed), Taste(partial=8.0))
    verify(plan)
    assert_equivalent(Net, inputs, plan)


READS = """
import sys
from pathlib import Path
from hapx.plan import Plan
from hapx.runtime.calls import find_operator
plan = Plan.load(sys.argv[1])
print(sum(find_operator(n.call.target).namespace == "hapx_functions" for n in plan.graphs[plan.first].nodes))
"""


def test_a_process_that_has_only_the_plan_finds_them(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_graphs([graph()], FOUR, strategy="dp-even").save(path)
    tests = str(Path(__file__).parents[1])
    said = subprocess.run([sys.executable, "-c", READS, str(path)], env={"PYTHONPATH": tests}, capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "4", said.stderr
    without = operators(graph())[0].replace("support", "elsewhere")
    with pytest.raises(PlanError, match="there is no operator"):
        find_operator(without)


# ---- what cannot be an operator --------------------------------------------------------------------------------------------


class Drawing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class Writing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Looking(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * float(x.max())


class Named(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, names: dict[str, int]) -> Tensor:
        return x * len(names)


class Apart(Function):
    """Its context is set up apart."""

    @staticmethod
    def forward(x: Tensor, names: dict[str, int]) -> Tensor:
        return x * len(names)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.names = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * len(ctx.names), None


def unchanged() -> type[Function]:
    class Unchanged(Function):
        """Of forward there is no operator."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return -g

    return Unchanged


def local() -> type[Function]:
    class Local(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

    return Local


REFUSED = {
    "draws random numbers": (Drawing, ()), "writes into its operands": (Writing, ()), "forward says": (Looking, ()),
    "arguments are not": (Named, ({},)), "arguments are not tensors": (Apart, ({"a": 1, "b": 2},)),
    "not at the level of a module": (local(), ()), "where other processes find it": (unchanged(), ()),
}  # fmt: skip


class Using(nn.Module):
    def __init__(self, function: type[Function], more: tuple[Any, ...]):
        super().__init__()
        self.layer, self.function, self.more = nn.Linear(4, 3), function, more

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.function.apply(self.layer(x), *self.more)
        return found.mean()


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    function, more = REFUSED[why]
    before = dict(vars(function))
    with pytest.raises(CaptureError, match=why) as caught:
        capture(Using(function, more), (torch.randn(5, 4),))
    assert function.__name__ in str(caught.value) and "test_functions.py" in str(caught.value)
    assert vars(function) == before and "__init__" not in vars(BackwardCFunction)  # nothing stays


def test_what_was_refused_runs_as_ever() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(CaptureError, match="arguments are not"):
        capture(Using(*REFUSED["arguments are not tensors"]), (torch.randn(5, 4),))
    Apart.apply(x, {"a": 1, "b": 2}).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3,), 2.0))


def test_classes_stay_as_they_are() -> None:
    class Inherits(Swish):
        pass

    before = [dict(vars(function)) for function in (*CLASSES, Inherits)]
    capture(Net(), inputs(0))
    with pytest.raises(CaptureError, match="not at the level"):
        capture(Using(Inherits, ()), (torch.randn(5, 4),))
    assert [dict(vars(function)) for function in (*CLASSES, Inherits)] == before


@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_are_as_around_the_call(gradients: bool) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            with torch.set_grad_enabled(gradients):
                swish = Swish.apply(h)
            return (h * swish).mean()

    found = capture(Around(), (torch.randn(5, 4),))
    (own,) = [node for node in found.nodes if node.call.target.startswith(NAMESPACE)]
    (after,) = [node for node in found.nodes if node.call.op == "aten.mul"]
    assert own.outputs[0].requires_grad is gradients and after.outputs[0].requires_grad


AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
from hapx.graph.capture import capture
from support.functions import Net, inputs
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(4) as pool:
    for graph in pool.map(lambda _: capture(Net(), inputs(0)), range(12)):
        print(sum(node.call.target.startswith("hapx_functions") for node in graph.nodes), end="")
"""


def test_threads_that_capture_at_once_have_all_operators() -> None:
    tests = str(Path(__file__).parents[1])
    said = subprocess.run([sys.executable, "-c", AT_ONCE], env={"PYTHONPATH": tests}, capture_output=True, text=True, timeout=120)
    assert said.stdout == 12 * "4", said.stderr


def test_refused_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="may cast under autocast"):
        capture(Net(), inputs(0))


def test_a_class_that_is_defined_again_is_taken_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Swish):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return 2 * x

    x = torch.randn(3, dtype=torch.float64)
    operator = find_operator(operators(graph())[0])
    assert torch.equal(operator(x), Swish.forward(SimpleNamespace(save_for_backward=lambda *_: None), x))
    Other.__module__, Other.__qualname__ = Swish.__module__, Swish.__qualname__
    with monkeypatch.context() as patch:
        patch.setattr(functions, "Swish", Other)
        assert operators(capture(Net(), inputs(0))) == operators(graph())
        assert torch.equal(operator(x), 2 * x)
    capture(Net(), inputs(0))
    assert not torch.equal(operator(x), 2 * x)


def test_functions_run_as_ever_elsewhere() -> None:
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (5, 8)))
    before = Projected.apply(x, weight, None)
    capture(Net(), inputs(0))
    for own, after in zip(before, Projected.apply(x, weight, None), strict=True):
        assert torch.equal(own, after) and type(own.grad_fn) is type(after.grad_fn)
