"""Signatures are parsed once, and a malformed one is refused."""

from __future__ import annotations

import pytest

from hapx.theory.signature import Operand, may_split, parse


def test_operands_and_outputs() -> None:
    s = parse("input: * k, weight: n k, bias: n -> * n")
    assert [o.name for o in s.operands] == ["input", "weight", "bias"]
    assert s.operands[0] == Operand("input", ("*", "k"))
    assert [o.tokens for o in s.outputs] == [("*", "n")]


def test_starred_dims_are_aligned_from_the_right() -> None:
    operand = parse("input: * k, other: k -> *").operands[0]
    assert operand.indices(4) == ("*3", "*2", "*1", "k")
    assert operand.indices(1) == ("k",)


def test_a_call_without_operands_and_a_scalar() -> None:
    assert parse("-> m").operands == ()
    assert parse("self: k, tensor: k -> ").outputs[0].tokens == ()


def test_several_outputs() -> None:
    assert [o.tokens for o in parse("self: a b -> a b, b").outputs] == [("a", "b"), ("b",)]


def test_uppercase_is_whole() -> None:
    assert may_split("k") and may_split("*2") and not may_split("K") and not may_split("D0")


@pytest.mark.parametrize("bad", ["self: m k", "m k -> m", "self: * m * -> m", "self: m-k -> m"])
def test_malformed_signatures_are_refused(bad: str) -> None:
    with pytest.raises(AssertionError):
        parse(bad)


def test_a_rank_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError):
        parse("self: m k -> m").operands[0].indices(3)
