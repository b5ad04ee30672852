"""The operator tables. Importing this package fills the registry."""

from hapx.theory.ops import (
    advanced_indexing,
    convolution,
    creation,
    diagonals,
    dropout,
    indexing,
    linalg,
    losses,
    normalization,
    pointwise,
    pooling,
    reductions,
    repeats,
    resampling,
    scans,
    statistics,
    vectors,
    views,
)  # fmt: skip

__all__ = [
    "advanced_indexing", "convolution", "creation", "diagonals", "dropout", "indexing", "linalg", "losses", "normalization", "pointwise", "pooling",
    "reductions", "repeats", "resampling", "scans", "statistics", "vectors", "views",
]  # fmt: skip
