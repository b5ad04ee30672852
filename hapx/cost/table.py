"""Many terms evaluated at once.

In: terms, by number; shares. Out: a matrix, terms x kinds. Invariant: row i of `values(shares)` is `terms[i].at(shares)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hapx.cost.terms import Shares, Term
from hapx.states import Cut

Matrix = npt.NDArray[np.float64]


class TermTable:
    """Terms by number, evaluated all at once: value = const + slopes x shares, then the maximum over the pieces of each term."""

    def __init__(self, kinds: int):
        self.kinds = kinds
        self.terms: list[Term] = []
        self._number: dict[int, int] = {}
        # of every piece: its constant, its first slope and the row of that one's cut among `_cuts`; further slopes; where each term begins
        self._const, self._slope, self._cut = np.zeros((0, kinds)), np.zeros((0, kinds)), np.zeros(0, dtype=np.int64)
        self._more: list[tuple[int, int, tuple[float, ...]]] = []
        self._starts = np.zeros(0, dtype=np.int64)
        self._cuts: dict[Cut, int] = {}

    def number(self, term: Term | None) -> int:
        if term is None:
            return -1
        if id(term) not in self._number:  # the table keeps every term alive, so ids are not reused
            self._number[id(term)] = len(self.terms)
            self.terms.append(term)
        return self._number[id(term)]

    def values(self, shares: Shares) -> Matrix:
        """Terms known so far x kinds."""
        if not self.terms:
            return np.zeros((0, self.kinds))
        if len(self._starts) < len(self.terms):
            self._learn(self.terms[len(self._starts) :])
        at = np.zeros((len(self._cuts) + 1, self.kinds))  # the first row: of no cut
        for cut, row in self._cuts.items():
            at[row] = shares[cut]
        value = self._const + self._slope * at[self._cut]
        for piece, row, slope in self._more:
            value[piece] += slope * at[row]
        return np.maximum.reduceat(value, self._starts, axis=0)

    def _learn(self, terms: Sequence[Term]) -> None:
        """More rows for terms that are new."""
        pieces, known, none = [piece for term in terms for piece in term.pieces], len(self._const), (0.0,) * self.kinds
        slopes = [[(self._cuts.setdefault(cut, len(self._cuts) + 1), slope) for cut, slope in piece.slopes] or [(0, none)] for piece in pieces]
        self._more += [(known + i, row, slope) for i, own in enumerate(slopes) for row, slope in own[1:]]
        lengths = [len(term.pieces) for term in terms]
        self._starts = np.concatenate([self._starts, known + np.cumsum([0, *lengths[:-1]])])
        self._const = np.concatenate([self._const, [piece.const for piece in pieces]])
        self._slope = np.concatenate([self._slope, [own[0][1] for own in slopes]])
        self._cut = np.concatenate([self._cut, [own[0][0] for own in slopes]])
