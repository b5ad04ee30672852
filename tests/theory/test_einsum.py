"""The equation of an einsum is its signature."""

from __future__ import annotations

import pytest
import torch

from hapx.theory.ops.einsum import einsum_terms
from hapx.theory.samples import sample, t
from support.claims import claims


@pytest.mark.parametrize("equation", ["ba", "ab,bc", "...a,...b", "bB", "aab,bc", "i j -> j", "i...->", "ij...->...j"])
def test_terms_are_those_of_torch(equation: str) -> None:
    terms, result = einsum_terms(equation)
    operands = [torch.randn(*(2 + ord(c) % 3 for c in term.replace("...", ""))) for term in terms]
    explicit = torch.einsum(f"{','.join(terms)}->{result}", *operands)
    assert torch.equal(explicit, torch.einsum(equation, *operands))


def test_dispatch_to_experts() -> None:
    """Of groups g, tokens s, experts e and slots c. Splitting tokens leaves a sum open, splitting experts needs no token twice."""
    found = claims(sample("einsum", equation="gsec,gsm->egcm", tensors=[t(4, 3, 6, 2), t(4, 3, 5)]))
    assert {"S0[4] S0[4] -> S1[4]", "S1[3] S1[3] -> P", "S2[6] R -> S0[6]", "S3[2] R -> S2[2]", "R S2[5] -> S3[5]", "P R -> P", "R P -> P"} <= set(
        found
    )


def test_a_repeated_index_is_whole() -> None:
    found = set(claims(sample("einsum", equation="iij,kj->ki", tensors=[t(4, 4, 6), t(3, 6)])))
    assert {"S2[6] S1[6] -> P", "R S0[3] -> S0[3]"} <= found
    assert not any(rule.startswith(("S0", "S1")) for rule in found)


def test_an_ellipsis_that_is_not_in_the_result_is_summed() -> None:
    assert {"S0[4] -> P", "S1[3] -> P", "S2[2] -> P"} <= set(claims(sample("einsum", equation="i...->", tensors=[t(4, 3, 2)])))
