"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import (
    advanced_indexing,
    creation,
    diagonals,
    indexing,
    linalg,
    losses,
    pointwise,
    reductions,
    repeats,
    scans,
    statistics,
    vectors,
    views,
)

__all__ = [
    "advanced_indexing", "creation", "diagonals", "indexing", "linalg", "losses", "pointwise", "reductions", "repeats", "scans", "statistics",
    "vectors", "views",
]  # fmt: skip
