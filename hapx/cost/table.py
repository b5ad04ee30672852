"""Many terms evaluated at once.

In: terms, by number; shares. Out: a matrix, terms x kinds. Invariant: row i of `values(shares)` is `terms[i].at(shares)`.
"""

from __future__ import annotations

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
        self._compiled: tuple[int, list[Cut], Matrix, Matrix, list[int]] | None = None

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
        if self._compiled is None or self._compiled[0] != len(self.terms):
            self._compiled = self._compile()
        _, cuts, const, slopes, starts = self._compiled
        value = const
        if cuts:
            value = const + np.einsum("pck,ck->pk", slopes, np.array([shares[c] for c in cuts], dtype=float), optimize=False)
        return np.maximum.reduceat(value, starts, axis=0)

    def _compile(self) -> tuple[int, list[Cut], Matrix, Matrix, list[int]]:
        numbers: dict[Cut, int] = {}
        pieces = [piece for term in self.terms for piece in term.pieces]
        entries = [(p, numbers.setdefault(cut, len(numbers)), slope) for p, piece in enumerate(pieces) for cut, slope in piece.slopes]
        slopes = np.zeros((len(pieces), len(numbers), self.kinds))
        for p, c, slope in entries:
            slopes[p, c] += slope
        starts, at = [], 0
        for term in self.terms:
            starts.append(at)
            at += len(term.pieces)
        return len(self.terms), list(numbers), np.array([p.const for p in pieces], dtype=float), slopes, starts
