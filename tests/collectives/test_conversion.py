"""Conversions: all twenty pairs of states, forward and transposed, against whole tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
import torch

from hapx.collectives import Conversion, run_threads
from hapx.errors import PlanError
from hapx.layout import Block
from hapx.plan import Communication, Form
from hapx.states import INVARIANT, PARTIAL, REPLICATED, Row, Sharded
from hapx.transposes import COLLECTIVES, TRANSPOSES, backward_collective, forward_collective
from support.local_tensors import Case, Held, indices_of, sharded, whole

FORMS = (Form.PADDED, Form.GROUPED, Form.POINT_TO_POINT)
KINDS = ("R", "I", "P", "S0", "S2")
PAIRS = tuple(permutations(KINDS, 2))


def geometry(m: int, seed: int) -> tuple[torch.Tensor, dict[str, Held]]:
    """A random tensor and every state of it, with uneven lengths, zeros, several blocks and grains."""
    g = torch.Generator().manual_seed(seed)

    def draw(high: int, low: int = 0) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    held = {"R": Held(REPLICATED), "I": Held(INVARIANT), "P": Held(PARTIAL)}
    for name, dim in (("S0", 0), ("S2", 2)):
        lengths = [draw(3) for _ in range(m)]
        if seed == 0:
            lengths = [0] * m  # nobody has anything
        elif not sum(lengths):
            lengths[-1] = 2
        held[name] = sharded(dim, lengths, outer=draw(3, 1), inner=draw(3, 1))
    shape = (held["S0"].block.size, 2, held["S2"].block.size, 3)
    return torch.randn(shape, dtype=torch.float64, generator=g), held


def conversion_case(e: torch.Tensor, source: Held, target: Held, form: Form = Form.PADDED, **changes: str) -> Case:
    """`changes`: attributes of the Conversion to overwrite."""

    def operator(comm, x):
        conversion = Conversion(Communication(0, source.state, target.state, form, True), comm, source.block, target.block, "x")
        for name, value in changes.items():
            setattr(conversion, name, value)
        return conversion(x)

    return Case(((e, source, True),), target, operator, lambda x: x.clone())


@pytest.mark.parametrize("pair", PAIRS, ids="->".join)
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_every_pair_is_right_forward_and_transposed(pair, m):
    for seed in range(4):
        e, held = geometry(m, seed)
        for form in FORMS if seed == 1 else FORMS[:1]:
            conversion_case(e, held[pair[0]], held[pair[1]], form).check(m, seed)


@pytest.mark.parametrize("lengths", [((3, 0, 1), (1, 2, 1)), ((0, 4, 0), (2, 1, 1)), ((1, 1, 2), (0, 0, 4))])
def test_one_dim_cut_in_another_way(lengths):
    e = torch.randn(2, 24, dtype=torch.float64)
    conversion_case(e, sharded(1, lengths[0], outer=3, inner=2), sharded(1, lengths[1], outer=1, inner=6)).check(3)
    conversion_case(e, sharded(1, lengths[0], outer=3, inner=2), sharded(1, lengths[1], outer=2, inner=3)).check(3)


@pytest.mark.parametrize("lengths", [((3, 0, 1), (1, 2, 1)), ((0, 4, 0), (2, 1, 1)), ((1, 1, 2), (0, 0, 4)), ((2, 1, 1), (2, 1, 1))])
@pytest.mark.parametrize(("dim", "outer", "inner"), [(0, 1, 1), (0, 3, 2), (1, 1, 1), (1, 2, 3)])
def test_one_split_in_other_lengths(lengths, dim, outer, inner):
    size = 4 * outer * inner
    e = torch.randn((size, 3) if dim == 0 else (2, size, 3), dtype=torch.float64)
    one, other = (sharded(dim, own, outer=outer, inner=inner) for own in lengths)
    again = Held(replace(other.state, cut=replace(other.state.cut, row=Row("compute", 1, 0))), other.block)
    conversion_case(e, one, again).check(3)


WRONG_BACKWARD = [
    ("P", "I", "all_reduce"), ("I", "P", "mask"), ("I", "R", "none"), ("R", "I", "none"), ("P", "R", "none"), ("R", "P", "none"),
    ("S0", "R", "slice"), ("S0", "I", "reduce_scatter"), ("S0", "P", "reduce_scatter"),
    ("R", "S0", "all_gather"), ("I", "S0", "pad"), ("P", "S0", "pad"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "target", "name"), WRONG_BACKWARD)
def test_a_wrong_transpose_is_found(source, target, name):
    e, held = geometry(3, 1)
    conversion_case(e, held[source], held[target]).check(3)
    with pytest.raises(AssertionError, match=r"gradient of input 0 differs|copies differ"):
        conversion_case(e, held[source], held[target], backward_name=name).check(3)


def test_forgotten_blocks_are_found():
    """A fused projection (three blocks) gathered as if it were one."""
    e = torch.randn(12, 2, dtype=torch.float64)
    right, plain = sharded(0, (3, 1), outer=3), Block(0, 1, (9, 3), 1)
    conversion_case(e, right, Held(REPLICATED)).check(2)
    with pytest.raises(AssertionError, match="value differs"):
        conversion_case(e, right, Held(REPLICATED), source_block=plain).check(2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.bool, torch.bfloat16])
def test_other_dtypes_forward(dtype):
    e = (torch.arange(24).reshape(6, 4) % 3).to(dtype)
    for source, target in ((sharded(0, (4, 0, 2)), Held(REPLICATED)), (sharded(0, (1, 2, 0), inner=2), sharded(1, (0, 1, 3)))):

        def convert(comm, source=source, target=target):
            conversion = Conversion(Communication(0, source.state, target.state, Form.GROUPED, False), comm, source.block, target.block, "ids")
            return conversion(e.index_select(source.block.dim, indices(source, comm.rank)))

        results = run_threads(3, convert)
        for rank, result in enumerate(results):
            assert result.dtype == dtype
            expected = e if target.block is None else e.index_select(1, indices(target, rank))
            assert torch.equal(result, expected)


def indices(held: Held, rank: int) -> torch.Tensor:
    assert held.block is not None
    return indices_of(held.block, rank)


def test_a_shard_is_no_view_of_the_whole():
    x = torch.randn(4, 2)
    held = sharded(0, (1, 3))

    def convert(comm):
        return Conversion(Communication(0, REPLICATED, held.state, Form.NONE, True), comm, None, held.block, "x")(x)

    shards = run_threads(2, convert)
    assert torch.equal(whole(shards, held), x)
    assert all(s.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() and s.is_contiguous() for s in shards)


def test_without_gradient_the_result_is_a_constant():
    x = torch.randn(2, requires_grad=True)

    def convert(comm):
        return Conversion(Communication(0, PARTIAL, REPLICATED, Form.NONE, False), comm, None, None, "x")(x)

    assert not any(y.requires_grad for y in run_threads(2, convert))


def test_what_does_not_fit_is_refused():
    held, comm = sharded(0, (1, 3)), run_threads(2, lambda c: c)[0]
    with pytest.raises(PlanError, match="no communication leads"):
        Conversion(Communication(0, REPLICATED, REPLICATED, Form.NONE, True), comm, None, None, "h")
    with pytest.raises(PlanError, match="does not fit its cut None"):
        Conversion(Communication(0, held.state, REPLICATED, Form.PADDED, True), comm, None, None, "h")
    with pytest.raises(PlanError, match="on 2 devices"):
        Conversion(Communication(0, held.state, REPLICATED, Form.PADDED, True), comm, Block(0, 1, (1, 2, 1), 1), None, "h")
    with pytest.raises(PlanError, match="has no form"):
        Conversion(Communication(0, INVARIANT, held.state, Form.NONE, True), comm, None, held.block, "h")


def test_it_prints_as_a_person_wants_to_read_it():
    held, comm = sharded(0, (1, 3)), run_threads(2, lambda c: c)[1]
    text = repr(Conversion(Communication(0, held.state, REPLICATED, Form.GROUPED, True), comm, held.block, None, "h1"))
    assert text == "Conversion(h1: S0[4]->R@0 grouped, forward / backward: all_gather / reduce_scatter, dim 0 as 1+3, device 1 of 2)"


def test_the_table_is_complete_and_names_collectives():
    states = {"R": REPLICATED, "I": INVARIANT, "P": PARTIAL, "S0": sharded(0, (1, 1)).state, "S2": sharded(2, (1, 1)).state}
    assert len({(type(a), type(b)) for a, b in permutations(states.values(), 2)}) == len(TRANSPOSES) == 13
    assert forward_collective(states["S0"], REPLICATED) == "all_gather" and backward_collective(states["S0"], REPLICATED) == "reduce_scatter"
    assert forward_collective(INVARIANT, REPLICATED) is None and backward_collective(INVARIANT, REPLICATED) == "all_reduce"
    assert forward_collective(states["S0"], states["S0"]) is None
    for a, b in permutations(states.values(), 2):
        # free conversions communicate in neither direction: from Replicated to anything, from anything to Partial
        free = forward_collective(a, b) is None and backward_collective(a, b) is None
        assert free == (a == REPLICATED or b == PARTIAL), (a, b)
        assert {forward_collective(a, b), backward_collective(a, b)} <= COLLECTIVES | {None}
        assert isinstance(a, Sharded) or forward_collective(a, b) != "all_gather"
