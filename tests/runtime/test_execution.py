"""Local programs of hand-written plans train like one device: threads for every plan, gloo for one of each kind."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hapx.collectives.communicator import create_groups
from hapx.errors import PlanError
from hapx.ir import OpCall
from hapx.plan import Form, Instruction, Plan
from hapx.runtime.executor import Executor
from hapx.verify import verify
from support.equivalence import assert_equivalent, run_ranks
from support.models import MLP
from support.plans import flat, mlp_batch_split, mlp_tensor_parallel, mlp_two_level, place, sharded

WIDTHS = (5, 8, 3)
model = partial(MLP, WIDTHS)


def inputs(step: int) -> tuple[Tensor, ...]:
    return model().example(8, seed=step)


def shards(size: int) -> dict[str, object]:
    """Storage of both weights in shards, along their dim of 8."""
    return {"layers.0.weight": place(sharded(flat(size), 0, 8)), "layers.1.weight": place(sharded(flat(size), 1, 8))}


PLANS = {
    "batch 6:2": lambda: mlp_batch_split(WIDTHS, (6, 2)),
    "batch 5:0:3": lambda: mlp_batch_split(WIDTHS, (5, 0, 3)),
    "hidden 5:3": lambda: mlp_tensor_parallel(WIDTHS, (5, 3), 8),
    "hidden 0:8": lambda: mlp_tensor_parallel(WIDTHS, (0, 8), 8),
    "stored in shards, kept": lambda: mlp_batch_split(WIDTHS, (6, 2), stored=shards(2)),
    "stored in shards 5:0:3, freed": lambda: mlp_batch_split(WIDTHS, (5, 0, 3), stored=shards(3), free=True),
    "machines 6:2, hidden even inside": lambda: mlp_two_level(WIDTHS, (6, 2), 2),
    "machines 0:8": lambda: mlp_two_level(WIDTHS, (0, 8), 2),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", PLANS)
def test_training_equals_one_device(name: str, optimizer: str) -> None:
    plan = PLANS[name]()
    verify(plan)
    uses = assert_equivalent(model, inputs, plan, optimizer=optimizer)
    assert uses.unequal
    assert uses.sharded_flops > 0.9
    assert uses.zero_length == ("0" in name)
    assert (uses.stored_sharded, uses.freed) == {"stored in shards, kept": (2, 0), "stored in shards 5:0:3, freed": (2, 2)}.get(
        name, (uses.stored_sharded, 0)
    )


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["batch 6:2", "hidden 5:3", "stored in shards 5:0:3, freed", "machines 6:2, hidden even inside"])
def test_training_equals_one_device_over_gloo(name: str) -> None:
    uses = assert_equivalent(model, inputs, PLANS[name](), mode="processes")
    assert uses.unequal


@pytest.mark.parametrize("form", [Form.GROUPED, Form.POINT_TO_POINT])
def test_forms_do_not_change_the_result(form: Form) -> None:
    plan = PLANS["stored in shards, kept"]()
    uses = assert_equivalent(model, inputs, edit(plan, lambda i: replace_forms(i, form)))
    assert uses.forms == {form}


def edit(plan: Plan, change: object) -> Plan:
    """The plan with its only program's instructions changed."""
    stage = plan.stages[0]
    program = stage.programs[plan.first]
    instructions = tuple(change(i) for i in program.instructions)  # type: ignore[operator]
    return replace(plan, stages=(replace(stage, programs={plan.first: replace(program, instructions=instructions)}),))


def replace_forms(instruction: Instruction, form: Form) -> Instruction:
    triple = instruction.triple
    if isinstance(triple.body, OpCall):
        return instruction
    return replace(instruction, triple=replace(triple, body=tuple(c if c.form is Form.NONE else replace(c, form=form) for c in triple.body)))


# ---- planted faults: the oracle finds them ----------------------------------------------------------------------------------


def local_mean(instruction: Instruction) -> Instruction:
    """The mean of local means instead of the local sum over the global count."""
    triple = instruction.triple
    if not isinstance(triple.body, OpCall) or triple.body.target != "hapx.mean_loss":
        return instruction
    body = OpCall("aten.mse_loss.default", triple.body.args[2:])
    return replace(instruction, triple=replace(triple, body=body))


def no_synchronisation(instruction: Instruction) -> Instruction:
    """The parameter's conversion says that no cotangent flows back."""
    triple = instruction.triple
    if isinstance(triple.body, OpCall) or triple.pre[0].tensor != "layers.0.weight":
        return instruction
    return replace(instruction, triple=replace(triple, body=tuple(replace(c, gradient=False) for c in triple.body)))


def bias_on_every_device(instruction: Instruction) -> Instruction:
    """A bias that is added before the sum over devices, on all of them."""
    triple = instruction.triple
    if isinstance(triple.body, OpCall) or triple.pre[0].tensor != "layers.1.bias":
        return instruction
    return replace(instruction, triple=replace(triple, body=()))


@pytest.mark.parametrize(
    "name, fault, message",
    [
        ("batch 6:2", local_mean, "loss"),
        ("batch 6:2", no_synchronisation, "gradient of layers.0.weight"),
        ("hidden 5:3", bias_on_every_device, "loss"),
    ],
)
def test_planted_faults_are_found(name: str, fault: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_equivalent(model, inputs, edit(PLANS[name](), fault))


# ---- what a person reads ------------------------------------------------------------------------------------------------------


def local_code(plan: Plan, threads: object = None) -> tuple[str, str]:
    executor = Executor(plan, threads.rank, model(), create_groups(plan.stages[0].mesh, threads))  # type: ignore[attr-defined, arg-type]
    program = executor.program(plan.first)
    return program.code, str(program.module)


def code_of(plan: Plan) -> tuple[str, str]:
    """Code and submodules of rank 1."""
    code, modules = run_ranks(plan, local_code, plan)[1]
    return code, modules


def test_code_is_readable() -> None:
    code, modules = code_of(PLANS["stored in shards, kept"]())
    assert "def forward(self, layers_0_weight, layers_0_bias, layers_1_weight, layers_1_bias, x, targets):" in code
    assert "all_gather_layers_0_weight = self.all_gather_layers_0_weight(layers_0_weight)" in code
    assert "synchronise_layers_0_bias = self.synchronise_layers_0_bias(layers_0_bias)" in code
    assert "linear = torch.ops.aten.linear.default(slice_x, all_gather_layers_0_weight, synchronise_layers_0_bias)" in code
    assert "gelu = torch.ops.aten.gelu.default(linear)" in code  # defaults are left out
    assert "(slice_x): Conversion(x: R->S0[8]@0" in modules


def test_unknown_operator_is_a_plan_error() -> None:
    def rename(i: Instruction) -> Instruction:
        body = i.triple.body
        if not isinstance(body, OpCall) or "gelu" not in body.target:
            return i
        return replace(i, triple=replace(i.triple, body=replace(body, target="aten.gelu.nothing")))

    with pytest.raises(PlanError, match=r"no operator 'aten\.gelu\.nothing'"):
        code_of(edit(PLANS["batch 6:2"](), rename))


def test_wrong_model_is_a_plan_error() -> None:
    def start(threads: object = None) -> None:
        Executor(PLANS["batch 6:2"](), threads.rank, MLP((5, 9, 3)), create_groups(flat(2), threads))  # type: ignore[attr-defined, arg-type]

    with pytest.raises(PlanError, match="another model"):
        run_ranks(PLANS["batch 6:2"](), start)


def test_evaluation_computes_the_loss_without_gradients() -> None:
    plan = mlp_batch_split(WIDTHS, (5, 3), mode="eval")

    def evaluate(threads: object = None) -> tuple[float, bool]:
        executor = Executor(plan, threads.rank, model(), create_groups(plan.stages[0].mesh, threads))  # type: ignore[attr-defined, arg-type]
        with torch.no_grad():
            loss = executor.run(plan.first, dict(zip(("x", "targets"), inputs(0), strict=True)))["mse_loss"]
        return float(loss), loss.requires_grad

    expected = float(model()(*inputs(0)).detach())
    for loss, grad in run_ranks(plan, evaluate):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert not grad


def test_the_callers_autocast_does_not_enter_the_program() -> None:
    plan = mlp_batch_split(WIDTHS, (5, 3))
    x, targets = (t.float() for t in inputs(0))

    def loss(plan: Plan, threads: object = None) -> float:
        executor = Executor(plan, threads.rank, MLP(WIDTHS, dtype=torch.float32), create_groups(plan.stages[0].mesh, threads))  # type: ignore[attr-defined, arg-type]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return float(executor.run(plan.first, {"x": x, "targets": targets})["mse_loss"].detach())

    module = MLP(WIDTHS, dtype=torch.float32)
    full = float(module(x, targets).detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = module.features(x)
    low = float(F.mse_loss(features, targets).detach())
    assert abs(low - full) > 1e-5 * full  # the test can tell them apart
    assert run_ranks(plan, loss, plan)[1] == pytest.approx(full, rel=1e-6)
