"""Cost terms: what every time and every memory number of the planner is made of.

A `Term` is, for each *kind* of devices, the maximum of a few pieces that are affine in the shares of cuts:

    term(B)[k] = max over pieces p of ( const_p[k] + sum over cuts c of slope_p,c[k] * share_c[k] ),   share = length / units in [0, 1]

(HAP section 5.2: everything is affine in the sharding ratios B of a fixed program Q; the maximum is a roofline, or the two directions of a
link.) Only cuts along the uneven axis appear; even cuts are folded into the constants and slopes when a term is built. The search evaluates
terms at rounded lengths, the balancer makes one row of its linear program from each piece, the report prints them: one cost model.

Invariant: every vector has one entry per kind, in the order of `CostModel.kinds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add, le, mul

import numpy as np
import numpy.typing as npt

from hapx.states import Cut

Vector = npt.NDArray[np.float64]
Shares = Mapping[Cut, Vector]


@dataclass(frozen=True, slots=True)
class Piece:
    """const + sum of slope * share(cut), one value per kind."""

    const: tuple[float, ...]
    slopes: tuple[tuple[Cut, tuple[float, ...]], ...] = ()

    def at(self, shares: Shares) -> Vector:
        """Value per kind at the given shares (per kind) of the cuts."""
        value = np.array(self.const)
        for cut, slope in self.slopes:
            value += np.asarray(slope) * shares[cut]
        return value

    def scaled(self, factors: Iterable[float]) -> Piece:
        """The piece with each kind's value multiplied by its factor."""
        f = tuple(factors)
        return Piece(tuple(map(mul, self.const, f)), tuple([(cut, tuple(map(mul, slope, f))) for cut, slope in self.slopes]))

    def line(self, factors: tuple[float, ...], added: tuple[float, ...]) -> Piece:
        """factors * the piece + added, kind by kind."""
        const = tuple([c * f + a for c, f, a in zip(self.const, factors, added, strict=True)])
        return Piece(const, tuple([(cut, tuple(map(mul, slope, factors))) for cut, slope in self.slopes]))

    def __add__(self, other: Piece) -> Piece:
        slopes = dict(self.slopes)
        for cut, slope in other.slopes:
            slopes[cut] = _plus(slopes[cut], slope) if cut in slopes else slope
        return Piece(_plus(self.const, other.const), tuple(slopes.items()))

    @property
    def zero(self) -> bool:
        return not any(self.const) and not any(any(slope) for _, slope in self.slopes)

    def below(self, other: Piece) -> bool:
        """Whether `other` is at least as large at all shares, coefficient by coefficient (shares are never negative)."""
        if len(self.slopes) < 2 and [c for c, _ in self.slopes] == [c for c, _ in other.slopes]:  # nearly always
            return all(map(le, self.const, other.const)) and (not self.slopes or all(map(le, self.slopes[0][1], other.slopes[0][1])))
        mine, theirs, none = dict(self.slopes), dict(other.slopes), (0.0,) * len(self.const)
        pairs = [(self.const, other.const), *((mine.get(c, none), theirs.get(c, none)) for c in {**mine, **theirs})]
        return all(a <= b for left, right in pairs for a, b in zip(left, right, strict=True))


Amounts = Sequence[tuple[Piece, float]]  # pieces, each so many times


@dataclass(frozen=True, slots=True)
class Term:
    """The maximum over pieces, per kind."""

    pieces: tuple[Piece, ...]

    def at(self, shares: Shares) -> Vector:
        """Value per kind at the given shares (per kind) of the cuts."""
        value = self.pieces[0].at(shares)
        for piece in self.pieces[1:]:
            value = np.maximum(value, piece.at(shares))
        return value

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Every cut that the term depends on, each once."""
        return tuple(dict.fromkeys(cut for piece in self.pieces for cut, _ in piece.slopes))


def maximum(pieces: Iterable[Piece]) -> Term | None:
    """The term of these pieces without those that another one covers; None if it is zero everywhere."""
    kept: list[Piece] = []
    for piece in pieces:
        if any(piece.below(other) for other in kept):
            continue
        kept = [other for other in kept if not other.below(piece)] + [piece]
    return None if all(piece.zero for piece in kept) else Term(tuple(kept))


def total(amounts: Amounts, kinds: int) -> Piece:
    """The sum of pieces, each so many times."""
    nothing = (0.0,) * kinds
    const, slopes = nothing, dict[Cut, tuple[float, ...]]()
    for piece, amount in amounts:
        const = tuple([c + amount * p for c, p in zip(const, piece.const, strict=True)])
        for cut, slope in piece.slopes:
            slopes[cut] = tuple([c + amount * p for c, p in zip(slopes.get(cut, nothing), slope, strict=True)])
    return Piece(const, tuple(slopes.items()))


def constant(values: Iterable[float]) -> Piece:
    """A piece that depends on no share."""
    return Piece(tuple(float(v) for v in values))


def _plus(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(map(add, left, right))
