"""How much of the sums of gradients counts in a search, where the rest is taken to run behind backward; see `hapx.overlap`."""

from __future__ import annotations

from typing import NamedTuple

ALIKE = 0.05  # parts that differ by less are searched with once


class Exposed(NamedTuple):
    """Parts of seconds, from 0 to 1. cutting: of sums over all devices, or between machines; inside: of those along the inner axis of two levels,
    which has links of its own."""

    cutting: float
    inside: float

    @staticmethod
    def alike(part: float) -> Exposed:
        """The same part of all sums."""
        return Exposed(part, part)

    def of(self, cuts: bool) -> float:
        """Of communication that ends phases, or does not."""
        return self.cutting if cuts else self.inside

    def like(self, other: Exposed) -> bool:
        """Whether it hardly differs from another."""
        return max(abs(self.cutting - other.cutting), abs(self.inside - other.inside)) <= ALIKE


ALL, NONE, BETWEEN = Exposed(1.0, 1.0), Exposed(0.0, 0.0), Exposed(1.0, 0.0)
