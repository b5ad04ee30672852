"""Terms: affine pieces, maxima, and pieces that another one covers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hapx.cost.terms import Piece, Term, constant, maximum
from hapx.states import Cut, Row

CUT = Cut(Row("compute", 0, 0), 8)
OTHER = Cut(Row("storage", 0, 0), 4)


def test_piece_is_affine_in_the_shares():
    piece = Piece((1.0, 2.0), ((CUT, (10.0, 20.0)), (OTHER, (0.0, 4.0))))
    assert piece.at({CUT: np.array([0.5, 0.25]), OTHER: np.array([1.0, 0.5])}).tolist() == [6.0, 9.0]


def test_sum_merges_the_slopes_of_one_cut():
    total = Piece((1.0,), ((CUT, (2.0,)),)) + Piece((3.0,), ((CUT, (4.0,)), (OTHER, (5.0,))))
    assert total == Piece((4.0,), ((CUT, (6.0,)), (OTHER, (5.0,))))


def test_term_is_the_maximum_per_kind():
    term = Term((constant([1.0, 5.0]), Piece((0.0, 0.0), ((CUT, (8.0, 8.0)),))))
    assert term.at({CUT: np.array([0.5, 0.5])}).tolist() == [4.0, 5.0]
    assert term.cuts == (CUT,)


def test_a_term_that_is_zero_everywhere_is_none():
    assert maximum([constant([0.0, 0.0]), constant([0.0, 0.0])]) is None


pieces = st.builds(
    lambda const, a, b: Piece((const,), ((CUT, (a,)), (OTHER, (b,)))),
    st.floats(0, 4),
    st.floats(-2, 4),
    st.floats(-2, 4),
)


@given(st.lists(pieces, min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_dropping_covered_pieces_changes_no_value(given_pieces: list[Piece], x: float, y: float):
    shares = {CUT: np.array([x]), OTHER: np.array([y])}
    term = maximum(given_pieces)
    expected = max(p.at(shares)[0] for p in given_pieces)
    assert (0.0 if term is None else term.at(shares)[0]) == expected
