"""The peak of a program as a function of lengths, without a walk: for whoever tries many lengths of one program.

Which tensors are alive at which moment does not depend on lengths; what a device has of each is its part of a cut, and buffers of padded collectives
have the size of the largest part. So bytes at a moment are taken to be

    b_m + sum over cuts of ( own_mc  length / units  +  most_mc  max length / units ),

with coefficients that least squares give from a few walks at random lengths.

In: a program, costs, lengths to begin with. Out: bytes per kind at other lengths. Invariant: none that could be relied on: what is accepted is looked
at by a walk (`hapx.cost.liveness`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hapx.balancer.rounding import deal
from hapx.cost.liveness import moments
from hapx.cost.model import CostModel
from hapx.cost.table import Matrix
from hapx.cost.terms import Vector
from hapx.layout import Lengths
from hapx.plan import Program
from hapx.states import Cut, Placement

SEED = 0
MORE = 3  # walks beyond those that just determine what padded buffers take
SPREAD = 4.0  # of the gamma distribution of parts, relative to those at the beginning
NOTHING = 0.01  # of a cut, that who has nothing of it may get


class AffinePeak:
    """See the module. cuts: those that the program uses."""

    def __init__(self, program: Program, costs: CostModel, stored: Mapping[str, Placement], lengths: Lengths, cuts: Sequence[Cut]):
        self.program, self.costs, self.cuts = program, costs, tuple(cuts)
        rng, rows, values = np.random.default_rng(SEED), [], []
        for number in range(len(self.cuts) + 1 + MORE):
            others = {c: deal(c.units, (rng.gamma(SPREAD, size=len(own)) * (own + NOTHING)).tolist()) for c, own in self._shares(lengths).items()}
            trial = {**lengths, **others} if number else lengths
            exact = costs.at_lengths(trial)
            found = moments(program, costs.graph, exact, stored)
            rows.append(self._parts(trial)[[kind[0] for kind in exact.kinds]])
            values.append(found.T)
        parts, found_bytes = np.concatenate(rows), np.concatenate(values)
        self.coefficients, *_ = np.linalg.lstsq(parts, found_bytes, rcond=None)
        peaks = found_bytes.max(axis=1)
        self.error = float((np.abs((parts @ self.coefficients).max(axis=1) - peaks) / np.maximum(peaks, 1.0)).max())

    def at(self, lengths: Lengths) -> Vector:
        """Bytes per kind, of its fullest device."""
        peaks = (self._parts(lengths) @ self.coefficients).max(axis=1)
        return np.array([peaks[list(kind)].max() for kind in self.costs.kinds])

    def _shares(self, lengths: Lengths) -> dict[Cut, Vector]:
        return {cut: np.array(lengths[cut], dtype=float) / cut.units for cut in self.cuts}

    def _parts(self, lengths: Lengths) -> Matrix:
        """(coordinate, 1 + 2 cuts)."""
        own = np.array(list(self._shares(lengths).values()))
        most = np.broadcast_to(own.max(axis=1, keepdims=True), own.shape)
        return np.concatenate([np.ones((1, own.shape[1])), own, most]).T
