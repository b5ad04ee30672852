"""Parameters in pieces: values of rank 0, names, ties, whole tensors again, models on meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hapx.collectives.communicator import create_groups
from hapx.errors import HapError, LaunchError
from hapx.plan import Plan
from hapx.runtime.executor import Executor
from support.equivalence import run_ranks
from support.models import MLP
from support.plans import mlp_batch_split, mlp_tensor_parallel, mlp_two_level

WIDTHS = (5, 8, 3)
PLANS = {
    "batch 6:2": lambda: mlp_batch_split(WIDTHS, (6, 2)),
    "hidden 5:0:3": lambda: mlp_tensor_parallel(WIDTHS, (5, 0, 3), 8),
    "machines 6:2": lambda: mlp_two_level(WIDTHS, (6, 2), 2),
}


def start(plan: Plan, module: nn.Module, threads: Any) -> Executor:
    return Executor(plan, threads.rank, module, create_groups(plan.stages[0].mesh, threads))


@pytest.mark.parametrize("name", PLANS)
def test_values_are_those_of_rank_0(name: str) -> None:
    plan = PLANS[name]()

    def states(threads: Any = None) -> tuple[dict[str, Tensor], list[str]]:
        executor = start(plan, MLP(WIDTHS, seed=threads.rank), threads)
        return executor.store.full_state_dict(), [n for n, _ in executor.module.named_parameters()]

    expected = MLP(WIDTHS, seed=0)
    for state, names in run_ranks(plan, states):
        assert names == [n for n, _ in expected.named_parameters()]
        assert state.keys() == expected.state_dict().keys()
        assert all(torch.equal(state[n], t) for n, t in expected.state_dict().items())


def test_pieces_are_small_and_own_their_memory() -> None:
    plan = PLANS["hidden 5:0:3"]()

    def sizes(threads: Any = None) -> list[tuple[tuple[int, ...], int]]:
        module = start(plan, MLP(WIDTHS), threads).module
        return [(tuple(p.shape), p.untyped_storage().nbytes()) for p in module.parameters()]

    found = run_ranks(plan, sizes)
    assert [shape for shape, _ in found[0]] == [(5, 5), (5,), (3, 5), (3,)]
    assert [shape for shape, _ in found[1]] == [(0, 5), (0,), (3, 0), (3,)]
    assert all(memory == 8 * torch.Size(shape).numel() for rank in found for shape, memory in rank)


@pytest.mark.parametrize("name", PLANS)
def test_whole_state_loads_into_pieces(name: str) -> None:
    plan, wanted = PLANS[name](), MLP(WIDTHS, seed=7).state_dict()

    def reload(threads: Any = None) -> dict[str, Tensor]:
        executor = start(plan, MLP(WIDTHS), threads)
        executor.store.load_full_state_dict(wanted)
        return executor.store.full_state_dict()

    for state in run_ranks(plan, reload):
        assert all(torch.equal(state[n], t) for n, t in wanted.items())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.pop("layers.0.bias"), "missing layers.0.bias"),
        (lambda s: s.update(extra=torch.zeros(1)), "unknown extra"),
        (lambda s: s.update({"layers.0.bias": torch.zeros(3)}), r"layers.0.bias has shape \[3\]; allowed: \[8\]"),
    ],
)
def test_state_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    plan = PLANS["batch 6:2"]()
    state = dict(MLP(WIDTHS).state_dict())
    change(state)

    def load(threads: Any = None) -> None:
        start(plan, MLP(WIDTHS), threads).store.load_full_state_dict(state)

    with pytest.raises(HapError, match=message):
        run_ranks(plan, load)


class Tied(nn.Module):
    """Both layers of an MLP have one bias, and it has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 3)])
        self.more = nn.Linear(5, 8, bias=False)
        self.more.weight = self.layers[0].weight
        self.register_buffer("counts", torch.arange(4))
        self.double()


def test_tied_parameters_stay_one() -> None:
    plan = PLANS["hidden 5:0:3"]()

    def tied(threads: Any = None) -> tuple[bool, dict[str, Tensor]]:
        executor = start(plan, Tied(), threads)
        module = executor.module
        assert isinstance(module, Tied)
        return module.more.weight is module.layers[0].weight, executor.store.full_state_dict()

    torch.manual_seed(0)
    for same, state in run_ranks(plan, tied):
        assert same
        assert state["more.weight"].shape == (8, 5)
        assert torch.equal(state["more.weight"], state["layers.0.weight"])
        assert torch.equal(state["counts"].double(), torch.arange(4.0, dtype=torch.float64))


class Plain(nn.Module):
    """The layers of an MLP as PyTorch initialises them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 3)]).double()


@pytest.mark.parametrize("name", PLANS)
def test_meta_model_gets_the_values_of_rank_0(name: str) -> None:
    plan = PLANS[name]()

    def states(threads: Any = None) -> dict[str, Tensor]:
        with torch.device("meta"):
            module = Plain()
        return start(plan, module, threads).store.full_state_dict()

    found = run_ranks(plan, states)
    for state in found:
        assert all(torch.equal(state[n], t) for n, t in found[0].items())
        assert float(state["layers.0.weight"].std()) > 0.1
        assert float(state["layers.0.weight"].abs().max()) <= 5**-0.5


class Lost(nn.Module):
    """Parameters that nobody can initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 3)]).double()
        self.table = nn.Parameter(torch.zeros(2))


def test_meta_model_without_initialisation_is_refused() -> None:
    plan = PLANS["batch 6:2"]()

    def build(threads: Any = None) -> None:
        with torch.device("meta"):
            module = Lost()
        start(plan, module, threads)

    with pytest.raises(LaunchError, match=r"cannot give a value to table: .* Lost has no reset_parameters"):
        run_ranks(plan, build)
