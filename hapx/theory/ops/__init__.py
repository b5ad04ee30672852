"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import (
    advanced_indexing,
    diagonals,
    einsum,
    indexing,
    linalg,
    losses,
    pointwise,
    recurrent,
    reductions,
    repeats,
    routing,
    scans,
    statistics,
    vectors,
    views,
)

__all__ = [
    "advanced_indexing",
    "diagonals",
    "einsum",
    "indexing",
    "linalg",
    "losses",
    "pointwise",
    "recurrent",
    "reductions",
    "repeats",
    "routing",
    "scans",
    "statistics",
    "vectors",
    "views",
]
