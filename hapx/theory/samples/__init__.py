"""Sample calls of every operator in the registry, for the audit (`hapx.theory.audit`).

In: nothing. Out: `SAMPLES`: small calls with the shapes, dtypes and ranges of their tensors; arguments that are left out have the
schema's defaults. `UNSAMPLED`: overloads that have none, and why. Invariant: every overload that the registry covers is in one of the two.

Sizes of different dims differ, so that a rule which mixes dims up cannot hold by chance; every dim that may be split has several units.
The modules mirror `hapx.theory.ops`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hapx.theory.samples.complex_numbers import complex_numbers, transforms
from hapx.theory.samples.convolution import convolutions, grouped, transposed
from hapx.theory.samples.creation import creation
from hapx.theory.samples.draw import Draw, Reason, Sample, Values, booleans, dtype, ids, positive, sample, t, unit
from hapx.theory.samples.dropout import dropouts
from hapx.theory.samples.einsum import contractions
from hapx.theory.samples.indexing import advanced, indexing
from hapx.theory.samples.linalg import attention, products
from hapx.theory.samples.losses import class_losses, in_order, losses, row_by_row
from hapx.theory.samples.matrices import matrices, solutions
from hapx.theory.samples.normalization import channels, groups, rows
from hapx.theory.samples.pointwise import arithmetic, binary, casts, pointwise, several, with_numbers
from hapx.theory.samples.pooling import pools, unpools
from hapx.theory.samples.random_tensors import draws
from hapx.theory.samples.recurrent import recurrent
from hapx.theory.samples.reductions import reductions, softmaxes
from hapx.theory.samples.resampling import columns, interpolations, paddings, points, shuffles
from hapx.theory.samples.routing import routing
from hapx.theory.samples.scans import diagonals, repeats, scans
from hapx.theory.samples.statistics import statistics, vectors
from hapx.theory.samples.views import pieces, views
from hapx.theory.samples.writes import writes

FAMILIES = (
    pointwise, with_numbers, arithmetic, binary, several, casts,
    products, attention, vectors, contractions, recurrent,
    convolutions, grouped, transposed,
    views, pieces, writes, repeats, diagonals, creation,
    indexing, advanced, routing, scans,
    reductions, softmaxes, statistics,
    complex_numbers, transforms, matrices, solutions,
    rows, channels, groups,
    pools, unpools,
    interpolations, paddings, shuffles, columns, points,
    losses, class_losses, row_by_row, in_order,
    dropouts, draws,
)  # fmt: skip
SAMPLES: tuple[Sample, ...] = tuple(s for family in FAMILIES for s in family())

UNDEFINED = "its values are undefined"
UNSAMPLED: Mapping[str, str] = {
    "aten.empty.memory_format": UNDEFINED,
    "aten.empty_like.default": UNDEFINED,
    "aten.new_empty.default": UNDEFINED,
}


def samples_of(target: str) -> tuple[Sample, ...]:
    """Samples of an operator ("aten.sum") or of one overload ("aten.sum.default")."""
    return tuple(s for s in SAMPLES if target in (s.call.target, s.call.op))


__all__ = ["SAMPLES", "UNSAMPLED", "Draw", "Reason", "Sample", "Values", "booleans", "dtype", "ids", "positive", "sample", "samples_of", "t", "unit"]
